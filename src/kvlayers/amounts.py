"""Bytes and tokens as people read them."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable_bytes(count: float) -> str:
    """Bytes in the largest unit of which there is one, in three digits or four.

    Example:
        >>> readable_bytes(3 * 2**29), readable_bytes(1000 * 2**20), readable_bytes(10)
        ('1.50 GiB', '1000 MiB', '10 B')
    """
    unit = 0
    while count >= 1024 and unit + 1 < len(_UNITS):
        count, unit = count / 1024, unit + 1
    decimals = 0 if unit == 0 or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{decimals}f} {_UNITS[unit]}"


def plain_table(rows: list[tuple[str, ...]]) -> str:
    """Rows below a head, in columns as wide as they need: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def aligned(row: tuple[str, ...]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *others])

    return "\n".join(map(aligned, rows))
