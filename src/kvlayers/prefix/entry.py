"""An entry of a prefix store: its tokens and its cache, what memory it takes, and when it leaves."""

import heapq
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvlayers.core.cache import Cache
from kvlayers.errors import RollbackError
from kvlayers.eviction.evicting_layer import EvictingLayer
from kvlayers.offload.offloaded_layer import OffloadedLayer
from kvlayers.prefix.keys import Tokens
from kvlayers.utils.tensor_memory import Storages

MOST_RANKED = 256
"""Entries that are ranked anew at most to find the one that leaves, as others wait meanwhile."""


@dataclass(eq=False, slots=True)
class MemoryPiece:
    """A piece of memory.

    Attributes:
        address: its address, or a number of its own on the meta device.
        nbytes: its bytes.
        holders: the entries that hold it, in order, so that equal calls have equal effects.
        staying: how many of them are not leaving.
    """

    address: int
    nbytes: int
    holders: "dict[PrefixEntry, None]" = field(default_factory=dict)
    staying: int = 0


@dataclass(frozen=True, eq=False)
class Pin:
    """What keeps entries in a store.

    Attributes:
        until: time of its end, as `time.monotonic()` counts, which no change of a clock affects.
        priority: entries of less priority leave before. What is not pinned has 0; what never leaves has infinity.
    """

    until: float = math.inf
    priority: float = math.inf


@dataclass(eq=False)
class PrefixEntry:
    """Tokens, and the cache that has seen them: in memory, in a file, or both.

    Attributes:
        label: model and namespace, as returned by `keys.label_of`.
        ids: the tokens, int64 `[tokens]`.
        cache: the cache, to which nobody writes; `None` if it is only in a file.
        pieces: the memory of the cache, in the order of its tensors. Other caches may share it.
        path: path of its file, or URL without credentials; `None` without a file.
        file_bytes: size of the file in bytes; 0 without one.
        uses: when its first tokens were last used, by how many they are: a counter that grows with each use of the
            store, and 0 before the first one. More tokens have an earlier use; all of them have one.
        used: time of the last use in seconds since 1970; `None` if it was not used since the store was made.
        hits: look-ups that it has served.
        pins: what keeps it, the newest last.
        boundaries: lengths that the entry serves: its own, and those of the entries that it has replaced.
        is_leaving: whether it has been evicted, and leaves memory as soon as it is in a file.
    """

    label: str
    ids: Tokens
    cache: Cache | None = None
    pieces: tuple[MemoryPiece, ...] = ()
    path: str | None = None
    file_bytes: int = 0
    uses: dict[int, int] = field(default_factory=dict)
    used: float | None = None
    hits: int = 0
    pins: tuple[Pin, ...] = ()
    boundaries: set[int] = field(default_factory=set)
    is_leaving: bool = False

    def __post_init__(self) -> None:
        self.boundaries = {*self.boundaries, len(self.ids)}
        self.uses = self.uses or {len(self.ids): 0}

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def storages(self) -> Storages:
        """Bytes of each piece of its memory, by address."""
        return {piece.address: piece.nbytes for piece in self.pieces}

    @property
    def last_use(self) -> int:
        """When all of its tokens were last used, by a counter that grows with each use of the store."""
        return self.uses[self.length]

    @property
    def priority(self) -> float:
        """Entries of less priority are evicted first, and none of infinite priority is."""
        return max([pin.priority for pin in self.pins], default=0.0)

    def use(self, tokens: int, time: int) -> None:
        """Note that the first tokens were used at some time."""
        older = {length: used for length, used in self.uses.items() if length > tokens or used > time}
        if not older or time > max([used for length, used in older.items() if length >= tokens], default=-1):
            older[tokens] = time
        self.uses = older

    def cut(self, length: int) -> None:
        """Be an entry of the first tokens alone."""
        self.ids = self.ids[:length].copy()
        self.boundaries = {boundary for boundary in self.boundaries if boundary < length} | {length}
        uses, self.uses = self.uses, {}
        for tokens, when in uses.items():
            self.use(min(tokens, length), when)

    def fork(self, cache: Cache, length: int) -> Cache:
        """A fork of the cache of all tokens, rolled back to a length that `restorable_length` has returned."""
        fork = cache.fork()
        if length < self.length:
            fork.truncate(length)
        return fork

    @property
    def is_spare(self) -> bool:
        """Whether it is needed in a file only, and only until a longer entry in a file serves the same prompts."""
        return (self.cache is None or self.is_leaving) and not self.pins


def can_restore(cache: Cache | None, lengths: Iterable[int]) -> bool:
    """Whether there is a cache, which can be rolled back to exactly each of these lengths, none above its own."""
    return cache is not None and (
        cache.keeps_every_token or all(restorable_length(cache, length) == length for length in lengths)
    )


def restorable_length(cache: Cache, length: int) -> int:
    """The greatest length, at most `length`, to which `cache` can be rolled back; 0 if there is no such length."""
    if cache.keeps_every_token or length == cache.length:
        return length
    parts = [part.unwrapped.original for layer in cache.adapted_layers() for part in layer.parts]
    if any(isinstance(part, EvictingLayer) and part.held_tokens < part.length for part in parts):
        # The tokens behind `length` have had a part in which of those before were evicted for the scores of a rule.
        return 0
    try:
        target = cache.nearest_restorable(length)
        # transformers' layers, and layers that do not count their tokens, have to be tried.
        if target and not all(layer.length and not layer.traits.is_upstream for layer in cache.adapted_layers()):
            cache.fork().truncate(target)
    except RollbackError:
        return 0
    return target


def shares_memory(cache: Cache) -> bool:
    """Whether forks of `cache` share its memory. Those of reservations and of states on the host are copies."""
    return not cache.is_static and not any(isinstance(layer, OffloadedLayer) for layer in cache.adapted_layers())


def packed(fork: Cache, length: int, beside: Cache | None, tokens: int) -> Cache:
    """A fork, with no more memory than its tokens need.

    Args:
        fork: the fork, which is changed.
        length: its tokens.
        beside: another cache, in whose memory the fork has the tokens that are equal; `None` for memory of its own.
        tokens: how many of the first tokens are equal.
    """
    shared = 0 if beside is None or fork.rotates_keys else min(tokens, length)
    if shared * 3 < length * 2:
        # Without a long shared part, all is copied: a caller may hold what others do not.
        fork.compact()
    if beside is not None and shared:
        fork.share_prefix(beside.fork(), shared)
    return fork


@runtime_checkable
class EvictionPolicy(Protocol):
    """Decides the order in which entries are evicted.

    It is asked while the lock of the store is held, so it must not use the store. It must not change the entries.
    """

    def rank(self, entry: PrefixEntry) -> float:
        """A number: the entry with the smallest one is evicted first.

        It is asked for when an entry comes in, and again when the entry would be evicted, which the entry is not if it
        ranks higher by then. So a rank may grow with each use, and one that falls is noticed late.
        """


class LeastRecentlyUsed:
    """Evicts the entry first whose last insertion or lookup is longest ago.

    Example:
        >>> import kvlayers
        >>> kvlayers.PrefixStore(max_bytes=2**30, policy=kvlayers.prefix.LeastRecentlyUsed())
        PrefixStore(0 entries, 0 B of 1.00 GiB)
    """

    def rank(self, entry: PrefixEntry) -> float:
        """When all tokens of the entry were last used."""
        return entry.last_use


class EvictionOrder:
    """The entries that may be evicted, in the order of a policy. One costs the logarithm of their number.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        # By priority, by rank as it was, and by number. An entry has one number that counts.
        self._heap: list[tuple[float, float, int, PrefixEntry]] = []
        self._numbers: dict[PrefixEntry, int] = {}
        self._count = 0

    def add(self, entry: PrefixEntry) -> None:
        """Add an entry, or note that it may rank lower than before."""
        try:
            rank = self._rank(entry)
        except Exception:
            # It is asked again when the entry would be evicted: only there its error stops anything.
            rank = entry.priority, -math.inf
        self._numbers[entry] = self._count = self._count + 1
        heapq.heappush(self._heap, (*rank, self._count, entry))

    def discard(self, entry: PrefixEntry) -> None:
        """Remove an entry, if it is there."""
        self._numbers.pop(entry, None)
        if len(self._heap) > 2 * len(self._numbers) + 64:
            self._heap = [item for item in self._heap if self._numbers.get(item[3]) == item[2]]
            heapq.heapify(self._heap)

    def first(self) -> PrefixEntry | None:
        """The entry that is to be evicted first; `None` if only those are left that are never evicted.

        If more than `MOST_RANKED` entries have been used since they were ranked, it is the first of so many of them.
        """
        looked_at: dict[PrefixEntry, tuple[float, float]] = {}
        while self._heap:
            priority, before, number, entry = self._heap[0]
            if self._numbers.get(entry) != number:
                heapq.heappop(self._heap)
            elif priority == math.inf:
                # What never leaves comes last.
                return None
            elif len(looked_at) == MOST_RANKED:
                return min(looked_at, key=looked_at.__getitem__)
            elif entry not in looked_at and (now := self._rank(entry)) > (priority, before):
                # Not twice, as the budget must hold whatever a policy says.
                looked_at[entry] = now
                heapq.heapreplace(self._heap, (*now, number, entry))
            else:
                return entry
        return None

    def _rank(self, entry: PrefixEntry) -> tuple[float, float]:
        return entry.priority, self._policy.rank(entry)


class MemoryAccount:
    """Who holds each piece of memory.

    Attributes:
        nbytes: total bytes, each piece counted once.
        staying_bytes: bytes of the pieces that entries hold which are not leaving, each piece counted once.
        pieces: each piece, by its address and bytes, for reading only.

    Example:
        >>> import numpy as np
        >>> one, other = (PrefixEntry("model", np.array([token])) for token in (1, 2))
        >>> account = MemoryAccount()
        >>> account.count(one, {1: 100, 2: 50})
        >>> account.count(other, {2: 50, 3: 7})
        >>> account.nbytes, account.shared_bytes
        (157, 50)
        >>> account.count(one, {})
        >>> account.nbytes, account.shared_bytes
        (57, 0)
    """

    def __init__(self) -> None:
        self.nbytes = self.staying_bytes = 0
        # By size as well: memory may have moved before its holder is counted again, and other memory be at its address.
        self.pieces: dict[tuple[int, int], MemoryPiece] = {}

    @property
    def shared_bytes(self) -> int:
        """Bytes of the pieces that several entries hold, each piece counted once."""
        return sum(piece.nbytes for piece in self.pieces.values() if len(piece.holders) > 1)

    def count(self, entry: PrefixEntry, storages: Storages) -> None:
        """Count the memory of an entry, in place of what was counted for it before."""
        self.stay(entry, -(not entry.is_leaving))
        for piece in entry.pieces:
            del piece.holders[entry]
            if not piece.holders:
                self.nbytes -= piece.nbytes
                del self.pieces[piece.address, piece.nbytes]
        entry.pieces = tuple(self.pieces.get(key) or MemoryPiece(*key) for key in storages.items())
        for piece in entry.pieces:
            self.pieces[piece.address, piece.nbytes] = piece
            piece.holders[entry] = None
            self.nbytes += piece.nbytes * (len(piece.holders) == 1)
        self.stay(entry, +(not entry.is_leaving))

    def stay(self, entry: PrefixEntry, more: int) -> None:
        """Note that one more entry, or one less, that stays holds the memory of an entry."""
        for piece in entry.pieces:
            before, piece.staying = piece.staying, piece.staying + more
            self.staying_bytes += piece.nbytes * ((piece.staying > 0) - (before > 0))

    def move(self, piece: MemoryPiece, address: int, nbytes: int) -> None:
        """Note that a piece is elsewhere now, where no other one is, for all of its holders."""
        self.pieces[address, nbytes] = self.pieces.pop((piece.address, piece.nbytes))
        more = nbytes - piece.nbytes
        self.nbytes += more
        self.staying_bytes += more * (piece.staying > 0)
        piece.address, piece.nbytes = address, nbytes

    def bytes_without(self, holders: Collection[PrefixEntry]) -> int:
        """Total bytes if these had left."""
        pieces = {piece for holder in holders for piece in holder.pieces}
        return self.nbytes - sum(piece.nbytes for piece in pieces if piece.holders.keys() <= set(holders))


def union_bytes(caches: Iterable[Storages]) -> int:
    """Bytes of memory of several caches, each piece counted once."""
    return sum(nbytes for _, nbytes in {piece for storages in caches for piece in storages.items()})
