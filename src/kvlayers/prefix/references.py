"""Which entries refer to which blocks, as far as this process knows."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvlayers.persistence.block_table import BlockTable
from kvlayers.persistence.inspect import CacheFile
from kvlayers.prefix.backends import StoredFile

Hold = Callable[[Iterable[str]], None]
"""Keeps blocks with these names."""


@dataclass(frozen=True)
class KnownEntry:
    """The file of an entry.

    Attributes:
        nbytes: bytes of the file.
        table: its blocks, none if the file holds the states itself.
        file: the file in a listing, `None` if it was written since.
        since: when it became known, in nanoseconds since 1970.
    """

    nbytes: int
    table: BlockTable = field(default_factory=BlockTable)
    file: StoredFile | None = None
    since: int = field(default_factory=time.time_ns)


def known_entry(seen: CacheFile, file: StoredFile) -> KnownEntry:
    """What a listed file says about its entry."""
    return KnownEntry(file.nbytes, BlockTable() if seen.blocks is None else seen.blocks, file)


class BlockReferences:
    """Entries by path, and their blocks. Threads may share it.

    Attributes:
        unusable: names of blocks that were damaged or missing, to which no new entry may refer until they were written
            anew.
    """

    def __init__(self) -> None:
        self.unusable: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._entries: dict[str, KnownEntry] = {}
        self._counts: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._sole: dict[str, int] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all entries and blocks, each counted once."""
        return self._nbytes

    def get(self, path: str) -> KnownEntry | None:
        """What is known of an entry."""
        with self._lock:
            return self._entries.get(path)

    def put(self, path: str, entry: KnownEntry) -> None:
        """Record an entry, in place of what was known of it."""
        with self._lock:
            # The new one first, so that blocks of both are never without a reference.
            old = self._entries.get(path)
            self._entries[path] = entry
            self._count(entry, 1)
            if old is not None:
                self._count(old, -1)

    def drop(self, path: str) -> list[str]:
        """Forget an entry.

        Returns:
            Names of its blocks.
        """
        with self._lock:
            old = self._entries.pop(path, None)
            if old is None:
                return []
            self._count(old, -1)
            return list(old.table.sizes)

    def _count(self, entry: KnownEntry, change: int) -> None:
        self._nbytes += change * entry.nbytes
        for name, nbytes in entry.table.sizes.items():
            before = self._counts[name]
            self._counts[name] += change
            if not before or not self._counts[name]:
                self._nbytes += change * nbytes
            if not self._counts[name]:
                del self._counts[name]

    @contextmanager
    def holding(self) -> Iterator[Hold]:
        """For the length of the context, this process deletes none of the blocks that the function was called with.

        A writer calls it with the blocks that it is about to refer to.
        """
        held: set[str] = set()

        def hold(names: Iterable[str]) -> None:
            more = set(names) - held
            held.update(more)
            with self._lock:
                self._held.update(more)

        try:
            yield hold
        finally:
            with self._lock:
                self._held -= Counter(held)

    def forget_gone(self, listed: Iterable[str], began: int) -> None:
        """Forget entries that are not in a listing.

        Args:
            listed: paths of all entries in it.
            began: when it began. Entries that became known later may not be in it.
        """
        listed = set(listed)
        with self._lock:
            gone = [path for path, entry in self._entries.items() if path not in listed and entry.since < began]
        for path in gone:
            self.drop(path)

    def unreferenced(self, names: Iterable[str]) -> list[str]:
        """Blocks among `names` to which no entry refers, and no writer of this process."""
        with self._lock:
            return [name for name in names if name not in self._counts and name not in self._held]

    def add_unusable(self, names: Iterable[str]) -> None:
        """Do not refer to these blocks."""
        with self._lock:
            self.unusable = self.unusable.union(names)

    def discard_unusable(self, name: str) -> None:
        """Refer to this block again, which was written anew."""
        with self._lock:
            self.unusable = self.unusable - {name}

    def set_uses(self, uses: Mapping[str, int]) -> None:
        """Record when this process has used blocks that no other process has used, as the backend counts."""
        with self._lock:
            self._sole.update(uses)

    def used_by_this_process_alone(self, files: Iterable[StoredFile], name_of: Mapping[str, str]) -> list[str]:
        """Names of blocks that no other process has used, as far as their files say.

        Args:
            files: files of blocks.
            name_of: names of the blocks by those of the files.
        """
        with self._lock:
            return [name for file in files if self._sole.get(name := name_of[file.name], -1) == file.used]

    def forget_uses(self, names: Iterable[str]) -> None:
        """Forget blocks that are gone, or that other processes have used."""
        with self._lock:
            for name in names:
                self._sole.pop(name, None)
