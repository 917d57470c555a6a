"""The entries of a store, and the memory that they take. Not thread-safe by itself, and it reads and writes no file."""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvlayers.caches.base import Cache
from kvlayers.errors import CapacityError, KVLayersError
from kvlayers.prefix.entry import EvictionPolicy, MemoryAccount, PrefixEntry, can_restore, eviction_order
from kvlayers.prefix.keys import RadixTree, Tokens
from kvlayers.utils.tensor_memory import Storages
from kvlayers.utils.units import exact_bytes

MOST_NEIGHBOURS = 4
"""Entries in files whose blocks a new file may refer to."""

MOST_MOVED_BYTES = 2**28
"""A larger cache is not moved to give back spare room, since the lock of the store is held meanwhile."""


@dataclass(frozen=True)
class Exchange:
    """A cache that is to enter memory, and what leaves it at the same moment.

    Attributes:
        entry: the entry that is to hold the cache.
        cache: the cache, to which nobody will write.
        replaced: shorter entries that the cache can be rolled back to.
    """

    entry: PrefixEntry
    cache: Cache
    replaced: Sequence[PrefixEntry] = ()


class EntryIndex:
    """Entries by label and tokens. The caches in memory never take more than `max_bytes`.

    Args:
        max_bytes: bytes of memory for all caches.
        policy: decides which entry is evicted first.
        has_directory: whether evicted entries are to be written before they leave memory.

    Attributes:
        evictions: entries that left memory, or are leaving it.
    """

    def __init__(self, max_bytes: int, policy: EvictionPolicy, has_directory: bool) -> None:
        self.max_bytes = max_bytes
        self.policy = policy
        self.has_directory = has_directory
        self.evictions = 0
        self._trees: dict[str, RadixTree[PrefixEntry]] = {}
        self._uses = 0
        self._memory = MemoryAccount()
        self._staying = MemoryAccount()
        self._holders: dict[int, set[PrefixEntry]] = {}
        self._untrimmed: set[PrefixEntry] = set()
        self._stuck: PrefixEntry | None = None

    def __iter__(self) -> Iterator[PrefixEntry]:
        for tree in self._trees.values():
            yield from tree.values()

    def __len__(self) -> int:
        return sum(len(tree) for tree in self._trees.values())

    def __contains__(self, entry: PrefixEntry) -> bool:
        return self.tree(entry.label).get(entry.ids) is entry

    # Reading

    def tree(self, label: str) -> RadixTree[PrefixEntry]:
        """The entries of a model and a namespace, for reading only."""
        return self._trees.get(label, RadixTree())

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with entries that are leaving. Shared memory counts once."""
        return self._memory.nbytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory that several entries hold, counted once."""
        return self._memory.shared_bytes

    @property
    def tokens(self) -> int:
        """Tokens in memory. Those that several entries begin with count once."""
        count = 0
        for tree in self._trees.values():
            nodes = list(tree.nodes())
            held = [node.value is not None and node.value.cache is not None for node in nodes]
            # Children stand behind their parents.
            for number in range(len(nodes) - 1, 0, -1):
                if held[number]:
                    count += nodes[number].tokens
                    held[nodes[number].parent or 0] = True
        return count

    def entry_covering(self, label: str, ids: Tokens) -> PrefixEntry | None:
        """An entry in memory that can be rolled back to exactly these tokens, or `None`."""
        for found in self.tree(label).nearest(ids):
            if found.tokens < len(ids):
                return None
            if found.value.can_restore((len(ids),)):
                return found.value
        return None

    def closest_in_memory(self, label: str, ids: Tokens) -> tuple[Cache, int] | None:
        """A fork of the cache that begins with most of these tokens, and how many they are; `None` without one."""
        for found in self.tree(label).nearest(ids):
            if not found.tokens:
                return None
            if found.value.cache is not None:
                return found.value.cache.fork(), found.tokens
        return None

    def neighbours_in_files(self, entry: PrefixEntry) -> list[tuple[str, int]]:
        """Paths of other entries that begin with some of the tokens of `entry`, and how many; the best first."""
        neighbours: list[tuple[str, int]] = []
        for found in self.tree(entry.label).nearest(entry.ids):
            if not found.tokens or len(neighbours) == MOST_NEIGHBOURS:
                break
            if found.value is not entry and found.value.path is not None:
                neighbours.append((found.value.path, found.tokens))
        return neighbours

    def superseded_files(self, entry: PrefixEntry) -> list[PrefixEntry]:
        """Entries that nobody needs once `entry`, which is in memory, is in a file as well."""
        found = [found.value for found in self.tree(entry.label).prefixes_of(entry.ids)]
        return [old for old in found if old is not entry and old.is_spare and entry.can_restore(old.boundaries)]

    # Entries

    def add(self, entry: PrefixEntry) -> None:
        """Add an entry, or note that it is used now."""
        self._trees.setdefault(entry.label, RadixTree()).insert(entry.ids, entry)
        self.touch(entry)

    def touch(self, entry: PrefixEntry) -> None:
        """Record that an entry is used now. If it was leaving memory, it stays."""
        self._uses += 1
        entry.last_use = self._uses
        self._stay(entry)

    def _stay(self, entry: PrefixEntry) -> None:
        if entry.is_leaving:
            entry.is_leaving = False
            self._staying.add(entry.storages)

    def entries_with(self, label: str, ids: Tokens) -> Iterator[PrefixEntry]:
        """All entries that begin with these tokens, in memory or not; that of exactly these tokens first."""
        nearest = itertools.takewhile(lambda found: found.tokens == len(ids), self.tree(label).nearest(ids))
        return (found.value for found in nearest)

    def pin(self, entry: PrefixEntry, tokens: int) -> None:
        """Pin an entry for the sake of its first tokens. If it was leaving memory, it stays."""
        entry.pins[tokens] += 1
        self._stay(entry)

    def unpin(self, entry: PrefixEntry, tokens: int) -> None:
        """Undo one `pin`."""
        entry.pins -= Counter({tokens: 1})

    def set_stuck(self, entry: PrefixEntry) -> None:
        """Make room elsewhere from now on, since writing this entry takes too long."""
        self._stay(entry)
        self._stuck = entry

    def unset_stuck(self, entry: PrefixEntry) -> None:
        """Undo `set_stuck`, if it was called for this entry last."""
        if entry is self._stuck:
            self._stuck = None

    def hit(self, entry: PrefixEntry) -> None:
        """Record that an entry serves a look-up."""
        self.touch(entry)
        entry.hits += 1
        entry.used = time.time()

    def remove(self, entry: PrefixEntry) -> None:
        """Remove an entry from the index; its file stays."""
        self.drop_cache(entry)
        tree = self.tree(entry.label)
        tree.remove(entry.ids)
        if not len(tree):
            self._trees.pop(entry.label, None)

    def set_cache(self, entry: PrefixEntry, cache: Cache) -> None:
        """Hold a cache of the tokens of an entry in memory, in place of the one that it may have had."""
        self.drop_cache(entry)
        entry.cache = cache
        self._count(entry, cache.storages())
        self._untrimmed.add(entry)

    def _count(self, entry: PrefixEntry, storages: Storages) -> None:
        """Count the memory of an entry, in place of what was counted for it before."""
        accounts = [self._memory] if entry.is_leaving else [self._memory, self._staying]
        for account in accounts:
            account.remove(entry.storages)
            account.add(storages)
        for address in entry.storages:
            self._holders[address].discard(entry)
            if not self._holders[address]:
                del self._holders[address]
        for address in storages:
            self._holders.setdefault(address, set()).add(entry)
        entry.storages = storages

    def drop_cache(self, entry: PrefixEntry) -> None:
        """Stop holding the cache of an entry in memory. Memory that it alone has read is given back."""
        before = entry.storages
        entry.cache = None
        self.unset_stuck(entry)
        self._count(entry, {})
        entry.is_leaving = False
        self._untrimmed.discard(entry)
        self._trim_holders(before)

    def _trim_holders(self, storages: Iterable[int]) -> None:
        """Give back what nobody reads any more of this memory."""
        seen: set[int] = set()
        for address in storages:
            # One of the holders trims what all of them share.
            holder = next(iter(self._holders.get(address, ())), None)
            if holder is not None and address not in seen:
                seen.update(holder.storages)
                self._trim(holder)

    def _trim(self, entry: PrefixEntry) -> None:
        before = entry.storages
        if entry.cache is not None and entry.nbytes <= MOST_MOVED_BYTES:
            entry.cache.trim()
            self._count(entry, entry.cache.storages())
            self.note_moves(before.keys() - entry.storages.keys())

    def note_moves(self, addresses: Iterable[int]) -> None:
        """Count the memory of the entries that were in memory at these addresses, and are no longer."""
        for entry in {entry for address in addresses for entry in self._holders.get(address, ())}:
            if entry.cache is not None:
                self._count(entry, entry.cache.storages())

    def leave(self, entry: PrefixEntry) -> None:
        """Stop holding the cache of an entry as soon as the entry is in a file."""
        if not entry.is_leaving:
            entry.is_leaving = True
            self._staying.remove(entry.storages)

    def set_file(self, entry: PrefixEntry, path: str, nbytes: int) -> None:
        """Record the file of an entry, which leaves memory if it was to."""
        entry.path, entry.file_bytes = path, nbytes
        self.unset_stuck(entry)
        if entry.is_leaving:
            self.drop_cache(entry)

    def drop_file(self, entry: PrefixEntry) -> None:
        """Stop using the file of an entry, which is gone or damaged."""
        entry.path, entry.file_bytes = None, 0
        if entry.cache is None and entry in self:
            self.remove(entry)

    def update(self, added: Sequence[PrefixEntry], gone: Collection[str]) -> int:
        """Apply changes that other processes have made to the files.

        Returns:
            Number of entries that were added.
        """
        for entry in list(self):
            if entry.path in gone:
                self.drop_file(entry)
        before = len(self)
        for entry in added:
            known = self.tree(entry.label).get(entry.ids)
            if known is None:
                self.add(entry)
            elif known.path is None and known.boundaries <= entry.boundaries:
                self.set_file(known, str(entry.path), entry.file_bytes)
        return len(self) - before

    def clear(self) -> list[str]:
        """Remove all entries, pinned or not, and return the paths of their files."""
        entries = list(self)
        # At once, or memory would be moved for entries that go next.
        self._trees, self._holders, self._untrimmed, self._stuck = {}, {}, set(), None
        self._memory, self._staying = MemoryAccount(), MemoryAccount()
        for entry in entries:
            entry.cache, entry.storages, entry.is_leaving = None, {}, False
        return [entry.path for entry in entries if entry.path is not None]

    # Memory

    def use_covering(self, label: str, ids: Tokens) -> bool:
        """Whether an entry in memory can be rolled back to exactly these tokens. If so, it is used now."""
        covering = self.entry_covering(label, ids)
        if covering is not None:
            covering.boundaries.add(len(ids))
            self.touch(covering)
        return covering is not None

    def exchange(self, label: str, ids: Tokens, cache: Cache) -> Exchange | None:
        """What happens if a cache is inserted; `None` if an entry in memory can be rolled back to its tokens."""
        if self.use_covering(label, ids):
            return None
        tree = self.tree(label)
        known = tree.get(ids)
        entry = PrefixEntry(label, ids) if known is None else known
        shorter = [found.value for found in tree.prefixes_of(ids) if found.value is not entry]
        replaced = [old for old in shorter if not old.pins and can_restore(cache, old.boundaries)]
        return Exchange(entry, cache, replaced)

    def check_room(self, exchange: Exchange) -> None:
        """Raise `CapacityError` unless there is room for an exchange besides the pinned entries."""
        storages = exchange.cache.storages()
        nbytes = sum(storages.values())
        if nbytes > self.max_bytes:
            raise CapacityError(
                f"the cache must fit into the store's max_bytes of {exact_bytes(self.max_bytes)}, got one of "
                f"{exact_bytes(nbytes)}: make the store with a larger max_bytes."
            )
        others = self._unaffected(exchange)
        pinned = MemoryAccount(entry.storages for entry in others if entry.pins)
        already = pinned.nbytes
        pinned.add(storages)
        if pinned.nbytes > self.max_bytes:
            raise CapacityError(
                f"there is no room for {exact_bytes(nbytes)}, as {exact_bytes(already)} of "
                f"{exact_bytes(self.max_bytes)} are pinned: unpin() entries, or make the store with a larger max_bytes."
            )

    def _unaffected(self, exchange: Exchange) -> list[PrefixEntry]:
        """The other entries in memory."""
        affected = {id(exchange.entry), *map(id, exchange.replaced)}
        return [entry for entry in self if entry.cache is not None and id(entry) not in affected]

    def make(self, exchange: Exchange) -> tuple[bool, list[PrefixEntry]]:
        """Make an exchange if there is room for it now. If not, there is room when what is leaving has left.

        Returns:
            Whether it was made, and entries that must be written before they leave.
        """
        others = self._unaffected(exchange)
        staying = [old for old in exchange.replaced if not old.is_leaving]
        try:
            # Counted like all others from the beginning, since to evict may move what it shares with them.
            self.set_cache(exchange.entry, exchange.cache)
            for old in staying:
                self.leave(old)
            leaving = self._evict(others, self.max_bytes)
            is_made = self._fits_without([old for old in exchange.replaced if not old.is_being_written])
        except BaseException:
            exchange.entry.cache = None
            for old in staying:
                old.is_leaving = False
            raise
        if is_made:
            self._complete(exchange)
        else:
            self.drop_cache(exchange.entry)
            for old in staying:
                self._stay(old)
        return is_made, leaving

    def _fits_without(self, leaving: Sequence[PrefixEntry]) -> bool:
        """Whether all that is in memory fits into it without these entries."""
        for old in leaving:
            self._memory.remove(old.storages)
        nbytes = self._memory.nbytes
        for old in leaving:
            self._memory.add(old.storages)
        return nbytes <= self.max_bytes

    def _complete(self, exchange: Exchange) -> None:
        entry = exchange.entry
        for old in exchange.replaced:
            entry.boundaries |= old.boundaries
            entry.hits, old.hits = entry.hits + old.hits, 0
            entry.used = max((used for used in (entry.used, old.used) if used is not None), default=None)
            if old.is_being_written:
                continue
            if old.path is None:
                self.remove(old)
            else:
                # Its file stays until the new entry is in a file.
                self.drop_cache(old)
        self.add(entry)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count all memory anew if an interrupt ends this context, such as by Ctrl-C: it may have come in between."""
        try:
            yield
        except KVLayersError:
            raise
        except BaseException:
            self._recount()
            raise

    def _recount(self) -> None:
        self._memory, self._staying, self._holders = MemoryAccount(), MemoryAccount(), {}
        self._untrimmed = {entry for entry in self if entry.cache is not None}
        for entry in self:
            entry.storages = {}
            self._count(entry, {} if entry.cache is None else entry.cache.storages())

    def evict(self, nbytes: int | None) -> list[PrefixEntry]:
        """Evict entries until `nbytes` bytes of memory are free or will be (`None` for all), except for pinned ones.

        Returns:
            Entries that must be written before they leave.
        """
        most = 0 if nbytes is None else self.nbytes - nbytes
        return self._evict([entry for entry in self if entry.cache is not None], most)

    def _evict(self, candidates: Sequence[PrefixEntry], most: int) -> list[PrefixEntry]:
        """Evict entries until the staying entries take at most `most` bytes, or only pinned entries are left."""
        must_be_written: list[PrefixEntry] = []
        # If everything goes, nothing has to be moved.
        for entry in [entry for entry in self._untrimmed if not entry.is_leaving] if most > 0 else ():
            if self._staying.nbytes <= most:
                break
            self._untrimmed.discard(entry)
            self._trim(entry)
        if self._staying.nbytes <= most:
            return must_be_written
        staying = (entry for entry in candidates if not entry.pins and not entry.is_leaving)
        evictable = [entry for entry in staying if entry is not self._stuck]
        for entry in eviction_order(self.policy, evictable, self._trees.values()):
            if self._staying.nbytes <= most:
                break
            self.evictions += 1
            if entry.path is not None:
                self.drop_cache(entry)
            elif self.has_directory:
                self.leave(entry)
                must_be_written.append(entry)
            else:
                self.remove(entry)
        return must_be_written
