"""How `kvlayers inspect` shows a saved cache, or a directory of a prefix store."""

import itertools
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvlayers.commands.console import plain, print_json
from kvlayers.errors import CachePathError
from kvlayers.persistence import CacheFile, inspect_cache
from kvlayers.prefix.keys import LABEL_PREFIX
from kvlayers.prefix.report import PrefixNode, PrefixTree, readable_age
from kvlayers.serving.reports import DirectoryReport, report_on
from kvlayers.utils.units import readable_bytes

LABEL_DIGITS = 12
"""Digits that are shown of the digest of a model and a namespace."""


def show_file(path: str, as_json: bool) -> bool:
    """Describe a saved cache. Returns whether it is whole, as it is if nothing is raised.

    Raises:
        CacheFileError: it is damaged, or no saved cache.
        CachePathError: it does not exist, or cannot be read.
    """
    found = inspect_cache(path)
    if as_json:
        print_json(found)
    else:
        Console().print(_table(found))
    return True


def _table(found: CacheFile) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    model = (found.model_name, found.model_commit, found.weights_id, (found.model or {}).get("model_type"))
    groups = ((kind, len(list(same))) for kind, same in itertools.groupby(found.layers))
    rows = {
        "cache": found.kind,
        "layers": ", ".join(f"{count} x {kind}" for kind, count in groups),
        "tokens": str(found.length),
        "batch": str(found.batch_size),
        "bits": _bits(found),
        "dtype of states": str(plain(found.dtype) or "several"),
        "file size": readable_bytes(found.nbytes),
        "token ids": "in the file" if found.has_token_ids else "not in the file",
        "metadata": ", ".join(found.metadata) or "none",
        "loads with": "the model's config" if found.needs_config else "nothing else",
        "prefixes": "can be loaded" if found.has_prefixes else "cannot be loaded",
        "model": ", ".join(str(fact) for fact in model if fact) or "unknown",
        "made by": ", ".join(f"{package} {version}" for package, version in found.versions.items()),
        "fingerprint": found.fingerprint,
        "checksum": found.checksum,
    }
    for name, content in rows.items():
        # A file may contain anything, so its text is never read as markup.
        table.add_row(name, escape(content))
    return table


def _bits(found: CacheFile) -> str:
    """Bits and backend of the quantized layers; consecutive layers with the same bits are one range."""
    layers = enumerate(zip(found.bits, found.backends, strict=True))
    parts = []
    for (bits, backend), same in itertools.groupby(layers, key=lambda layer: layer[1]):
        indices = [index for index, _ in same]
        if bits is None:
            continue
        keys, values = bits
        text = f"{keys}" if keys == values else f"{keys} for keys, {values} for values"
        where = f"layers {indices[0]} to {indices[-1]}" if len(indices) > 1 else f"layer {indices[0]}"
        parts.append(f"{text} ({backend}) in {where}")
    return "; ".join(parts) or "full precision"


def show_directory(directory: str, as_json: bool) -> bool:
    """Draw what a directory holds, with a progress bar on a terminal. Returns whether all of its files are whole.

    Raises:
        CachePathError: it cannot be reached, or no file in it is that of an entry.
        OptionError: it is a URL of an unknown scheme, or of one whose package is not installed.
    """
    console, columns = Console(stderr=True), (TextColumn("reading entries"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        found = report_on(directory, lambda done, total: bar.update(task, completed=done, total=total))
    if not found.entries and (not found.problems or Path(directory, "config.json").is_file()):
        raise CachePathError(
            f"{found.directory} has no entries of a prefix store: name the directory of a store, or a file of "
            "save_cache(). For a model, `kvlayers plan MODEL --context 8k` says what its caches take."
        )
    if as_json:
        print_json(as_plain(found))
    else:
        show(Console(), found)
    return not found.problems


def show(console: Console, found: DirectoryReport) -> None:
    """Draw what a directory holds, and say what is wrong with it."""
    counts = f"{_count(found.entries, 'entry', 'entries')}, {_count(found.tokens, 'token')}"
    apart = f", {readable_bytes(found.unshared_nbytes)} if they shared nothing" if found.entries > 1 else ""
    title = Text(found.directory, style="bold")
    title.append(f"\n{counts}, {readable_bytes(found.nbytes)}{apart}", style="not bold")
    console.print(drawn(found.tree, title), soft_wrap=True)
    if found.unreferenced:
        console.print(
            f"No entry refers to {_count(len(found.unreferenced), 'block')} "
            f"({readable_bytes(sum(file.nbytes for file in found.unreferenced))}). A store deletes such blocks an hour "
            "after they were used.",
            highlight=False,
        )
    for problem in found.problems:
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)


def drawn(tree: PrefixTree, title: Text) -> Tree:
    """The drawing of a tree: a line for each run of tokens, below the tokens before them."""
    top = Tree(title, guide_style="dim")
    branches: dict[PrefixNode, Tree] = {}
    for node in tree.nodes:
        below = branches.get(node, top).add(_line(node))
        branches.update(dict.fromkeys(node.children, below))
    return top


def _line(node: PrefixNode) -> Text:
    if node.label:
        return Text(f"model and namespace {short_label(node.label)}", style="cyan")
    line = Text(f"{_count(node.tokens, 'token')}, {readable_bytes(node.nbytes + node.file_bytes)}")
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


def as_plain(found: DirectoryReport) -> dict[str, Any]:
    """All that is known, for machines. `parent` is the place of a node's parent in the list of nodes."""
    parents = {child: place for place, node in enumerate(found.tree.nodes) for child in node.children}
    nodes = [
        {
            "parent": parents.get(node),
            "label": short_label(node.label) if node.label else None,
            "tokens": node.tokens,
            "nbytes": node.nbytes + node.file_bytes,
            "is_entry": node.is_entry,
            "age": node.age,
        }
        for node in found.tree.nodes
    ]
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
