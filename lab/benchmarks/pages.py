"""Tables of records in Markdown, and the pages that have them between two markers.

It imports only the standard library, so that a test can compare pages with records.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
RECORDED = ROOT / "lab" / "benchmarks" / "recorded"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "---") -> str:
    """A table, with an alignment of all columns but the first."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    # The heading of the first column may be empty.
    return "\n".join([lines[0].replace("|  |", "| |", 1), f"|---|{f'{align}|' * (len(head) - 1)}", *lines[1:]])


def between(page: str, begin: str, end: str, content: str) -> str:
    """A page with other text between two markers. Raises `ValueError` if the page lacks them."""
    before, found, rest = page.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"The page must have {begin} and {end}, got none.")
    return f"{before}{begin}\n\n{content}\n\n{end}{rest.partition(end)[2]}"


def measured_at(record: Mapping[str, Any]) -> str:
    """Machine, versions and date of a record."""
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
    return f"{record['hardware']['cpu']}, {versions}, {record['date'][:10]}"


def records_by_model(kind: str) -> list[dict[str, Any]]:
    """The newest record of each model."""
    newest: dict[str, Any] = {}
    for path in sorted(RECORDED.glob(f"{kind}-*.json")):
        record = json.loads(path.read_text())
        newest[pathlib.Path(record["arguments"]["model"]).name] = record
    return [*newest.values()]


def write_pages(pages: Mapping[pathlib.Path, str]) -> int:
    """Write pages; return the exit code."""
    for path, text in pages.items():
        path.write_text(text)
        print(f"written: {path}")
    return 0
