"""What a prefix store and its files hold, for people: statistics, and a tree of tokens."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.keys import LABEL_PREFIX, RadixTree
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


Piece = TypeVar("Piece", int, str)
"""What identifies a piece of memory or a file."""


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
        >>> one = PrefixEntry("model", np.array([1, 2, 3]), storages={10: 100, 11: 5})
        >>> other = PrefixEntry("model", np.array([1, 2, 9, 9]), storages={10: 100, 12: 7})
        >>> print(tree_of({one: {}, other: {}}))
        model and namespace model
        └─ 2 tokens, 100 B
           ├─ 1 tokens, 5 B, memory, 0 hits
           └─ 2 tokens, 7 B, memory, 0 hits
    """
    trees: dict[str, RadixTree[PrefixEntry]] = {}
    for each in entries:
        trees.setdefault(each.label, RadixTree()).insert(each.ids, each)
    now, seen_memory, seen_files = time.time(), set[int](), set[str]()
    tops: list[PrefixNode] = []
    for label, tree in sorted(trees.items()):
        parents, tokens, holders = zip(*tree.nodes(), strict=True)
        memory = _bytes_where_shared([{} if each is None else each.storages for each in holders], parents, seen_memory)
        files = _bytes_where_shared([{} if each is None else entries[each] for each in holders], parents, seen_files)
        below: list[list[PrefixNode]] = [[] for _ in parents]
        # Children stand behind their parents.
        for number in range(len(parents) - 1, -1, -1):
            entry, children = holders[number], tuple(reversed(below[number]))
            made = PrefixNode(
                label="" if parents[number] is not None else label,
                tokens=tokens[number],
                nbytes=memory[number],
                file_bytes=files[number],
                hits=0 if entry is None else entry.hits,
                age=None if entry is None or entry.used is None else max(now - entry.used, 0.0),
                pinned=entry is not None and bool(entry.pins),
                in_memory=entry is not None and bool(entry.storages),
                in_files=entry is not None and bool(entries[entry]),
                children=children,
            )
            parent = parents[number]
            (tops if parent is None else below[parent]).append(made)
    return PrefixTree(tuple(tops))


def _bytes_where_shared(
    pieces: list[Mapping[Piece, int]], parents: Sequence[int | None], seen: set[Piece]
) -> list[int]:
    """For each node, the bytes of the pieces that only nodes below it hold, and that no single child's subtree has.

    Args:
        pieces: what each node itself holds.
        parents: the parent of each node, which stands before it.
        seen: pieces that other trees hold too and have counted; this tree's pieces are added.
    """
    total = Counter(piece for held in pieces for piece in held)
    held_below = [Counter(dict.fromkeys(held, 1)) for held in pieces]
    sizes = {piece: size for held in pieces for piece, size in held.items()}
    nbytes = [0] * len(pieces)
    for number in range(len(pieces) - 1, -1, -1):
        mine, parent = held_below[number], parents[number]
        for piece in [piece for piece, count in mine.items() if count == total[piece]]:
            del mine[piece]
            if piece not in seen:
                seen.add(piece)
                nbytes[number] += sizes[piece]
        if parent is not None:
            small, large = sorted((mine, held_below[parent]), key=len)
            large.update(small)
            held_below[parent] = large
    return nbytes


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
