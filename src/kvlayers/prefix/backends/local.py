"""Files in a local directory."""

import contextlib
import mmap
import os
from collections.abc import Mapping, Sequence

from kvlayers.errors import CachePathError, KVLayersError
from kvlayers.persistence.atomic_file import clear_temporaries, replacing, temporary_name
from kvlayers.persistence.tensor_file import Content, check_regular, mapped
from kvlayers.prefix.backends.contract import (
    ABANDONED_SECONDS,
    ByteRange,
    StorageBackend,
    StoredFile,
    UnreachableError,
    clock,
    is_of_a_store,
)

OWNER_ONLY = 0o700
"""Permissions of a new directory, since the files reveal what somebody has asked a model."""


class LocalBackend(StorageBackend):
    """A local directory. Files are memory-mapped in place, and written under a temporary name first.

    It has no state, so that any number of threads may use it. The modification time of a file is its last use.
    """

    def prepare(self) -> None:
        """As `StorageBackend.prepare`."""
        try:
            os.makedirs(self.place, mode=OWNER_ONLY, exist_ok=True)
            # Tried out, since a disk may be mounted read-only, whatever the permissions say.
            probe = self.path_of(temporary_name())
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            os.unlink(probe)
            clear_temporaries(self.place, ABANDONED_SECONDS)
        except OSError as error:
            raise CachePathError(
                f"`directory` must be readable and writable, got {self.place} ({error.strerror}): choose another, or "
                "leave directory out."
            ) from error

    def files(self) -> list[StoredFile]:
        """As `StorageBackend.files`."""
        try:
            names = os.listdir(self.place)
        except OSError as error:
            raise _unreachable(self.place, error) from error
        found = self.find([name for name in names if is_of_a_store(name)])
        # Another process may delete a file at this moment.
        return [file for file in found if file is not None]

    def find(self, names: Sequence[str]) -> list[StoredFile | None]:
        """As `StorageBackend.find`. A damaged file is never used, so its time distinguishes it from its replacement."""
        return [self._found(name) for name in names]

    def _found(self, name: str) -> StoredFile | None:
        try:
            facts = os.lstat(self.path_of(name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreachable(self.path_of(name), error) from error
        return StoredFile(name, facts.st_size, f"{facts.st_ino} {facts.st_mtime_ns}", facts.st_mtime_ns)

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[Content | KVLayersError | None]:
        """As `StorageBackend.read_ranges`. All files are mapped first, so that the kernel reads ahead."""
        return [self._mapped(*each) for each in ranges]

    def _mapped(self, name: str, start: int, end: int) -> Content | KVLayersError | None:
        path = self.path_of(name)
        try:
            check_regular(path, missing_is_fine=True)
            content = mapped(path)
        except KVLayersError as error:
            return error
        except FileNotFoundError:
            return None
        except OSError as error:
            return _unreachable(path, error)
        if isinstance(content, mmap.mmap) and os.name == "posix":
            content.madvise(mmap.MADV_WILLNEED, 0, min(end, len(content)))
        return memoryview(content)[start:end]

    def write(self, name: str, content: Content) -> None:
        """As `StorageBackend.write`."""
        with replacing(self.path_of(name)) as temporary:
            with open(temporary, "wb") as file:
                file.write(content)
            self.touch([os.path.basename(temporary)])

    def touch(self, names: Sequence[str]) -> None:
        """As `StorageBackend.touch`."""
        for name, used in clock.uses(names).items():
            with contextlib.suppress(OSError):
                os.utime(self.path_of(name), ns=(used, used))

    def last_uses(self) -> Mapping[str, int]:
        """As `StorageBackend.last_uses`."""
        return {file.name: file.used for file in self.files()}

    def delete(self, names: Sequence[str], used_before: int | None = None) -> None:
        """As `StorageBackend.delete`."""
        failure: UnreachableError | None = None
        for name in names:
            if used_before is not None:
                file = self._found(name)
                if file is None or file.used >= used_before:
                    continue
            try:
                os.unlink(self.path_of(name))
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = UnreachableError(f"cannot delete {self.path_of(name)}: {error.strerror}.")
        if failure is not None:
            raise failure


def _unreachable(path: str, error: OSError) -> UnreachableError:
    return UnreachableError(f"cannot read {path}: {error.strerror}.")
