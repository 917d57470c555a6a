"""The entries of a store, and the room that they take. Not safe for threads by itself."""

import logging
from collections.abc import Iterable, Iterator, Sequence

from kvlayers.caches.base import Cache
from kvlayers.errors import CapacityError, KVLayersError
from kvlayers.prefix.directory import Directory
from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.eviction import EvictionPolicy
from kvlayers.prefix.memory_account import MemoryAccount
from kvlayers.prefix.radix_tree import RadixTree, Tokens
from kvlayers.utils.tensor_memory import Storages
from kvlayers.utils.units import exact_bytes

logger = logging.getLogger(__name__)


class EntryIndex:
    """Entries by label and tokens; those in memory never take more than `max_bytes`.

    Args:
        max_bytes: of memory, for all caches.
        policy: which entry goes first.
        directory: where entries go that leave memory, `None` for nowhere.
        directory_max_bytes: of its files, `None` for as many as the disk has.
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
        self._ledger = MemoryAccount()
        self.refresh()

    def __iter__(self) -> Iterator[PrefixEntry]:
        for tree in self._trees.values():
            yield from tree.values()

    def __len__(self) -> int:
        return sum(len(tree) for tree in self._trees.values())

    def tree(self, label: str) -> RadixTree[PrefixEntry]:
        """The entries of a model and a namespace, to be read."""
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
        """Bytes of memory. What entries share counts once."""
        return self._ledger.nbytes

    @property
    def file_bytes(self) -> int:
        """Bytes of files."""
        return sum(entry.file_bytes for entry in self)

    def touch(self, entry: PrefixEntry) -> None:
        """Note that an entry is used now."""
        self._uses += 1
        entry.last_use = self._uses

    def put(self, label: str, ids: Tokens, cache: Cache) -> bool:
        """Hold a cache for tokens, unless one that is held stands for them already.

        Args:
            label: model and namespace.
            ids: all tokens that `cache` has seen.
            cache: what nobody will write to.

        Returns:
            Whether it is held.

        Raises:
            CapacityError: there is no room for it beside what is pinned; nothing is changed.
        """
        tree = self.tree(label)
        standing = self.standing_for(label, ids)
        if standing is not None:
            standing.boundaries.add(len(ids))
            self.touch(standing)
            return False
        known = tree.get(ids)
        entry = PrefixEntry(label, ids) if known is None else known
        candidate = PrefixEntry(label, ids, cache)
        shorter = [found.value for found in tree.on_the_way(ids) if found.value is not entry]
        replaced = [old for old in shorter if not old.pins and candidate.stands_for(old.boundaries)]
        self._make_room(cache.storages(), leaving=replaced)
        for old in replaced:
            entry.boundaries |= old.boundaries
            self._let_go(old)
            # A file stays until what replaces it is in one.
            if old.path is None:
                self.forget(old)
        self._hold(entry, cache)
        self._add(entry)
        return True

    def _hold(self, entry: PrefixEntry, cache: Cache) -> None:
        self._let_go(entry)
        entry.hold(cache)
        self._ledger.add(entry.storages)

    def _let_go(self, entry: PrefixEntry) -> None:
        self._ledger.remove(entry.storages)
        entry.let_go()

    def standing_for(self, label: str, ids: Tokens) -> PrefixEntry | None:
        """An entry in memory that can be put back to exactly these tokens, `None` where there is none."""
        for found in self.tree(label).nearest(ids):
            if found.tokens < len(ids):
                return None
            if found.value.stands_for((len(ids),)):
                return found.value
        return None

    def validate(self, entry: PrefixEntry, cache: Cache) -> bool:
        """Take the cache of an entry, which was in a file alone, into memory, where there is room beside the pinned."""
        try:
            self._make_room(cache.storages(), leaving=())
        except CapacityError:
            return False
        if entry.path is None:
            # What went to the directory to make room stands for it, and has taken the place of its file.
            return False
        self._hold(entry, cache)
        return True

    def _make_room(self, storages: Storages, leaving: Sequence[PrefixEntry]) -> None:
        nbytes = sum(storages.values())
        if nbytes > self.max_bytes:
            raise CapacityError(
                f"expected a cache of at most {exact_bytes(self.max_bytes)}, the budget of the store, but saw one of "
                f"{exact_bytes(nbytes)}: make the store with a larger max_bytes."
            )
        apart = set(map(id, leaving))
        staying = [entry for entry in self if entry.cache is not None and id(entry) not in apart]
        pinned = MemoryAccount(entry.storages for entry in staying if entry.pins)
        already = pinned.nbytes
        pinned.add(storages)
        if pinned.nbytes > self.max_bytes:
            raise CapacityError(
                f"expected room for {exact_bytes(nbytes)}, but {exact_bytes(already)} of {exact_bytes(self.max_bytes)} "
                "are pinned: unpin() some, or make the store with a larger max_bytes."
            )
        # As if the newcomer were there and what it replaces were not: some of its memory may be held already.
        self._ledger.add(storages)
        for entry in leaving:
            self._ledger.remove(entry.storages)
        try:
            self._evict(staying, self.max_bytes)
        finally:
            for entry in leaving:
                self._ledger.add(entry.storages)
            self._ledger.remove(storages)

    def evict(self, nbytes: int | None) -> int:
        """Free at least `nbytes` bytes of memory, all for `None`, as far as entries are not pinned.

        Returns:
            Bytes that were freed.
        """
        before = self.nbytes
        most = 0 if nbytes is None else before - nbytes
        self._evict([entry for entry in self if entry.cache is not None], most)
        return before - self.nbytes

    def _evict(self, held: Iterable[PrefixEntry], most: int) -> None:
        """Evict entries among `held`, until no more than `most` bytes are held or none is left that may go."""
        loose = [entry for entry in held if not entry.pins]
        order = list(self.policy.order(loose)) if self.nbytes > most else []
        # What a policy does not name goes last: the budget holds whatever it says.
        named = set(map(id, order))
        for entry in [*order, *(entry for entry in loose if id(entry) not in named)]:
            if self.nbytes <= most:
                break
            self.evictions += entry.cache is not None
            self.spill(entry)
            self._let_go(entry)
            if entry.path is None:
                self.forget(entry)
        self._shrink_directory()

    def spill(self, entry: PrefixEntry) -> None:
        """Write an entry to the directory, where there is one that it is not in yet."""
        if self.directory is None or entry.path is not None or entry.cache is None:
            return
        try:
            self.directory.write(entry)
        except KVLayersError as error:
            self.failed_writes += 1
            logger.warning("An entry of a prefix store was not written to its directory: %s", error)
            return
        self.spilled += 1
        for found in self.tree(entry.label).on_the_way(entry.ids):
            old = found.value
            if old is not entry and old.cache is None and not old.pins and entry.stands_for(old.boundaries):
                entry.boundaries |= old.boundaries
                self.forget(old)

    def flush(self) -> None:
        """Write all that is in memory alone to the directory."""
        for entry in list(self):
            self.spill(entry)
        self._shrink_directory()

    def refresh(self) -> int:
        """See what others have written to the directory, and what they have deleted.

        Returns:
            Entries that were added.

        Raises:
            CachePathError: the directory cannot be read now; nothing is changed.
        """
        if self.directory is None:
            return 0
        changes = self.directory.changes({entry.path for entry in self if entry.path is not None})
        for entry in list(self):
            if entry.path in changes.gone:
                self.lose_file(entry)
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
        for entry in self.directory.oldest_first([entry for entry in self if entry.path is not None]):
            if over <= 0:
                break
            if entry.pins and entry.cache is None:
                continue
            nbytes = entry.file_bytes
            if not self.directory.delete(entry):
                break
            over -= nbytes
            if entry.cache is None:
                self.forget(entry)

    def forget(self, entry: PrefixEntry) -> None:
        """Hold an entry no more, neither in memory nor in a file."""
        if self.directory is not None:
            self.directory.delete(entry)
        self._let_go(entry)
        self._remove(entry)

    def lose_file(self, entry: PrefixEntry) -> None:
        """Look for an entry in its file no more, which is gone or damaged."""
        entry.path, entry.file_bytes = None, 0
        if entry.cache is None:
            self._remove(entry)

    def clear(self) -> None:
        """Hold nothing, pinned or not, neither in memory nor in files."""
        for entry in list(self):
            self.forget(entry)
        self._trees = {}
