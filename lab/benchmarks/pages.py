"""Records, tables of them in Markdown, and the pages that have those tables between two markers.

It imports only the standard library, so that a test can compare pages with records.
"""

import argparse
import datetime
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
RECORDED = ROOT / "lab" / "benchmarks" / "recorded"

Pages = Mapping[pathlib.Path, str]
"""The text of each page."""


# Records


def newest(kind: str) -> dict[str, Any]:
    """The newest record of a kind; empty if there is none."""
    path = max(RECORDED.glob(f"{kind}-*.json"), default=None)
    return {} if path is None else json.loads(path.read_text())


def parts(kind: str) -> dict[str, Any]:
    """What the newest record of a kind has, part by part."""
    found: dict[str, Any] = newest(kind).get("results", {}).get(kind, {})
    return found


def keep(
    kind: str,
    found: Mapping[str, Any],
    content: Mapping[str, Any],
    order: Callable[[Iterable[str]], Iterable[str]] = list,
) -> pathlib.Path:
    """Record parts in place of the earlier record, whose other parts stay; return the file.

    Args:
        kind: what the names of files begin with.
        found: the parts that were measured now.
        content: what else the record has: machine, versions, arguments.
        order: the parts to keep, in their order.
    """
    earlier, kept = list(RECORDED.glob(f"{kind}-*.json")), {**parts(kind), **found}
    path = RECORDED / f"{kind}-{datetime.date.today()}.json"
    results = {kind: {name: kept[name] for name in order(kept)}}
    path.write_text(json.dumps({**content, "results": results}, indent=1) + "\n")
    for each in earlier:
        if each != path:
            each.unlink()
    return path


def model_name(arguments: Mapping[str, Any]) -> str:
    """The name of a real model without its folder."""
    is_random = arguments["model"] in (None, "none")
    return "a random model" if is_random else pathlib.Path(arguments["model"]).name


def records_by_model(kind: str) -> list[dict[str, Any]]:
    """The newest record of each model."""
    found: dict[str, Any] = {}
    for path in sorted(RECORDED.glob(f"{kind}-*.json")):
        record = json.loads(path.read_text())
        model = model_name(record.get("arguments", record))
        found[model] = max(record, found.get(model, record), key=lambda each: str(each["date"]))
    return [*found.values()]


def measured_at(record: Mapping[str, Any]) -> str:
    """Machine, versions and date of a record."""
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
    return f"{record['hardware']['cpu']}, {versions}, {record['date'][:10]}"


# Pages


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "---") -> str:
    """A table, with an alignment of all columns but the first."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    # The heading of the first column may be empty.
    return "\n".join([lines[0].replace("|  |", "| |", 1), f"|---|{f'{align}|' * (len(head) - 1)}", *lines[1:]])


Column = tuple[str, Callable[[Mapping[str, Any]], str]]
"""A heading, and what stands below it of an entry."""


def shown(heading: str, key: str, form: str = ".2f", scale: float = 1) -> Column:
    """A column of a figure; empty where an entry lacks it."""

    def cell(entry: Mapping[str, Any]) -> str:
        return "" if entry.get(key) is None else f"{entry[key] if scale == 1 else entry[key] * scale:{form}}"

    return heading, cell


def table(first: str, found: Mapping[str, Mapping[str, Any]], columns: Sequence[Column], align: str = "---") -> str:
    """A table with a row for each entry, whose names stand below `first`."""
    rows = [[name, *(cell(entry) for _, cell in columns)] for name, entry in found.items()]
    return markdown([first, *(heading for heading, _ in columns)], rows, align)


def between(page: str, begin: str, end: str, content: str) -> str:
    """A page with other text between two markers. Raises `ValueError` if the page lacks them."""
    before, found, rest = page.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"The page must have {begin} and {end}, got none.")
    return f"{before}{begin}\n\n{content}\n\n{end}{rest.partition(end)[2]}"


def markers(name: str, script: str) -> tuple[str, str]:
    """What stands before and behind the text that a script writes into a page."""
    return f"<!-- {name}: written by lab/benchmarks/{script}.py -->", f"<!-- end of {name} -->"


def written(script: str, texts: Mapping[tuple[pathlib.Path, str], str]) -> Pages:
    """Pages with the texts of a script.

    Args:
        script: its name.
        texts: by page, and by the name in the markers.
    """
    found: dict[pathlib.Path, str] = {}
    for (path, name), text in texts.items():
        found[path] = between(found.get(path) or path.read_text(), *markers(name, script), text)
    return found


def write_pages(pages: Pages) -> None:
    for path, text in pages.items():
        path.write_text(text)
        print(f"written: {path}")


def options(doc: str | None, pages: Callable[[], Pages]) -> argparse.ArgumentParser:
    """A parser with `--write`, which writes pages from the records and measures nothing."""

    class Write(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
            write_pages(pages())
            parser.exit()

    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", nargs=0, action=Write, help="write the records into their pages, and stop")
    return parser
