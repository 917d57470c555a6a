"""Files in a local directory."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from kvlayers.errors import CacheFileError, CachePathError, KVLayersError
from kvlayers.persistence.atomic_file import clear_temporaries, temporary_name
from kvlayers.persistence.inspect import CacheFile, inspect_cache
from kvlayers.prefix.backends.contract import SUFFIX, GoneError, StoredFile, UnreachableError

OWNER_ONLY = 0o700
"""Permissions of a directory that is made here: what is in it says what somebody has asked a model."""

ABANDONED_SECONDS = 3600
"""Nobody writes a file for as long as that: what is unfinished by then was left behind by a process that was killed."""


class LocalDirectory:
    """A directory: its files are mapped where they lie, and written beside their places first.

    Args:
        path: the directory, which is made where there is none.

    Raises:
        CachePathError: it cannot be made, read or written to.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            os.makedirs(path, mode=OWNER_ONLY, exist_ok=True)
            # Tried, since permissions alone do not say: a disk may be mounted read-only.
            probe = os.path.join(path, temporary_name())
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            os.unlink(probe)
            clear_temporaries(path, ABANDONED_SECONDS)
        except OSError as error:
            raise CachePathError(
                f"expected a directory that can be read and written to, but saw {path} ({error.strerror}): choose "
                "another, or leave directory out."
            ) from error

    def path_of(self, name: str) -> str:
        """The path of a file."""
        return os.path.join(self.path, name)

    def files(self) -> list[StoredFile]:
        """As `Place.files`."""
        try:
            names = os.listdir(self.path)
        except OSError as error:
            raise _unreachable(self.path, error) from error
        # Another process may delete one at this moment.
        found = (self.find(name) for name in names if name.endswith(SUFFIX))
        return [file for file in found if file is not None]

    def find(self, name: str) -> StoredFile | None:
        """As `Place.find`. What is damaged is not used, so that its time tells it from what takes its place."""
        try:
            facts = os.lstat(self.path_of(name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreachable(self.path_of(name), error) from error
        return StoredFile(name, facts.st_size, f"{facts.st_ino} {facts.st_mtime_ns}", facts.st_mtime_ns)

    def inspect(self, files: Sequence[StoredFile]) -> Iterator[CacheFile | KVLayersError]:
        """As `Place.inspect`."""
        for file in files:
            path = self.path_of(file.name)
            try:
                yield inspect_cache(path)
            except CacheFileError as error:
                yield error
            except CachePathError as error:
                yield error if os.path.lexists(path) else GoneError(str(error))

    @contextlib.contextmanager
    def reading(self, name: str, most: int) -> Iterator[str]:
        """The path of the file itself, whatever its size: what is mapped takes no room."""
        path = self.path_of(name)
        try:
            yield path
        except CachePathError as error:
            reason = error.__cause__
            if isinstance(reason, OSError) and not isinstance(reason, FileNotFoundError):
                raise _unreachable(path, reason) from reason
            raise
        # Its time of change is its last use.
        with contextlib.suppress(OSError):
            os.utime(path)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """The path of the file itself, which `save_cache` replaces when it has written the other one."""
        yield self.path_of(name)

    def uses(self) -> Mapping[str, int]:
        """As `Place.uses`."""
        return {file.name: file.used for file in self.files()}

    def delete(self, name: str) -> None:
        """As `Place.delete`."""
        with contextlib.suppress(OSError):
            os.unlink(self.path_of(name))


def _unreachable(path: str, error: OSError) -> UnreachableError:
    return UnreachableError(f"expected a file or directory that can be read, but saw {path}: {error.strerror}.")
