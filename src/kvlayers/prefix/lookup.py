"""Finding the longest prefix of a prompt that a stored cache can be rolled back to, and inserting caches."""

import contextlib
import contextvars
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from kvlayers.core.cache import Cache
from kvlayers.errors import CacheFileError, CachePathError, CapacityError
from kvlayers.prefix.backends import UnreachableError
from kvlayers.prefix.directory import Directory, NeedsConfigError, name_in
from kvlayers.prefix.entry import Pin, PrefixEntry, can_restore, restorable_length, shares_memory
from kvlayers.prefix.index import MOST_TRIED, EntryIndex
from kvlayers.prefix.keys import Tokens
from kvlayers.prefix.write_queue import WriteQueue

MAX_FILES = 4
"""Files that one lookup tries at most: only loading tells whether a window can be rolled back far enough."""


IN_SESSION: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("sessions of this context", default=())
"""The sessions whose blocks this context is in. To the innermost one, a `Session`, which stands above this room, its
insertions belong."""


@dataclass(frozen=True)
class Hit:
    """The result of a lookup.

    Attributes:
        cache: a cache that has seen the first `covered` tokens, and belongs to the caller; `None` if nothing was found.
        covered: number of tokens of the prompt that need not be computed.
        reason: why it is not more; empty if only tokens are left that the lookup was to leave.
        known: number of tokens that other prompts have begun with, whether or not their states can go back to there.
    """

    cache: Cache | None = None
    covered: int = 0
    reason: str = ""
    known: int = 0


class FileCandidate(NamedTuple):
    """An entry in files that may serve a prompt.

    Attributes:
        entry: the entry.
        path: path of the file with its last tokens, whatever becomes of the entry.
        shared: number of tokens that it shares with the prompt and that are to be found.
    """

    entry: PrefixEntry
    path: str
    shared: int

    @property
    def is_whole(self) -> bool:
        """Whether all of its tokens are needed. Such an entry certainly works."""
        return self.entry.length <= self.shared


@dataclass(eq=False)
class Search:
    """One lookup, and the longest prefix that it has found so far.

    Args:
        label: model and namespace, as returned by `keys.label_of`.
        ids: the tokens to look for.

    Attributes:
        cache: a cache that has seen the longest prefix; `None` if nothing was found.
        entry: the entry that it is from.
        covered: number of its tokens.
        is_whole: whether the cache was loaded from a file with all tokens of the entry.
        files: what to load, the best first: each may serve more tokens than what memory has.
        shared: tokens that an entry begins with, whether or not its states can go back to there.
        damaged: entries whose files are gone or damaged.
        notes: why files did not serve, each once.
    """

    label: str
    ids: Tokens
    cache: Cache | None = None
    entry: PrefixEntry | None = None
    covered: int = 0
    is_whole: bool = False
    files: list[FileCandidate] = field(default_factory=list)
    shared: int = 0
    damaged: list[FileCandidate] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)

    def choose(self, index: EntryIndex) -> PrefixEntry | None:
        """Find the longest prefix in memory, and the files that may have a longer one.

        Returns:
            The entry of the first file, `None` without files.
        """
        self.cache, self.entry, self.covered, self.files, self.shared = None, None, 0, [], 0
        for bound, group in index.in_memory.groups(self.label, self.ids):
            self.shared = max(self.shared, bound)
            if bound <= self.covered:
                break
            # The shortest first, as a window that has moved less is more likely to be rolled back far enough.
            for entry in sorted(itertools.islice(group, MOST_TRIED), key=attrgetter("length")):
                if entry.cache is None or self.covered >= bound:
                    break
                if (target := restorable_length(entry.cache, bound)) > self.covered:
                    self.cache, self.entry, self.covered = entry.fork(entry.cache, target), entry, target
        for bound, group in index.entries.groups(self.label, self.ids) if index.has_directory else ():
            self.shared = max(self.shared, bound)
            if bound <= self.covered or sum(file.is_whole for file in self.files) >= MAX_FILES:
                # More would never be read, unless all of these are damaged.
                break
            in_files = (
                FileCandidate(entry, entry.path, bound)
                for entry in group
                if entry.cache is None and entry.path is not None
            )
            self.files += sorted(itertools.islice(in_files, MOST_TRIED), key=lambda file: file.entry.length)
        return self.files[0].entry if self.files else None

    def load(
        self, directory: Directory, config: object | None, device: torch.device | str | None, deadline: float
    ) -> None:
        """Load from files until nothing longer can be found, or until `deadline`, as `time.monotonic()` counts."""
        for number, file in enumerate(self.files):
            if file.shared <= self.covered:
                break
            if number >= MAX_FILES and not file.is_whole:
                self.notes[f"a lookup tries no more than {MAX_FILES} files"] = None
                continue
            try:
                cache = directory.load(file.path, file.shared, config, device, deadline)
            except NeedsConfigError:
                self.notes["a file needs config=model.config to be loaded"] = None
            except UnreachableError as error:
                directory.report(name_in(file.path), error)
                self.notes["a file could not be reached"] = None
                # Do not wait for the others.
                break
            except CachePathError:
                self.damaged.append(file)
            except CacheFileError as error:
                directory.report(name_in(file.path), error, deadline)
                self.damaged.append(file)
                self.notes["a damaged file was skipped"] = None
            else:
                length = 0 if cache is None else cache.length
                if cache is not None and cache.keeps_every_token and length < min(file.shared, file.entry.length):
                    self.notes["part of a file was damaged, missing or late"] = None
                if length > self.covered:
                    self.cache, self.entry, self.covered = cache, file.entry, length
                    self.is_whole = length == file.entry.length

    def reason(self, index: EntryIndex) -> str:
        """Why no more was found."""
        covered, notes, entry = self.covered, self.notes, self.entry
        if covered == len(self.ids):
            return "" if covered else "the prompt is a single token, which must be computed"
        if not self.shared and not index.entries.has(self.label):
            reason = "nothing is stored for this model and namespace"
        elif not self.shared:
            reason = "no stored sequence starts with these tokens"
        elif covered < self.shared and notes:
            reason = f"{self.shared} tokens are stored, but only {covered} of them can be used now"
        elif covered < self.shared:
            reason = (
                f"{self.shared} tokens are stored, but windows and recurrent states can be rolled back to {covered} "
                "of them only: insert a cache where prompts diverge"
            )
        else:
            reason = (
                f"the stored sequence {'ends' if entry is not None and entry.length == covered else 'diverges'} after "
                f"{covered}"
            )
        return "; ".join([reason, *notes])


class EntryAccess:
    """Inserts and finds entries for several threads at once.

    The lock is held while the index is read or changed, and not while files are read. States move under it only to give
    back memory that is needed.

    Args:
        index: the entries.
        lock: the lock of the store.
        changed: has this lock, and is notified when a file was read or written.
        writes: what writes entries to a directory, `None` without one.

    Attributes:
        sessions: the sessions of the store, by namespace and name, which `serving` makes.
    """

    def __init__(
        self,
        index: EntryIndex,
        lock: threading.Lock,
        changed: threading.Condition,
        writes: WriteQueue | None,
    ) -> None:
        self.index, self._changed, self._writes = index, changed, writes
        # Not by the condition, whose methods are Python: an interrupt within them would leave it locked.
        self.lock = lock
        self._loading: set[PrefixEntry] = set()
        self.sessions: dict[tuple[str, str], Any] = {}

    def insert(self, label: str, ids: Tokens, cache: Cache, wait_seconds: float, pins: Sequence[Pin] = ()) -> bool:
        """Insert a cache for tokens, unless an entry in memory can be rolled back to them.

        Args:
            label: model and namespace.
            ids: all tokens that `cache` has seen.
            cache: the cache, to which nobody else will write.
            wait_seconds: how long to wait at most until there is memory.
            pins: what is to keep it.

        Returns:
            Whether it was inserted.

        Raises:
            CapacityError: there is no room for it.
        """
        deadline = time.monotonic() + wait_seconds
        self._share(label, ids, cache)
        with self.lock, self.index.counted():
            while True:
                if self.index.use_covering(label, ids):
                    return False
                if self._take(self.index.entries.get(label, ids) or PrefixEntry(label, ids), cache, pins):
                    return True
                if self._writes is None or not self._writes.wait_for_memory(deadline):
                    raise CapacityError(
                        "there is no room until an entry has been written to the directory, which has taken more than "
                        f"{wait_seconds} s: insert it later, or make the store with a larger write_wait_seconds."
                    )

    def pin(self, label: str, ids: Tokens, pin: Pin) -> bool:
        """Pin the entry of exactly these tokens. If a longer one in memory serves them, they get an entry first.

        Returns:
            Whether there is such an entry.

        Raises:
            CapacityError: the longer one shares no memory, and there is no room for a copy of it.
        """
        with self.lock, self.index.counted():
            entry, covering = self.index.entries.get(label, ids), self.index.entry_covering(label, ids)
            if entry is None and covering is not None and covering.cache is not None:
                entry = PrefixEntry(label, ids)
                if not self._take(entry, covering.fork(covering.cache, len(ids))):
                    raise CapacityError("there is no room until an entry has been written to the directory: pin later.")
            if entry is not None:
                self.index.pin(entry, pin)
            return entry is not None

    def find(
        self,
        label: str,
        ids: Tokens,
        config: object | None,
        device: torch.device | str | None,
        wait_seconds: float,
    ) -> Hit:
        """Find the longest prefix of these tokens.

        Args:
            label: model and namespace.
            ids: the tokens.
            config: config of the model, for layers in files that need it.
            device: device for states from files, `None` for the host.
            wait_seconds: how long to wait for files at most.
        """
        deadline = time.monotonic() + wait_seconds
        search = Search(label, ids)
        with self.lock:
            # An entry that another thread loads as a whole is waited for, not loaded too.
            self._changed.wait_for(lambda: search.choose(self.index) not in self._loading, deadline - time.monotonic())
            # What other threads are to wait for.
            announced = {file.entry for file in search.files[:1] if file.is_whole} - self._loading
            self._loading |= announced
        try:
            if self._writes is not None and search.files:
                search.load(self._writes.directory, config, device, deadline)
            if search.is_whole and search.cache is not None:
                self._share(label, ids[: search.covered], search.cache)
            with self.lock, self.index.counted():
                self._keep(search)
                return Hit(search.cache, search.covered, search.reason(self.index), search.shared)
        finally:
            # Not before it is in memory, or whoever waits would read it again.
            if announced:
                with self.lock:
                    self._loading -= announced
                    self._changed.notify_all()

    def _share(self, label: str, ids: Tokens, cache: Cache) -> None:
        """Have a cache hold its first tokens where an entry in memory holds them, and give back its spare room."""
        with self.lock:
            can_share = shares_memory(cache) and not cache.rotates_keys
            closest, tokens = self.index.closest_in_memory(label, ids) if can_share else (None, 0)
            other = None if closest is None or closest.cache is None else closest.cache.fork()
        if other is not None:
            cache.share_prefix(other, tokens)
            # Of the other cache's holders, the entry alone is left.
            del other
        before = cache.storages()
        # This may move what it shares with entries.
        cache.trim()
        with self.lock, self.index.counted():
            self.index.note_moves(before.items() - cache.storages().items())

    def _take(self, entry: PrefixEntry, cache: Cache, pins: Sequence[Pin] = ()) -> bool:
        """Let a cache enter memory if there is room for it now. If not, entries are on their way out of memory."""
        shorter = self.index.shorter(entry)
        replaced = [old for old in shorter if set(old.pins) <= set(pins) and can_restore(cache, old.boundaries)]
        self.index.check_room(entry, cache, replaced)
        has_entered, leaving = self.index.enter(entry, cache, replaced)
        if self._writes is not None:
            self._writes.write(leaving)
            for old in replaced if has_entered else ():
                self._writes.write_instead(old, entry)
        return has_entered

    def _keep(self, search: Search) -> None:
        """Hold in memory what was loaded, and forget files that are gone or damaged."""
        for file in search.damaged:
            if file.entry.path == file.path:
                self.index.drop_file(file.entry)
        entry, cache = search.entry, search.cache
        # What is in memory is in the index.
        if entry is None or cache is None or (entry.cache is None and entry not in self.index):
            return
        if search.is_whole and entry.cache is None:
            search.cache = cache.fork()
            with contextlib.suppress(CapacityError):
                self._take(entry, cache)
        # Another thread may have made it shorter meanwhile.
        self.index.touch(entry, min(search.covered, len(entry.ids)))
        entry.hits += 1
        entry.used = time.time()
