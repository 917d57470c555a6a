"""What was wrong with the files of a prefix store: counted, and logged once for each file."""

import contextlib
import logging
import os
import threading

from kvlayers.prefix.backends import StorageBackend, StoredFile, UnreachableError

logger = logging.getLogger(__name__)


class FileReports:
    """Counts files that cannot be used. Threads may share it.

    Args:
        backend: where the files are.

    Attributes:
        damaged_files: how many damaged or missing files were seen.
        failed_reads: how often a file could not be reached, or not in time.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.damaged_files = self.failed_reads = 0
        self._backend = backend
        self._lock = threading.Lock()
        self._reported: dict[str, StoredFile | None] = {}

    def has(self, path: str, file: StoredFile) -> bool:
        """Whether exactly this file was reported as damaged."""
        return self._reported.get(path) == file

    def damaged(self, path: str, error: Exception) -> None:
        """Count a file as damaged, and log it once."""
        file = None
        with contextlib.suppress(UnreachableError):
            (file,) = self._backend.find([name_in(path)])
        self.damaged_file(path, file, error)

    def damaged_file(self, path: str, file: StoredFile | None, error: Exception) -> None:
        """As `damaged`, for a file that was just listed; `None` if it does not exist."""
        with self._lock:
            if path in self._reported and self._reported[path] == file:
                return
            self._reported[path] = file
            self.damaged_files += 1
        logger.warning("A file of a prefix store is skipped: %s", error)

    def unreachable(self, error: Exception) -> None:
        """Count a file that could not be reached, and log it."""
        with self._lock:
            self.failed_reads += 1
        logger.warning("A file of a prefix store could not be read now: %s", error)

    def forget(self, path: str) -> None:
        """Report a file again if it is damaged, since it was written anew."""
        with self._lock:
            self._reported.pop(path, None)


def name_in(path: str) -> str:
    """The name of the file at a path or URL."""
    return os.path.basename(path)
