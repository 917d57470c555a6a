"""The entries of a store, and the memory that they take. Not thread-safe by itself."""

import logging
from collections.abc import Iterable, Iterator, Sequence

from kvlayers.caches.base import Cache
from kvlayers.errors import CapacityError, KVLayersError
from kvlayers.prefix.directory import Directory
from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.entry_eviction import EvictionPolicy
from kvlayers.prefix.memory_account import MemoryAccount
from kvlayers.prefix.radix_tree import RadixTree, Tokens
from kvlayers.utils.tensor_memory import Storages
from kvlayers.utils.units import exact_bytes

logger = logging.getLogger(__name__)


class EntryIndex:
    """Entries by label and tokens. The caches in memory never take more than `max_bytes`.

    Args:
        max_bytes: bytes of memory for all caches.
        policy: decides which entry is evicted first.
        directory: where evicted entries are written, `None` for nowhere.
        directory_max_bytes: bytes of all files, `None` for no limit.
    """

    def __init__(
        self, max_bytes: int, policy: EvictionPolicy, directory: Directory | None, directory_max_bytes: int | None
    ) -> None:
        self.max_bytes = max_bytes
        self.policy = policy
        self.directory = directory
        self.directory_max_bytes = directory_max_bytes
        self.evictions = self.spilled = self.failed_writes = 0
        self._trees: dict[str, RadixTree[PrefixEntry]] = {}
        self._uses = 0
        self._memory = MemoryAccount()
        self.refresh()

    def __iter__(self) -> Iterator[PrefixEntry]:
        for tree in self._trees.values():
            yield from tree.values()

    def __len__(self) -> int:
        return sum(len(tree) for tree in self._trees.values())

    def tree(self, label: str) -> RadixTree[PrefixEntry]:
        """The entries of a model and a namespace, for reading only."""
        return self._trees.get(label, RadixTree())

    def _add(self, entry: PrefixEntry) -> None:
        self._trees.setdefault(entry.label, RadixTree()).insert(entry.ids, entry)
        self.touch(entry)

    def _remove(self, entry: PrefixEntry) -> None:
        tree = self.tree(entry.label)
        tree.remove(entry.ids)
        if not len(tree):
            self._trees.pop(entry.label, None)

    @property
    def nbytes(self) -> int:
        """Bytes of memory. Shared memory counts once."""
        return self._memory.nbytes

    @property
    def file_bytes(self) -> int:
        """Bytes of files."""
        return sum(entry.file_bytes for entry in self)

    def touch(self, entry: PrefixEntry) -> None:
        """Record that an entry is used now."""
        self._uses += 1
        entry.last_use = self._uses

    def insert(self, label: str, ids: Tokens, cache: Cache) -> bool:
        """Insert a cache for tokens, unless an entry in memory can be rolled back to them.

        Args:
            label: model and namespace.
            ids: all tokens that `cache` has seen.
            cache: the cache, to which nobody will write.

        Returns:
            Whether it was inserted.

        Raises:
            CapacityError: there is no room for it besides the pinned entries; nothing is changed.
        """
        tree = self.tree(label)
        covering = self.entry_covering(label, ids)
        if covering is not None:
            covering.boundaries.add(len(ids))
            self.touch(covering)
            return False
        known = tree.get(ids)
        entry = PrefixEntry(label, ids) if known is None else known
        candidate = PrefixEntry(label, ids, cache)
        shorter = [found.value for found in tree.prefixes_of(ids) if found.value is not entry]
        replaced = [old for old in shorter if not old.pins and candidate.can_restore(old.boundaries)]
        self._make_room(cache.storages(), leaving=replaced)
        for old in replaced:
            entry.boundaries |= old.boundaries
            self._drop_cache(old)
            # The file of a replaced entry stays until the new entry is in a file.
            if old.path is None:
                self.delete(old)
        self._set_cache(entry, cache)
        self._add(entry)
        return True

    def _set_cache(self, entry: PrefixEntry, cache: Cache) -> None:
        self._drop_cache(entry)
        entry.set_cache(cache)
        self._memory.add(entry.storages)

    def _drop_cache(self, entry: PrefixEntry) -> None:
        self._memory.remove(entry.storages)
        entry.drop_cache()

    def entry_covering(self, label: str, ids: Tokens) -> PrefixEntry | None:
        """An entry in memory that can be rolled back to exactly these tokens, or `None`."""
        for found in self.tree(label).nearest(ids):
            if found.tokens < len(ids):
                return None
            if found.value.can_restore((len(ids),)):
                return found.value
        return None

    def keep_in_memory(self, entry: PrefixEntry, cache: Cache) -> bool:
        """Hold the cache of an entry, which was loaded from its file, in memory if there is room.

        Returns:
            Whether it is held.
        """
        try:
            self._make_room(cache.storages(), leaving=())
        except CapacityError:
            return False
        if entry.path is None:
            # An entry that was just written to make room has replaced this one.
            return False
        self._set_cache(entry, cache)
        return True

    def _make_room(self, storages: Storages, leaving: Sequence[PrefixEntry]) -> None:
        nbytes = sum(storages.values())
        if nbytes > self.max_bytes:
            raise CapacityError(
                f"the cache must fit into the store's max_bytes of {exact_bytes(self.max_bytes)}, got one of "
                f"{exact_bytes(nbytes)}: make the store with a larger max_bytes."
            )
        leaving_ids = set(map(id, leaving))
        staying = [entry for entry in self if entry.cache is not None and id(entry) not in leaving_ids]
        pinned = MemoryAccount(entry.storages for entry in staying if entry.pins)
        already = pinned.nbytes
        pinned.add(storages)
        if pinned.nbytes > self.max_bytes:
            raise CapacityError(
                f"there is no room for {exact_bytes(nbytes)}, as {exact_bytes(already)} of "
                f"{exact_bytes(self.max_bytes)} are pinned: unpin() entries, or make the store with a larger max_bytes."
            )
        # Evict as if the exchange had happened already, since the new cache may share memory with stored ones.
        self._memory.add(storages)
        for entry in leaving:
            self._memory.remove(entry.storages)
        try:
            self._evict(staying, self.max_bytes)
        finally:
            for entry in leaving:
                self._memory.add(entry.storages)
            self._memory.remove(storages)

    def evict(self, nbytes: int | None) -> int:
        """Free at least `nbytes` bytes of memory (`None` for all), except for pinned entries.

        Returns:
            Number of bytes freed.
        """
        before = self.nbytes
        most = 0 if nbytes is None else before - nbytes
        self._evict([entry for entry in self if entry.cache is not None], most)
        return before - self.nbytes

    def _evict(self, candidates: Iterable[PrefixEntry], most: int) -> None:
        """Evict entries among `candidates` until no more than `most` bytes are used, or only pinned ones are left."""
        unpinned = [entry for entry in candidates if not entry.pins]
        order = list(self.policy.order(unpinned)) if self.nbytes > most else []
        # Entries that the policy leaves out come last, since the budget must hold whatever it returns.
        ordered = set(map(id, order))
        for entry in [*order, *(entry for entry in unpinned if id(entry) not in ordered)]:
            if self.nbytes <= most:
                break
            self.evictions += entry.cache is not None
            self.spill(entry)
            self._drop_cache(entry)
            if entry.path is None:
                self.delete(entry)
        self._shrink_directory()

    def spill(self, entry: PrefixEntry) -> None:
        """Write an entry to the directory, if there is one and the entry is not in it yet."""
        if self.directory is None or entry.path is not None or entry.cache is None:
            return
        try:
            written = self.directory.write(entry.label, entry.ids, entry.boundaries, entry.cache)
        except KVLayersError as error:
            self.failed_writes += 1
            logger.warning("An entry of a prefix store was not written to its directory: %s", error)
            return
        entry.path, entry.file_bytes = written.path, written.nbytes
        self.spilled += 1
        for found in self.tree(entry.label).prefixes_of(entry.ids):
            old = found.value
            if old is not entry and old.cache is None and not old.pins and entry.can_restore(old.boundaries):
                entry.boundaries |= old.boundaries
                self.delete(old)

    def flush(self) -> None:
        """Write every entry that is only in memory to the directory."""
        for entry in list(self):
            self.spill(entry)
        self._shrink_directory()

    def refresh(self) -> int:
        """Pick up what other processes have written to the directory or deleted from it.

        Returns:
            Number of entries that were added.

        Raises:
            CachePathError: the directory cannot be read now; nothing is changed.
        """
        if self.directory is None:
            return 0
        changes = self.directory.changes({entry.path for entry in self if entry.path is not None})
        for entry in list(self):
            if entry.path in changes.gone:
                self.drop_file(entry)
        before = len(self)
        for entry in changes.added:
            known = self.tree(entry.label).get(entry.ids)
            if known is None:
                self._add(entry)
            elif known.path is None and known.boundaries <= entry.boundaries:
                known.path, known.file_bytes = entry.path, entry.file_bytes
        added = len(self) - before
        self._shrink_directory()
        return added

    def _shrink_directory(self) -> None:
        if self.directory is None or self.directory_max_bytes is None:
            return
        over = self.file_bytes - self.directory_max_bytes
        if over <= 0:
            return
        by_path = {entry.path: entry for entry in self if entry.path is not None}
        for entry in map(by_path.__getitem__, self.directory.oldest_first(by_path)):
            if over <= 0:
                break
            if entry.pins and entry.cache is None:
                continue
            nbytes = entry.file_bytes
            if not self._delete_file(entry):
                break
            over -= nbytes
            if entry.cache is None:
                self.delete(entry)

    def delete(self, entry: PrefixEntry) -> None:
        """Remove an entry from memory, and delete its file."""
        self._delete_file(entry)
        self._drop_cache(entry)
        self._remove(entry)

    def _delete_file(self, entry: PrefixEntry) -> bool:
        """Delete the file of an entry, if it has one; whether it has none now."""
        if self.directory is not None and entry.path is not None:
            if not self.directory.delete(entry.path):
                return False
            entry.path, entry.file_bytes = None, 0
        return True

    def drop_file(self, entry: PrefixEntry) -> None:
        """Stop using the file of an entry, which is gone or damaged."""
        entry.path, entry.file_bytes = None, 0
        if entry.cache is None:
            self._remove(entry)

    def clear(self) -> None:
        """Remove all entries, pinned or not, and delete their files."""
        for entry in list(self):
            self.delete(entry)
        self._trees = {}
