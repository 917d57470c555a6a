"""Files in a local directory."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from kvlayers.errors import CacheFileError, CachePathError, KVLayersError
from kvlayers.persistence.atomic_file import clear_temporaries, temporary_name
from kvlayers.persistence.inspect import CacheFile, inspect_cache
from kvlayers.prefix.backends.contract import SUFFIX, GoneError, StoredFile, UnreachableError

OWNER_ONLY = 0o700
"""Permissions of a new directory, since the files reveal what somebody has asked a model."""

ABANDONED_SECONDS = 3600
"""An unfinished file of this age was left behind by a process that was killed."""


class LocalBackend:
    """A local directory. Files are memory-mapped in place, and written under a temporary name first.

    Args:
        path: the directory, which is created if it does not exist.

    Raises:
        CachePathError: it cannot be created, read or written to.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            os.makedirs(path, mode=OWNER_ONLY, exist_ok=True)
            # Tried out, since a disk may be mounted read-only, whatever the permissions say.
            probe = os.path.join(path, temporary_name())
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            os.unlink(probe)
            clear_temporaries(path, ABANDONED_SECONDS)
        except OSError as error:
            raise CachePathError(
                f"`directory` must be readable and writable, got {path} ({error.strerror}): choose another, or leave "
                "directory out."
            ) from error

    def path_of(self, name: str) -> str:
        """The path of a file."""
        return os.path.join(self.path, name)

    def files(self) -> list[StoredFile]:
        """As `StorageBackend.files`."""
        try:
            names = os.listdir(self.path)
        except OSError as error:
            raise _unreachable(self.path, error) from error
        # Another process may delete a file at this moment.
        found = (self.find(name) for name in names if name.endswith(SUFFIX))
        return [file for file in found if file is not None]

    def find(self, name: str) -> StoredFile | None:
        """As `StorageBackend.find`. A damaged file is never used, so its time distinguishes it from its replacement."""
        try:
            facts = os.lstat(self.path_of(name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreachable(self.path_of(name), error) from error
        return StoredFile(name, facts.st_size, f"{facts.st_ino} {facts.st_mtime_ns}", facts.st_mtime_ns)

    def inspect(self, files: Sequence[StoredFile]) -> Iterator[CacheFile | KVLayersError]:
        """As `StorageBackend.inspect`."""
        for file in files:
            path = self.path_of(file.name)
            try:
                yield inspect_cache(path)
            except CacheFileError as error:
                yield error
            except CachePathError as error:
                yield error if os.path.lexists(path) else GoneError(str(error))

    @contextlib.contextmanager
    def reading(self, name: str, max_bytes: int) -> Iterator[str]:
        """The path of the file itself, whatever its size, since a mapped file takes no memory."""
        path = self.path_of(name)
        try:
            yield path
        except CachePathError as error:
            reason = error.__cause__
            if isinstance(reason, OSError) and not isinstance(reason, FileNotFoundError):
                raise _unreachable(path, reason) from reason
            raise
        # The modification time of a file is its last use.
        with contextlib.suppress(OSError):
            os.utime(path)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """The path of the file itself, which `save_cache` replaces once it has written a temporary one."""
        yield self.path_of(name)

    def last_uses(self) -> Mapping[str, int]:
        """As `StorageBackend.last_uses`."""
        return {file.name: file.used for file in self.files()}

    def delete(self, name: str) -> None:
        """As `StorageBackend.delete`."""
        with contextlib.suppress(OSError):
            os.unlink(self.path_of(name))


def _unreachable(path: str, error: OSError) -> UnreachableError:
    return UnreachableError(f"cannot read {path}: {error.strerror}.")
