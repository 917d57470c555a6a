"""Numbers of bytes and tokens as people write and read them, and tables for people."""

import html
import re
from collections.abc import Sequence
from fractions import Fraction

from kvlayers.errors import OptionError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

MOST = 2**62
"""More tokens or bytes than any machine has. Torch counts in 64 bits."""

_TOKENS = {"": 1, "k": 2**10, "m": 2**20}
# A text without a unit may mean megabytes.
_BYTES = {"b": 1} | {
    letter + ending: base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def readable_bytes(count: float) -> str:
    """Bytes in the largest unit that gives at least 1, with three or four digits.

    Example:
        >>> readable_bytes(3 * 2**29), readable_bytes(1000 * 2**20), readable_bytes(10)
        ('1.50 GiB', '1000 MiB', '10 B')
    """
    unit = 0
    while count >= 1024 and unit + 1 < len(_UNITS):
        count, unit = count / 1024, unit + 1
    decimals = 0 if unit == 0 or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{decimals}f} {_UNITS[unit]}"


def tokens(given: int | str, name: str) -> int:
    """A number of tokens: 32768, or a text such as "32768", "32k" or "1M", by powers of 1024.

    A number is returned as it is, for the caller to check.

    Args:
        given: the number or the text.
        name: what a user calls the argument.

    Raises:
        OptionError: the text is not a number of tokens.

    Example:
        >>> tokens("32k", "max_cache_len"), tokens(100, "max_cache_len")
        (32768, 100)
    """
    if not isinstance(given, str):
        return given
    return _quantity(given, _TOKENS, f"`{name}` must be a number of tokens, such as 4096, 32k or 1M")


def amount_of_bytes(given: float | str, name: str) -> int:
    """A number of bytes: 1024, 1e9, or a text such as "24GiB", "24G" (the same), "24GB" by powers of 1000, or "24B".

    A whole float such as 1e9 becomes an `int`. Any other number is returned as it is, for the caller to check. A text
    must have a unit.

    Args:
        given: the number or the text.
        name: what a user calls the argument.

    Raises:
        OptionError: the text is not a number of bytes with its unit.

    Example:
        >>> amount_of_bytes("1.5 GiB", "memory"), amount_of_bytes("2kB", "memory"), amount_of_bytes(1e3, "memory")
        (1610612736, 2000, 1000)
    """
    if not isinstance(given, str):
        return int(given) if isinstance(given, float) and given.is_integer() else given  # type: ignore[return-value]
    return _quantity(given, _BYTES, f"`{name}` must be a number of bytes with its unit, such as 24GiB, 512MiB or 100B")


def bytes_or_share(given: float | str, name: str) -> int | Fraction:
    """A number of bytes as in `amount_of_bytes`, or a share of what is held in full precision, such as "50%".

    Args:
        given: the number or the text.
        name: what a user calls the argument.

    Raises:
        OptionError: the text is neither, or the share is not between 0 and 100 percent.

    Example:
        >>> bytes_or_share("50%", "memory"), bytes_or_share("1kB", "memory")
        (Fraction(1, 2), 1000)
    """
    if not isinstance(given, str) or not given.rstrip().endswith("%"):
        return amount_of_bytes(given, name)
    if share := share_of(given):
        return share
    raise OptionError(
        f"`{name}` must be a number of bytes, such as 24GiB, or a share of full precision up to 100%, such as 50%, "
        f"got {given!r}: pass one of them."
    )


def share_of(given: object) -> Fraction | None:
    """The share that a text such as "50%" names, from 0 to 1; `None` for anything else.

    Example:
        >>> share_of("12.5%"), share_of("101%"), share_of(1)
        (Fraction(1, 8), None, None)
    """
    found = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,9})?)\s*%\s*", given) if isinstance(given, str) else None
    return Fraction(found[1]) / 100 if found and Fraction(found[1]) <= 100 else None


def _quantity(text: str, units: dict[str, int], requirement: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].lower() not in units:
        raise OptionError(
            f"{requirement}, got {text!r}: pass such a number"
            f"{'; a path or a URL goes by `directory`' if '/' in text and units is _BYTES else ''}."
        )
    amount = int(Fraction(found[1]) * units[found[2].lower()])
    if amount > MOST:
        raise OptionError(f"{requirement}, got more than any machine has: {text[:20]}.")
    return amount


def exact_bytes(count: float) -> str:
    """Bytes as people read them, with the exact number if it differs, for errors that name a size to pass.

    Example:
        >>> exact_bytes(3 * 2**29), exact_bytes(10), exact_bytes(4320.5)
        ('1.50 GiB (1610612736 bytes)', '10 bytes', '4.22 KiB (4320.5 bytes)')
    """
    number = f"{int(count) if count == int(count) else count} bytes"
    return f"{readable_bytes(count)} ({number})" if count >= 1024 else number


def html_table(caption: str, rows: Sequence[tuple[str, ...]], bold: Sequence[int] = ()) -> str:
    """A table of HTML from a header and rows. Cells are escaped.

    Args:
        caption: text above the table.
        rows: the header, then the rows.
        bold: indices of rows in bold, counted without the header.
    """

    def row(cells: Sequence[str], tag: str, style: str = "") -> str:
        return f"<tr{style}>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    head, *others = rows
    body = "".join(
        row(cells, "td", ' style="font-weight: bold"' if index in bold else "") for index, cells in enumerate(others)
    )
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table>"
    )


def plain_table(rows: list[tuple[str, ...]]) -> str:
    """A plain-text table from a header and rows: the first column is left-aligned, the others right-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    line = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(line.format(*row) for row in rows)
