"""Inserting entries into a prefix store, and finding them."""

import contextlib
import threading
import time

import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import CapacityError
from kvlayers.prefix.directory import Directory
from kvlayers.prefix.entry import shares_memory
from kvlayers.prefix.index import EntryIndex, Exchange
from kvlayers.prefix.lookup import Hit, Search
from kvlayers.prefix.radix_tree import Tokens
from kvlayers.prefix.write_queue import WriteQueue


class EntryAccess:
    """Inserts and finds entries for several threads at once.

    The lock is held while the index is read or changed, and not while files are read. States move under it only to give
    back memory that is needed.

    Args:
        index: the entries.
        lock: the lock of the store.
        changed: has this lock, and is notified when a file was read or written.
        directory: where entries are in files, `None` for nowhere.
        writes: what writes them there.
    """

    def __init__(
        self,
        index: EntryIndex,
        lock: threading.Lock,
        changed: threading.Condition,
        directory: Directory | None,
        writes: WriteQueue | None,
    ) -> None:
        self._index, self._changed, self._directory, self._writes = index, changed, directory, writes
        # Not by the condition, whose methods are Python: an interrupt within them would leave it locked.
        self._lock = lock
        self._loading: set[int] = set()

    def insert(self, label: str, ids: Tokens, cache: Cache, wait_seconds: float) -> bool:
        """Insert a cache for tokens, unless an entry in memory can be rolled back to them.

        Args:
            label: model and namespace.
            ids: all tokens that `cache` has seen.
            cache: the cache, to which nobody else will write.
            wait_seconds: how long to wait at most until there is memory.

        Returns:
            Whether it was inserted.

        Raises:
            CapacityError: there is no room for it.
        """
        deadline = time.monotonic() + wait_seconds
        with self._lock:
            if self._index.use_covering(label, ids):
                return False
        self._share(label, ids, cache)
        with self._lock, self._index.counted():
            while True:
                exchange = self._index.exchange(label, ids, cache)
                if exchange is None:
                    return False
                if self._take(exchange):
                    return True
                if self._writes is None or not self._writes.wait_for_memory(deadline):
                    raise CapacityError(
                        "there is no room until an entry has been written to the directory, which has taken more than "
                        f"{wait_seconds} s: insert it later, or make the store with a larger write_wait_seconds."
                    )

    def find(
        self, label: str, ids: Tokens, config: object | None, device: torch.device | str | None, wait_seconds: float
    ) -> Hit:
        """Find the longest prefix of a prompt.

        Args:
            label: model and namespace.
            ids: the prompt.
            config: config of the model, for layers in files that need it.
            device: device for states from files, `None` for the host.
            wait_seconds: how long to wait for files at most.
        """
        deadline = time.monotonic() + wait_seconds
        search = Search(label, ids)
        with self._lock:
            announced = self._choose(search, deadline)
        try:
            if self._directory is not None and search.files:
                search.load(self._directory, config, device, deadline)
            found = search.found
            loaded = found.cache if found.is_whole else None
            if loaded is not None:
                self._share(label, ids[: found.covered], loaded)
            with self._lock, self._index.counted():
                self._keep(search)
                return search.hit()
        finally:
            # Not before it is in memory, or whoever waits would read it again.
            if announced:
                with self._lock:
                    self._loading -= announced
                    self._changed.notify_all()

    def _share(self, label: str, ids: Tokens, cache: Cache) -> None:
        """Have a cache hold its first tokens where an entry in memory holds them, and give back its spare room."""
        with self._lock:
            can_share = shares_memory(cache) and not cache.rotates_keys
            closest = self._index.closest_in_memory(label, ids) if can_share else None
        if closest is not None:
            cache.share_prefix(*closest)
            # Of the other cache's holders, the entry alone is left.
            del closest
        before = cache.storages()
        # This may move what it shares with entries.
        cache.trim()
        with self._lock, self._index.counted():
            self._index.note_moves(before.keys() - cache.storages().keys())

    def _take(self, exchange: Exchange) -> bool:
        """Make an exchange if there is room for it now. If not, entries are on their way out of memory."""
        self._index.check_room(exchange)
        is_made, leaving = self._index.make(exchange)
        if self._writes is not None:
            self._writes.write(leaving)
            for old in exchange.replaced if is_made else ():
                self._writes.write_instead(old, exchange.entry)
        return is_made

    def _choose(self, search: Search, deadline: float) -> set[int]:
        """Choose what serves a prompt. An entry that another thread loads as a whole is waited for, not loaded too.

        Returns:
            What other threads are to wait for.
        """
        search.choose(self._index)
        while search.files and id(search.files[0].entry) in self._loading:
            if not self._changed.wait(deadline - time.monotonic()):
                break
            search.choose(self._index)
        announced = {id(file.entry) for file in search.files[:1] if file.is_whole} - self._loading
        self._loading |= announced
        return announced

    def _keep(self, search: Search) -> None:
        """Hold in memory what was loaded, and forget files that are gone or damaged."""
        index, found = self._index, search.found
        for file in found.damaged:
            if file.entry.path == file.path:
                index.drop_file(file.entry)
        entry, cache = found.entry, found.cache
        if entry is None or cache is None or entry not in index:
            return
        if found.is_whole and entry.cache is None:
            found.cache = cache.fork()
            with contextlib.suppress(CapacityError):
                self._take(Exchange(entry, cache))
        index.hit(entry)
