"""What people are told of a store: figures for Prometheus, why look-ups found no more, what a directory holds."""

import dataclasses
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvlayers.errors import KVLayersError, OptionError
from kvlayers.prefix.backends import StoredFile, backend_for
from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.index import EntryIndex
from kvlayers.prefix.keys import Tokens, common_tokens
from kvlayers.prefix.lookup import Hit
from kvlayers.prefix.nodes import Node, NodeTree, read_nodes
from kvlayers.prefix.report import PrefixStatistics, PrefixTree, tree_of

GAUGES = frozenset(("entries", "bytes", "file_bytes", "pending_writes", "tokens", "shared_bytes"))
"""Figures of now. The others count what has happened since the store was made."""

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def prometheus_text(
    statistics: PrefixStatistics, labels: Mapping[str, str] | None = None, prefix: str = "kvlayers_prefix"
) -> str:
    r"""The figures of a store in the text format of Prometheus, which a server returns for `/metrics`.

    Args:
        statistics: `store.statistics`.
        labels: labels of all figures, such as `{"host": "a"}`.
        prefix: what the names of the figures begin with.

    Raises:
        OptionError: `statistics` are no statistics of a store, or Prometheus does not read a name or a label.

    Example:
        >>> import kvlayers
        >>> text = prometheus_text(kvlayers.PrefixStore("1MiB").statistics, {"host": "a"})
        >>> print(*text.splitlines()[:3], sep="\n")
        # HELP kvlayers_prefix_entries number of entries, in memory and in files.
        # TYPE kvlayers_prefix_entries gauge
        kvlayers_prefix_entries{host="a"} 0
    """
    if not isinstance(statistics, PrefixStatistics):
        raise OptionError(f"`statistics` must be store.statistics, got a {type(statistics).__name__}: pass them.")
    own = dict(labels or {})
    wrong = [name for name in (prefix, *own) if not _NAME.fullmatch(str(name)) or name in ("reason", "__name__")]
    if wrong or not all(isinstance(value, str) for value in own.values()):
        raise OptionError(
            f"`labels` and `prefix` must be names and texts of Prometheus, got {wrong or own}: rename them."
        )
    helps = dict(re.findall(r"^ {8}(\w+): (.*)$", PrefixStatistics.__doc__ or "", re.MULTILINE))
    lines = []
    for field in dataclasses.fields(statistics):
        kind = "gauge" if field.name in GAUGES else "counter"
        name, value = f"{prefix}_{field.name}{'_total' * (kind == 'counter')}", getattr(statistics, field.name)
        lines += [f"# HELP {name} {helps.get(field.name, field.name)}", f"# TYPE {name} {kind}"]
        if isinstance(value, Mapping):
            lines += [f"{name}{_labels({**own, 'reason': reason})} {count}" for reason, count in value.items()]
        else:
            lines.append(f"{name}{_labels(own)} {value}")
    return "\n".join([*lines, ""])


def _labels(labels: Mapping[str, str]) -> str:
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    pairs = [f'{name}="{value.translate(escaped)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def explained(
    now: PrefixStatistics, recent: Iterable[tuple[str, Tokens, Hit]], index: EntryIndex, lock: threading.Lock
) -> str:
    """As `PrefixStore.explain`, given the newest look-ups that found less than they might have."""
    lines = [f"{now.tokens_covered} of {now.tokens_asked} tokens that were asked for were stored"]
    counts = sorted(now.bypasses.items(), key=lambda bypass: -bypass[1])
    lines += [f"{count} call{'s' * (count > 1)} went on without it: {reason}" for reason, count in counts]
    with lock:
        for label, ids, hit in list(recent):
            lines.append(f"{hit.covered} of {len(ids)} tokens: {hit.reason}")
            left = max((common_tokens(text, ids) for own, text in index.left if own == label), default=0)
            if left > hit.known:
                lines.append(f"    {left} of them were stored, and have left for room")
            others = [index.entries.groups(own, ids) for own in {entry.label for entry in index.entries} - {label}]
            if (most := max((tokens for groups in others for tokens, _ in groups), default=0)) > hit.known:
                lines.append(f"    {most} of them are stored for another model, cache or namespace")
    return "\n".join(lines)


@dataclass(frozen=True)
class DirectoryReport:
    """What the files of a store hold.

    Attributes:
        directory: its path or URL, without credentials.
        tree: the tokens of all entries, each once. Who has used them how often is not in the files.
        entries: number of entries.
        tokens: number of tokens of all entries, each counted once.
        nbytes: bytes of their files, each counted once.
        unshared_nbytes: what they would take if no entry shared files with another one.
        unreferenced: files that nobody can use, because a file with the tokens before is missing.
        problems: for each file that is damaged, missing or cannot be read, what is wrong with it.
    """

    directory: str
    tree: PrefixTree
    entries: int
    tokens: int
    nbytes: int
    unshared_nbytes: int
    unreferenced: tuple[StoredFile, ...]
    problems: tuple[str, ...]


def report_on(directory: str, progress: Callable[[int, int], None]) -> DirectoryReport:
    """Read all entries of a directory. Nothing is written, and no states are read.

    Args:
        directory: a path or a URL, as for `PrefixStore`.
        progress: is called with the number of files that were read, and of all files to read.

    Raises:
        UnreachableError: the directory does not exist, or cannot be reached.
        OptionError: it is a URL of an unknown scheme, or of one whose package is not installed.
    """
    backend = backend_for(directory, None)
    files = backend.files()
    nodes: list[Node] = []
    problems: list[str] = []
    progress(0, len(files))
    for number, (_, found) in enumerate(read_nodes(backend, files), 1):
        progress(number, len(files))
        if isinstance(found, KVLayersError):
            problems.append(str(found))
        elif found is not None:
            nodes.append(found)
    held = NodeTree(nodes)
    orphans = held.orphans()
    problems += sorted(
        f"{backend.path_of(parent)} is missing: the tokens behind it are in other files."
        for parent in {node.record.parent for node in orphans} - held.nodes.keys()
    )
    entries = dict[PrefixEntry, dict[str, int]]()
    for node in held.ends():
        entry = held.entry(node, backend.path_of(node.name))
        entry.used = node.used / 10**9 if node.used else None
        entries[entry] = {each.name: each.nbytes for each in held.chain(node.name)}
    tree = tree_of(entries)
    return DirectoryReport(
        backend.path_of("").rstrip("/"),
        tree,
        len(entries),
        sum(node.tokens for node in tree.nodes),
        sum({name: nbytes for files in entries.values() for name, nbytes in files.items()}.values()),
        sum(nbytes for files in entries.values() for nbytes in files.values()),
        tuple(StoredFile(node.name, node.nbytes) for node in sorted(orphans, key=lambda node: node.name)),
        tuple(problems),
    )
