"""What a prefix store and its files hold, for people: statistics, and a tree of tokens."""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.keys import LABEL_PREFIX, common_tokens
from kvlayers.utils.units import readable_bytes


@dataclass(frozen=True)
class PrefixStatistics:
    """What a store holds now, and what it has done since it was made.

    Attributes:
        entries: number of entries, in memory and in files.
        bytes: bytes of memory that the entries take, also while they wait to be written. Shared memory counts once.
        file_bytes: bytes of their files. Blocks that several entries share count once.
        hits: lookups that found a prefix.
        misses: lookups that did not.
        tokens_covered: tokens of all looked-up prompts that were found.
        tokens_asked: tokens of all looked-up prompts.
        evictions: entries that left memory, or leave it as soon as they are written.
        spilled: entries that were written to the directory.
        damaged: damaged files that were skipped.
        failed_writes: entries that could not be written to the directory, after several tries if it was not reached.
        failed_reads: how often a file in the directory could not be reached, or not in time. The file may be in order.
        bypassed: calls of `generate()` that could not use the store.
        refused: caches from `generate()` for which there was no room.
        dropped_writes: entries that were dropped before they were written, because a caller needed their memory and had
            waited for `write_wait_seconds`.
        pending_writes: entries that wait to be written, or are being written.
        tokens: tokens in memory. Those that several entries begin with count once.
        shared_bytes: those of `bytes` that several entries hold.
        bypasses: how many of the calls `bypassed` there were for each reason.
    """

    entries: int
    bytes: int
    file_bytes: int
    hits: int
    misses: int
    tokens_covered: int
    tokens_asked: int
    evictions: int
    spilled: int
    damaged: int
    failed_writes: int
    failed_reads: int
    bypassed: int
    refused: int
    dropped_writes: int
    pending_writes: int
    tokens: int
    shared_bytes: int
    bypasses: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class PrefixNode:
    """A run of tokens that all sequences below it share.

    Attributes:
        label: model and namespace, in a node at the top; empty in other nodes.
        tokens: number of tokens behind those of the parent; 0 at the top.
        nbytes: bytes of memory that the node adds to those of its parent.
        file_bytes: bytes of files that it adds to those of its parent.
        hits: look-ups that an entry which ends here has served.
        age: seconds since the entry was used last; `None` if no entry ends here, or if nobody knows.
        pinned: whether the entry is pinned.
        in_memory: whether the states of an entry that ends here are in memory.
        in_files: whether they are in files.
        children: the nodes that continue these tokens.
    """

    label: str = ""
    tokens: int = 0
    nbytes: int = 0
    file_bytes: int = 0
    hits: int = 0
    age: float | None = None
    pinned: bool = False
    in_memory: bool = False
    in_files: bool = False
    # Not in the repr, since a chat of a thousand turns is a thousand nodes deep.
    children: tuple["PrefixNode", ...] = field(default=(), repr=False)

    @property
    def is_entry(self) -> bool:
        """Whether an entry ends here; if not, its children only share these tokens."""
        return self.in_memory or self.in_files

    def __str__(self) -> str:
        if self.label:
            return f"model and namespace {self.label.removeprefix(LABEL_PREFIX)[:12]}"
        parts = [f"{self.tokens} tokens", readable_bytes(self.nbytes)]
        if self.file_bytes:
            parts.append(f"{readable_bytes(self.file_bytes)} in files")
        if self.is_entry:
            parts.append(
                "memory and files" if self.in_memory and self.in_files else "memory" * self.in_memory or "files"
            )
            parts.append(f"{self.hits} hit{'s' * (self.hits != 1)}")
        if self.age is not None:
            parts.append(f"used {readable_age(self.age)} ago")
        if self.pinned:
            parts.append("pinned")
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """What is held: for each model and namespace, the tokens of all entries, each of them once.

    Attributes:
        children: one node for each model and namespace.
    """

    children: tuple[PrefixNode, ...] = field(repr=False)

    @property
    def nodes(self) -> list[PrefixNode]:
        """All nodes, each before its children."""
        return [node for _, node in self._walk()]

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all nodes."""
        return sum(node.nbytes for node in self.nodes)

    @property
    def file_bytes(self) -> int:
        """Bytes of files of all nodes."""
        return sum(node.file_bytes for node in self.nodes)

    def _walk(self) -> Iterable[tuple[str, PrefixNode]]:
        pending = [("", node) for node in reversed(self.children)]
        while pending:
            branch, node = pending.pop()
            yield branch, node
            stem = "" if node.label else branch.replace("├─ ", "│  ").replace("└─ ", "   ")
            below = [(stem + "├─ ", child) for child in node.children]
            pending += [(stem + "└─ ", child) for _, child in below[-1:]] + below[-2::-1]

    def __str__(self) -> str:
        return "\n".join(branch + str(node) for branch, node in self._walk()) or "nothing is held"


def tree_of(entries: Mapping[PrefixEntry, Mapping[str, int]]) -> PrefixTree:
    """The tree of these entries. A piece that several entries hold counts where their tokens diverge.

    Args:
        entries: for each of them, the bytes of its files, by name.

    Example:
        >>> import numpy as np
        >>> from kvlayers.prefix.entry import MemoryPiece
        >>> one = PrefixEntry("model", np.array([1, 2, 3]), pieces=(MemoryPiece(10, 100), MemoryPiece(11, 5)))
        >>> other = PrefixEntry("model", np.array([1, 2, 9, 9]), pieces=(MemoryPiece(10, 100), MemoryPiece(12, 7)))
        >>> print(tree_of({one: {}, other: {}}))
        model and namespace model
        └─ 2 tokens, 100 B
           ├─ 1 tokens, 5 B, memory, 0 hits
           └─ 2 tokens, 7 B, memory, 0 hits
    """
    in_order = sorted(entries, key=lambda entry: (entry.label, entry.ids.tobytes()))
    seen = set[int | str]()
    tops = (
        _top_of(label, {each: dict([*each.storages.items(), *entries[each].items()]) for each in group}, seen)
        for label, group in itertools.groupby(in_order, key=lambda entry: entry.label)
    )
    return PrefixTree(tuple(tops))


@dataclass
class _Run:
    """A node whose children are not complete.

    Attributes:
        length: tokens up to its end.
        entry: the entry that ends there, if one does.
        held: how many entries that end there or below hold a piece of memory, or a file, by its address or name.
        children: its children.
    """

    length: int
    entry: PrefixEntry | None = None
    held: Counter[int | str] = field(default_factory=Counter)
    children: list[PrefixNode] = field(default_factory=list)


def _top_of(label: str, pieces: Mapping[PrefixEntry, Mapping[int | str, int]], seen: set[int | str]) -> PrefixNode:
    """The node of a label.

    Args:
        label: the label.
        pieces: what each entry holds, in the order of their tokens: bytes of each piece.
        seen: pieces that other labels hold too and have counted; those of this one are added.
    """
    total = Counter(piece for held in pieces.values() for piece in held)
    sizes = {piece: nbytes for held in pieces.values() for piece, nbytes in held.items()}
    now = time.time()

    def made(run: _Run, tokens: int, label: str = "") -> PrefixNode:
        own = {piece for piece, count in run.held.items() if count == total[piece]}
        for piece in own:
            del run.held[piece]
        new, entry = own - seen, run.entry
        seen.update(own)
        return PrefixNode(
            label=label,
            tokens=tokens,
            nbytes=sum(sizes[piece] for piece in new if isinstance(piece, int)),
            file_bytes=sum(sizes[piece] for piece in new if isinstance(piece, str)),
            hits=0 if entry is None else entry.hits,
            age=None if entry is None or entry.used is None else max(now - entry.used, 0.0),
            pinned=entry is not None and bool(entry.pins),
            in_memory=entry is not None and bool(entry.pieces),
            in_files=entry is not None and any(isinstance(piece, str) for piece in pieces[entry]),
            children=tuple(run.children),
        )

    open_runs, before = [_Run(0)], np.empty(0, np.int64)
    for entry in (*pieces, None):
        ids = before[:0] if entry is None else entry.ids
        shared = common_tokens(before, ids)
        while open_runs[-1].length > shared:
            run = open_runs.pop()
            if open_runs[-1].length < shared:
                open_runs.append(_Run(shared))
            above = open_runs[-1]
            above.children.append(made(run, run.length - above.length))
            small, above.held = sorted((run.held, above.held), key=len)
            above.held.update(small)
        if entry is not None:
            open_runs.append(_Run(entry.length, entry, Counter(pieces[entry].keys())))
        before = ids
    return made(open_runs[0], 0, label)


def readable_age(seconds: float) -> str:
    """Seconds in the largest unit that gives at least 1.

    Example:
        >>> readable_age(30), readable_age(7200)
        ('30 s', '2 h')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
