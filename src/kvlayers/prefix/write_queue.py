"""Writes evicted entries to a directory, in a thread of its own, and deletes files there."""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvlayers.errors import CachePathError, KVLayersError
from kvlayers.prefix.directory import LISTED_PARTS, Directory
from kvlayers.prefix.entry import PrefixEntry, can_restore
from kvlayers.prefix.index import EntryIndex

logger = logging.getLogger(__name__)

MOST_TRIES = 6
"""How often an entry is written at most, if the directory cannot be reached."""

FIRST_DELAY = 0.1
"""Seconds before the second try. Each further delay is twice as long, 3.1 s in total."""

SECONDS_AT_EXIT = 10.0
"""How long the end of a process waits for all stores at most, until their entries are written."""

_queues: "weakref.WeakSet[WriteQueue]" = weakref.WeakSet()
"""All queues of this process."""


@dataclass(eq=False)
class _Job:
    """An entry to write, and how often that was tried."""

    entry: PrefixEntry
    tries: int = 0


class WriteQueue:
    """Entries that are to be in the directory of a store, which one thread writes in order.

    The memory of an entry that waits here counts as memory of the store, so the queue never holds more bytes than the
    store's budget. The thread ends when there is nothing left to do. All methods except `work_off`, `delete` and `tidy`
    need the lock of `changed`, which is the lock of the store. No file is touched while it is held.

    Args:
        index: the entries.
        directory: where to write them.
        directory_max_bytes: bytes of all files, `None` for no limit.
        changed: is notified when a job is done.

    Attributes:
        directory: where it writes.
        jobs: what is to be done. The first one stays here until it is done.
        spilled: entries that were written.
        failed_writes: entries that could not be written.
        dropped_writes: entries that were dropped before they were written, because a caller needed their memory.
    """

    def __init__(
        self, index: EntryIndex, directory: Directory, directory_max_bytes: int | None, changed: threading.Condition
    ) -> None:
        self.directory_max_bytes = directory_max_bytes
        self.spilled = self.failed_writes = self.dropped_writes = 0
        self._index, self.directory, self._changed = index, directory, changed
        self.jobs: list[_Job] = []
        self._running: _Job | None = None
        self._worker: threading.Thread | None = None
        self._most_tries = MOST_TRIES
        self._is_unreachable = self._is_stalled = False
        self._refreshed = 0
        """Uses of entries up to this time are known to the directory."""
        _queues.add(self)

    # Jobs

    def write(self, entries: Iterable[PrefixEntry]) -> None:
        """Have entries written that are in memory, but in no file."""
        waiting = {id(job.entry) for job in self.jobs}
        for entry in entries:
            if entry.cache is not None and entry.path is None and id(entry) not in waiting:
                self.jobs.append(_Job(entry))
        self._ensure_worker()

    def write_instead(self, replaced: PrefixEntry, entry: PrefixEntry) -> None:
        """Have an entry written in place of another one, which it has replaced, if that waits to be written."""
        for job in self.jobs:
            if job.entry is replaced and job is not self._running:
                job.entry, job.tries = entry, 0

    @property
    def lost(self) -> int:
        """Entries that were to be written, and were not."""
        return self.failed_writes + self.dropped_writes

    # Waiting

    def wait(self, deadline: float | None = None) -> bool:
        """Wait until all jobs of now are done. Jobs that others add meanwhile do not prolong it.

        Args:
            deadline: when to stop waiting, as `time.monotonic()` counts.

        Returns:
            Whether they are done.
        """
        now = set(self.jobs)
        return self._wait_until(lambda: now.isdisjoint(self.jobs), deadline)

    def wait_for_memory(self, deadline: float) -> bool:
        """Wait until a job is done, or make an end of waiting: drop the entry that has waited longest.

        If nothing was written since the last wait was in vain, this one does not wait at all.

        Returns:
            Whether there may be more memory now.
        """
        now = set(self.jobs)
        if now and not self._is_stalled:
            # Others may have changed everything meanwhile, so the caller looks again before anything is dropped.
            self._is_stalled = not self._wait_until(lambda: not now.issubset(self.jobs), deadline)
            return True
        writing = self._index.writing
        for job in self.jobs:
            if job.entry.is_leaving and job.entry is not writing:
                self.jobs.remove(job)
                self.dropped_writes += 1
                self._index.remove(job.entry)
                # The thread says nothing if it finds no job any more.
                self._changed.notify_all()
                return True
        if writing is None or not writing.is_leaving:
            return False
        self._index.stay(writing)
        self._index.stuck = writing
        return True

    def _wait_until(self, is_done: Callable[[], bool], deadline: float | None) -> bool:
        self._ensure_worker()
        return self._changed.wait_for(is_done, None if deadline is None else deadline - time.monotonic())

    # The thread

    def _ensure_worker(self) -> None:
        # After os.fork(), the thread of the parent is not alive in the child.
        if self.jobs and (self._worker is None or not self._worker.is_alive()):
            self._worker = threading.Thread(target=self.work_off, name="kvlayers-prefix-writer", daemon=True)
            # At the end of a process no thread can be started; the jobs are then done without one.
            with contextlib.suppress(RuntimeError):
                self._worker.start()

    def work_off(self, deadline: float | None = None) -> None:
        """Do all jobs, but begin none after `deadline`, a time of `time.monotonic()`."""
        while True:
            with self._changed:
                if not self.jobs or (deadline is not None and time.monotonic() > deadline):
                    self._worker = None
                    return
                job = self._running = self.jobs[0]
            delay: float | None = None
            try:
                delay = self._do_write(job)
            except Exception:
                logger.exception("A prefix store could not tidy its directory")
            finally:
                with self._changed:
                    self._running = self._index.writing = self._index.stuck = None
                    # One that is tried again stays, and may be dropped meanwhile.
                    if delay is None and job in self.jobs:
                        self.jobs.remove(job)
                    self._changed.notify_all()
                    if delay is not None:
                        self._changed.wait_for(lambda: self._most_tries == 1, delay)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete files."""
        self.directory.delete_all(paths)
        with self._changed:
            # A refresh has found them if it listed the files before.
            self._index.update((), paths)

    def tidy(self) -> None:
        """Delete files: what killed writers left behind, and what exceeds `directory_max_bytes`."""
        self._do_shrink()
        self.directory.tidy()

    def _do_write(self, job: _Job) -> float | None:
        """Write an entry, and return the seconds after which to try again, `None` if it is done."""
        job.tries += 1
        try:
            superseded, written = self._written(job.entry)
        except Exception as error:
            # Not kept, since its traceback holds the cache.
            failure, is_unreachable = str(error), isinstance(error, CachePathError)
            level = logging.WARNING if isinstance(error, KVLayersError) else logging.ERROR
        else:
            if written is not None:
                self._finish_write(job.entry, superseded, *written)
                self._do_shrink()
            return None
        with self._changed:
            if is_unreachable and not self._is_unreachable and job.tries < self._most_tries:
                return float(FIRST_DELAY * 2 ** (job.tries - 1))
            self._is_unreachable = self._is_unreachable or is_unreachable
            self.failed_writes += 1
            if job.entry in self._index and job.entry.is_leaving:
                self._index.remove(job.entry)
        logger.log(level, "An entry of a prefix store was not written to its directory: %s", failure)
        return None

    def _written(self, entry: PrefixEntry) -> tuple[list[PrefixEntry], tuple[str, int] | None]:
        """Write an entry: those that nobody needs then, its path, and its bytes; `None` if it need not be written."""
        with self._changed:
            if entry.cache is None or entry.path is not None or entry not in self._index:
                return [], None
            self._index.writing = entry
            # A fork, since others fork the cache meanwhile.
            cache = entry.cache.fork()
            neighbours = self._index.neighbours_in_files(entry)
            spare = [old for old in self._index.shorter(entry) if old.is_spare]
            superseded = [old for old in spare if can_restore(entry.cache, old.boundaries)]
            entry.boundaries.update(*(old.boundaries for old in superseded))
            boundaries = sorted(entry.boundaries)
        return superseded, self.directory.write(entry.label, entry.ids, boundaries, cache, neighbours)

    def _finish_write(self, entry: PrefixEntry, superseded: Iterable[PrefixEntry], path: str, nbytes: int) -> None:
        with self._changed:
            self._is_unreachable = self._is_stalled = False
            if entry in self._index:
                self.spilled += 1
                # Its memory can leave, while the directory is made smaller.
                self._index.writing = self._index.stuck = None
                self._index.set_file(entry, path, nbytes)
                for old in superseded:
                    if old in self._index and old.is_spare:
                        # Its last node is one of the new entry's, or is deleted when nobody has used it for an hour.
                        self._index.remove(old)
                return
            used = {entry.path for entry in self._index.entries}
        # The store was cleared meanwhile.
        if path not in used:
            self.directory.delete_all([path])

    def _do_shrink(self) -> None:
        most = self.directory_max_bytes
        if most is None or max(self.directory.nbytes, self.directory.unlisted_bytes * LISTED_PARTS) <= most:
            return
        with self._changed:
            in_files = [(entry, entry.path) for entry in self._index.entries if entry.path is not None]
            kept = {path for entry, path in in_files if entry.pins and entry.cache is None}
            new = sorted(
                (time, path, tokens)
                for entry, path in in_files
                for tokens, time in entry.uses.items()
                if time > self._refreshed
            )
            self._refreshed = self._index.uses
        changes = self.directory.shrink(most, kept, [(path, tokens) for _, path, tokens in new])
        with self._changed:
            self._index.update(changes.added, changes.gone)

    # The end of the process, and children of it

    def flush_at_exit(self, deadline: float) -> None:
        """Write every entry that is in memory alone, without waiting for a directory that cannot be reached."""
        with self._changed:
            self._most_tries = 1
            # In the order of their uses, which files have by the times when they were written.
            self.write(sorted(self._index.entries, key=lambda entry: entry.last_use))
            self._changed.notify_all()
            if self._worker is not None and self._worker.is_alive():
                self.wait(deadline)
                return
        self.work_off(deadline)


_held_for_fork = contextlib.ExitStack()
"""The locks of all queues, while a thread forks.

The child goes on as well, in a thread of its own: what the parent was writing is written by both.
"""


def _before_fork() -> None:
    # In the same order in every thread.
    for queue in sorted(_queues, key=id):
        _held_for_fork.enter_context(queue._changed)


def _flush_at_exit() -> None:
    deadline = time.monotonic() + SECONDS_AT_EXIT
    for queue in list(_queues):
        queue.flush_at_exit(deadline)


atexit.register(_flush_at_exit)
if sys.platform != "win32":
    os.register_at_fork(before=_before_fork, after_in_parent=_held_for_fork.close, after_in_child=_held_for_fork.close)
