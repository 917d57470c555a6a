"""Tabulates the results of `nox -s matrix`: `matrix_table.py .nox/results/whole 5.17.0 5.23.0 [--record PAGE]`.

With `--part torch` it tabulates the results of `nox -s newest_torch`. The page has both tables; recording one of them
keeps the other.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("transformers", "torch", "python", "passed", "skipped", "failed", "minutes")
NUMBERS = ("passed", "skipped", "failed", "minutes")

INTRODUCTIONS = {
    "transformers": """\
# The test matrix

kvlayers works on all versions of transformers from 4.57 on. The whole test suite was run on each of these, in an
environment of its own.
`nox -s matrix` runs it, and `nox -s matrix_record` writes this table: see `CONTRIBUTING.md`.""",
    "torch": """\
## The newest torch

The core of the suite, with all tests of attention, quantizers, stores and caches that are not slow, on the newest torch
and triton of PyPI. `nox -s newest_torch` runs it and writes this table.""",
}
"""The parts of the page, in order, and the text before the table of each."""


def main() -> None:
    """Print the table for some versions, or write the page that records it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="directory with a file VERSION.json for each version")
    parser.add_argument("versions", nargs="+", help="versions of transformers, a row each")
    parser.add_argument("--record", type=Path, metavar="PAGE", help="write a page of Markdown, with dates and machine")
    parser.add_argument("--part", choices=INTRODUCTIONS, default="transformers", help="the part of the page")
    arguments = parser.parse_args()
    found = {version: read(arguments.results / f"{version}.json") for version in arguments.versions}
    if arguments.record is None:
        show([row(version, result, COLUMNS) for version, result in found.items()])
        return
    finished = [result for result in found.values() if result is not None]
    if len(finished) < len(found):
        missing = ", ".join(version for version, result in found.items() if result is None)
        sys.exit(
            f"{Path(__file__).name}: there is no finished run of the whole suite on {missing}: run `nox -s matrix` "
            "first, with nothing after `--`."
        )
    if failed := [version for version, result in found.items() if result is not None and result["failed"]]:
        sys.exit(f"{Path(__file__).name}: tests failed on {', '.join(failed)}: fix them first.")
    columns = (*COLUMNS, "date", "commit")
    table = markdown([row(version, result, columns) for version, result in found.items()], columns)
    machines = "; ".join(dict.fromkeys(result["machine"] for result in finished))
    section = f"{INTRODUCTIONS[arguments.part]}\n\n{table}\n\nMachine: {machines}.\n"
    before, heading, after = arguments.record.read_text().partition("## The newest torch")
    parts = {"transformers": before, "torch": heading + after, arguments.part: section}
    arguments.record.write_text("\n".join(part.strip() + "\n" for part in parts.values() if part))
    print(arguments.record)


def read(file: Path) -> dict[str, Any] | None:
    """The result of a run, `None` if it did not finish."""
    result: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return result


def row(version: str, result: dict[str, Any] | None, columns: tuple[str, ...]) -> list[str]:
    """The cells of one version."""
    if result is None:
        return [version, "did not finish", *[""] * (len(columns) - 2)]
    shown = {**result, "minutes": f"{result['minutes']:.1f}"}
    return [str(shown[column]) for column in columns]


def show(rows: list[list[str]]) -> None:
    """Print a table: with rich if it is installed beside nox, otherwise as Markdown."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(markdown(rows, COLUMNS))
        return
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    for cells in rows:
        clean = cells[COLUMNS.index("failed")] == "0"
        table.add_row(*cells, style=None if clean else "red")
    Console().print(table)


def markdown(rows: list[list[str]], columns: tuple[str, ...]) -> str:
    """A table in Markdown, with aligned columns."""
    rule = ["---:" if column in NUMBERS else "---" for column in columns]
    lines = [list(columns), rule, *rows]
    widths = [max(len(cells[index]) for cells in lines) for index in range(len(columns))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for cells in lines
    )


if __name__ == "__main__":
    main()
