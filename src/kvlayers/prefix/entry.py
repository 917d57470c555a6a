"""An entry of a prefix store: its tokens and its cache, what memory it takes, and when it leaves."""

import heapq
import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import CacheLayer
from kvlayers.errors import RollbackError
from kvlayers.eviction.evicting_layer import EvictingLayer
from kvlayers.offload.offloaded_layer import OffloadedLayer
from kvlayers.prefix.keys import PrefixMatch, Tokens
from kvlayers.utils.tensor_memory import Storages

Piece = tuple[int, int]
"""Address and bytes of a piece of memory."""


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
        storages: size in bytes of each piece of memory of the cache, by address. Other caches may share them.
        path: path of its file, or URL without credentials; `None` without a file.
        file_bytes: size of the file in bytes; 0 without one.
        uses: when its first tokens were last used, by how many they are: a counter that grows with each use of the
            store. More tokens have an earlier use; all of them have one.
        used: time of the last use in seconds since 1970; `None` if it was not used since the store was made.
        hits: look-ups that it has served.
        pins: what keeps it, the newest last.
        boundaries: lengths that the entry serves: its own, and those of the entries that it has replaced.
        is_leaving: whether it has been evicted, and leaves memory as soon as it is in a file.
    """

    label: str
    ids: Tokens
    cache: Cache | None = None
    storages: Storages = field(default_factory=dict)
    path: str | None = None
    file_bytes: int = 0
    uses: dict[int, int] = field(default_factory=dict)
    used: float | None = None
    hits: int = 0
    pins: list[Pin] = field(default_factory=list)
    boundaries: set[int] = field(default_factory=set)
    is_leaving: bool = False

    def __post_init__(self) -> None:
        self.boundaries = {*self.boundaries, len(self.ids)}

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def last_use(self) -> int:
        """When all of its tokens were last used, by a counter that grows with each use of the store."""
        return self.uses.get(self.length, 0)

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
    """Whether there is a cache, which can be rolled back to exactly each of these lengths."""
    if cache is None:
        return False
    if cache.keeps_every_token:
        return True
    most = cache.get_seq_length()
    return all(length <= most and restorable_length(cache, length) == length for length in lengths)


def restorable_length(cache: Cache, length: int) -> int:
    """The greatest length, at most `length`, to which `cache` can be rolled back; 0 if there is no such length."""
    if cache.keeps_every_token or length == cache.get_seq_length():
        return length
    if any(_has_evicted(layer) for layer in cache.adapted_layers()):
        # The tokens behind `length` have had a part in which of those before were evicted.
        return 0
    try:
        target = cache.nearest_restorable(length)
        # transformers' layers, and layers that do not count their tokens, have to be tried.
        if target and not all(layer.length and not layer.traits.is_upstream for layer in cache.adapted_layers()):
            cache.fork().truncate(target)
    except RollbackError:
        return 0
    return target


def _has_evicted(layer: CacheLayer) -> bool:
    """Whether tokens have been evicted for the scores of a rule."""
    parts = [part.unwrapped.original for part in layer.parts]
    return any(isinstance(part, EvictingLayer) and part.held_tokens < part.length for part in parts)


def shares_memory(cache: Cache) -> bool:
    """Whether forks of `cache` share its memory. Those of reservations and of states on the host are copies."""
    return not cache.is_static and not any(isinstance(layer, OffloadedLayer) for layer in cache.adapted_layers())


def packed(fork: Cache, length: int, beside: PrefixMatch[Cache] | None) -> Cache:
    """A fork, with no more memory than its tokens need.

    Args:
        fork: the fork, which is changed.
        length: its tokens.
        beside: another cache, in whose memory the fork has the tokens that are equal; `None` for memory of its own.
    """
    shared = 0 if beside is None or fork.rotates_keys else min(beside.tokens, length)
    if shared * 3 < length * 2:
        # Without a long shared part, all is copied: a caller may hold what others do not.
        fork.compact()
    if beside is not None and shared:
        fork.share_prefix(beside.value.fork(), shared)
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
        # By rank as it was, and by number. An entry has one number that counts.
        self._heap: list[tuple[tuple[float, float], int, PrefixEntry]] = []
        self._numbers: dict[PrefixEntry, int] = {}
        self._count = 0

    def add(self, entry: PrefixEntry) -> None:
        """Add an entry, or note that it may rank lower than before."""
        # Not ranked until it may be the first one.
        self._push(entry, (-math.inf, -math.inf))

    def discard(self, entry: PrefixEntry) -> None:
        """Remove an entry, if it is there."""
        self._numbers.pop(entry, None)
        if len(self._heap) > 2 * len(self._numbers) + 64:
            self._heap = [item for item in self._heap if self._numbers.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def first(self) -> PrefixEntry | None:
        """The entry that is to be evicted first; `None` if only those are left that are never evicted."""
        looked_at: set[PrefixEntry] = set()
        while self._heap:
            before, number, entry = self._heap[0]
            if self._numbers.get(entry) != number:
                heapq.heappop(self._heap)
            elif entry not in looked_at and (now := (entry.priority, self._policy.rank(entry))) > before:
                # Not twice, as the budget must hold whatever a policy says.
                looked_at.add(entry)
                self._push(entry, now)
            else:
                # What never leaves comes last.
                return None if entry.priority == math.inf else entry
        return None

    def _push(self, entry: PrefixEntry, rank: tuple[float, float]) -> None:
        self._count += 1
        self._numbers[entry] = self._count
        heapq.heappush(self._heap, (rank, self._count, entry))


class MemoryAccount:
    """Who holds each piece of memory, by its address.

    Attributes:
        nbytes: total bytes, each piece counted once.
        shared_bytes: bytes of the pieces that several holders have, each piece counted once.
        holders: who holds each piece, for reading only.

    Example:
        >>> account = MemoryAccount()
        >>> account.add("one", {1: 100, 2: 50})
        >>> account.add("other", {2: 50, 3: 7})
        >>> account.nbytes, account.shared_bytes
        (157, 50)
        >>> account.remove("one", {1: 100, 2: 50})
        >>> account.nbytes, account.shared_bytes
        (57, 0)
    """

    def __init__(self) -> None:
        self.nbytes = self.shared_bytes = 0
        # By size as well: memory may have moved before its holder is counted again, and other memory be at its address.
        self.holders: dict[Piece, set[Any]] = {}

    def add(self, holder: Hashable, storages: Storages) -> None:
        """Add the memory of a holder."""
        for piece in storages.items():
            holders = self.holders.setdefault(piece, set())
            holders.add(holder)
            self.nbytes += piece[1] * (len(holders) == 1)
            self.shared_bytes += piece[1] * (len(holders) == 2)

    def remove(self, holder: Hashable, storages: Storages) -> None:
        """Remove the memory of a holder that was added before."""
        for piece in storages.items():
            holders = self.holders[piece]
            holders.remove(holder)
            self.nbytes -= piece[1] * (not holders)
            self.shared_bytes -= piece[1] * (len(holders) == 1)
            if not holders:
                del self.holders[piece]

    def bytes_without(self, holders: Collection[PrefixEntry]) -> int:
        """Total bytes if these had left."""
        pieces = {piece for holder in holders for piece in holder.storages.items()}
        return self.nbytes - sum(piece[1] for piece in pieces if self.holders[piece] <= set(holders))


def union_bytes(caches: Iterable[Storages]) -> int:
    """Bytes of memory of several caches, each piece counted once."""
    return sum(nbytes for _, nbytes in {piece for storages in caches for piece in storages.items()})
