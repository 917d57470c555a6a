"""The entries of a store, and the room that they take. Not safe for threads by itself."""

import logging
from collections.abc import Iterable, Iterator

from ..cache import Cache
from ..errors import CapacityError, KVLayersError
from .disk import Directory
from .entry import Entry
from .eviction import EvictionPolicy
from .tree import RadixTree, Tokens

logger = logging.getLogger(__name__)


class Holdings:
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
        self._trees: dict[str, RadixTree[Entry]] = {}
        self._uses = 0
        for entry in () if directory is None else directory.entries():
            self.tree(entry.label).insert(entry.ids, entry)
            self.touch(entry)
        self._shrink_directory()

    def __iter__(self) -> Iterator[Entry]:
        for tree in self._trees.values():
            yield from tree.values()

    def __len__(self) -> int:
        return sum(len(tree) for tree in self._trees.values())

    def tree(self, label: str) -> RadixTree[Entry]:
        """The entries of a model and a namespace."""
        return self._trees.setdefault(label, RadixTree())

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(entry.nbytes for entry in self)

    @property
    def file_bytes(self) -> int:
        """Bytes of files."""
        return sum(entry.file_bytes for entry in self)

    def touch(self, entry: Entry) -> None:
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
        entry = Entry(label, ids) if known is None else known
        candidate = Entry(label, ids, cache)
        shorter = [found.value for found in tree.on_the_way(ids) if found.value is not entry]
        replaced = [old for old in shorter if not old.pins and candidate.stands_for(old.boundaries)]
        self._make_room(cache.nbytes, leaving=replaced)
        for old in replaced:
            entry.boundaries |= old.boundaries
            old.let_go()
            # A file stays until what replaces it is in one.
            if old.path is None:
                self.forget(old)
        entry.hold(cache)
        tree.insert(ids, entry)
        self.touch(entry)
        return True

    def standing_for(self, label: str, ids: Tokens) -> Entry | None:
        """An entry in memory that can be put back to exactly these tokens, `None` where there is none."""
        for found in self.tree(label).nearest(ids):
            if found.tokens < len(ids):
                return None
            if found.value.stands_for((len(ids),)):
                return found.value
        return None

    def admit(self, entry: Entry, cache: Cache) -> bool:
        """Take the cache of an entry, which was in a file alone, into memory, where there is room beside the pinned."""
        try:
            self._make_room(cache.nbytes, leaving=())
        except CapacityError:
            return False
        if entry.path is None:
            # What went to the directory to make room stands for it, and has taken the place of its file.
            return False
        entry.hold(cache)
        return True

    def _make_room(self, nbytes: int, leaving: Iterable[Entry]) -> None:
        if nbytes > self.max_bytes:
            raise CapacityError(
                f"expected a cache of at most {self.max_bytes} bytes, the budget of the store, but saw one of "
                f"{nbytes}: make the store with a larger max_bytes."
            )
        apart = set(map(id, leaving))
        staying = [entry for entry in self if entry.cache is not None and id(entry) not in apart]
        pinned = sum(entry.nbytes for entry in staying if entry.pins)
        if pinned + nbytes > self.max_bytes:
            raise CapacityError(
                f"expected room for {nbytes} bytes, but {pinned} of {self.max_bytes} are pinned: unpin() some, or make "
                "the store with a larger max_bytes."
            )
        self._evict(staying, sum(entry.nbytes for entry in staying) + nbytes - self.max_bytes)

    def evict(self, nbytes: int | None) -> int:
        """Free at least `nbytes` bytes of memory, all for `None`, as far as entries are not pinned.

        Returns:
            Bytes that were freed.
        """
        held = [entry for entry in self if entry.cache is not None]
        return self._evict(held, sum(entry.nbytes for entry in held) if nbytes is None else nbytes)

    def _evict(self, held: Iterable[Entry], nbytes: int) -> int:
        """Evict entries among `held`, until `nbytes` bytes are free or none is left that may go."""
        free = 0
        loose = [entry for entry in held if not entry.pins]
        order = list(self.policy.order(loose)) if nbytes > 0 else []
        # What a policy does not name goes last: the budget holds whatever it says.
        named = set(map(id, order))
        for entry in [*order, *(entry for entry in loose if id(entry) not in named)]:
            if free >= nbytes:
                break
            free += entry.nbytes
            self.evictions += entry.cache is not None
            self.spill(entry)
            entry.let_go()
            if entry.path is None:
                self.forget(entry)
        self._shrink_directory()
        return free

    def spill(self, entry: Entry) -> None:
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

    def _shrink_directory(self) -> None:
        if self.directory is None or self.directory_max_bytes is None:
            return
        over = self.file_bytes - self.directory_max_bytes
        if over <= 0:
            return
        for entry in sorted((entry for entry in self if entry.path is not None), key=self.directory.used):
            if over <= 0:
                break
            if entry.pins and entry.cache is None:
                continue
            over -= entry.file_bytes
            self.directory.delete(entry)
            if entry.cache is None:
                self.forget(entry)

    def forget(self, entry: Entry) -> None:
        """Hold an entry no more, neither in memory nor in a file."""
        if self.directory is not None:
            self.directory.delete(entry)
        entry.let_go()
        self.tree(entry.label).remove(entry.ids)

    def lose_file(self, entry: Entry) -> None:
        """Look for an entry in its file no more, which is gone or damaged."""
        entry.path, entry.file_bytes = None, 0
        if entry.cache is None:
            self.tree(entry.label).remove(entry.ids)

    def clear(self) -> None:
        """Hold nothing, pinned or not, neither in memory nor in files."""
        for entry in list(self):
            self.forget(entry)
        self._trees = {}
