"""How `kvlayers inspect` shows a directory of a prefix store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text
from rich.tree import Tree

from kvlayers.errors import CachePathError
from kvlayers.prefix.backends import existing_backend
from kvlayers.prefix.keys import LABEL_PREFIX
from kvlayers.prefix.report import DirectoryReport, PrefixNode, PrefixTree, readable_age, report_on
from kvlayers.utils.units import readable_bytes

LABEL_DIGITS = 12
"""Digits that are shown of the digest of a model and a namespace."""


def inspected(directory: str, console: Console) -> DirectoryReport:
    """Read a directory, with a progress bar on a terminal.

    Raises:
        CachePathError: it cannot be reached, or no file in it is that of an entry.
        OptionError: it is a URL of an unknown scheme, or of one whose package is not installed.
    """
    backend = existing_backend(directory, None)
    with _bar(console) as progress:
        found = report_on(backend, progress)
    if not found.entries and not found.problems:
        raise CachePathError(
            f"{found.directory} has no entries of a prefix store: name the directory of a store, or a saved cache."
        )
    return found


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("reading entries"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show(console: Console, found: DirectoryReport) -> None:
    """Draw what a directory holds, and say what is wrong with it."""
    title = Text(found.directory, style="bold")
    title.append(f"\n{_summary(found)}", style="not bold")
    console.print(drawn(found.tree, title), soft_wrap=True)
    if found.unreferenced:
        nbytes = readable_bytes(sum(file.nbytes for file in found.unreferenced))
        console.print(
            f"No entry refers to {_count(len(found.unreferenced), 'block')} ({nbytes}). A store deletes such blocks an "
            "hour after they were used.",
            highlight=False,
        )
    for problem in found.problems:
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)


def _summary(found: DirectoryReport) -> str:
    counts = f"{_count(found.entries, 'entry', 'entries')}, {_count(found.tokens, 'token')}"
    apart = f", {readable_bytes(found.unshared_nbytes)} if they shared nothing" if found.entries > 1 else ""
    return f"{counts}, {readable_bytes(found.nbytes)}{apart}"


def drawn(tree: PrefixTree, title: Text) -> Tree:
    """The drawing of a tree: a line for each run of tokens, below the tokens before them."""
    top = Tree(title, guide_style="dim")
    pending = [(top, node) for node in reversed(tree.children)]
    while pending:
        branch, node = pending.pop()
        below = branch.add(_line(node))
        pending += [(below, child) for child in reversed(node.children)]
    return top


def _line(node: PrefixNode) -> Text:
    if node.label:
        return Text(f"model and namespace {short_label(node.label)}", style="cyan")
    held = node.nbytes + node.file_bytes
    line = Text(f"{_count(node.tokens, 'token')}, {readable_bytes(held)}")
    if not node.is_entry:
        return line.append(", shared", style="dim")
    if node.hits:
        line.append(f", {_count(node.hits, 'hit')}")
    if node.age is not None:
        line.append(f", used {readable_age(node.age)} ago", style="green")
    if node.pinned:
        line.append(", pinned", style="magenta")
    return line


def short_label(label: str) -> str:
    """The first digits of the digest of a model and a namespace. Anybody may have written it, so it is made printable.

    Example:
        >>> short_label("kvlayers.prefix:0123456789abcdef")
        '0123456789ab'
    """
    digits = label.removeprefix(LABEL_PREFIX)[:LABEL_DIGITS]
    return digits if digits.isprintable() else ascii(digits)


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def as_json(found: DirectoryReport) -> dict[str, Any]:
    """All that is known, for machines. `parent` is the place of a node's parent in the list of nodes."""
    nodes: list[dict[str, Any]] = []
    pending: list[tuple[int | None, PrefixNode]] = [(None, node) for node in reversed(found.tree.children)]
    while pending:
        parent, node = pending.pop()
        pending += [(len(nodes), child) for child in reversed(node.children)]
        label = short_label(node.label) if node.label else None
        nodes.append(
            {
                "parent": parent,
                "label": label,
                "tokens": node.tokens,
                "nbytes": node.nbytes + node.file_bytes,
                "is_entry": node.is_entry,
                "age": node.age,
            }
        )
    return {
        "directory": found.directory,
        "entries": found.entries,
        "tokens": found.tokens,
        "nbytes": found.nbytes,
        "unshared_nbytes": found.unshared_nbytes,
        "nodes": nodes,
        "unreferenced_blocks": [{"name": file.name, "nbytes": file.nbytes} for file in found.unreferenced],
        "problems": list(found.problems),
    }
