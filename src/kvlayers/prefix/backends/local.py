"""Files in a local directory."""

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence

from kvlayers.errors import CacheFileError, CachePathError, KVLayersError
from kvlayers.persistence.atomic_file import clear_temporaries, replacing, temporary_name
from kvlayers.persistence.safetensors_header import Content, check_regular, mapped, ranges_of
from kvlayers.prefix.backends.contract import (
    ABANDONED_SECONDS,
    Found,
    GoneError,
    Look,
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

    Args:
        path: the directory.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def prepare(self) -> None:
        """As `StorageBackend.prepare`."""
        path = self.path
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

    def inspect(self, files: Sequence[StoredFile], look: Look[Found]) -> Iterator[Found | KVLayersError]:
        """As `StorageBackend.inspect`."""
        for file in files:
            path, content = self.path_of(file.name), self._mapped(file.name)
            try:
                yield content if isinstance(content, KVLayersError) else look(path, file, ranges_of(content))
            except KVLayersError as error:
                yield error

    def read(self, files: Sequence[StoredFile], wait_seconds: float | None = None) -> Iterator[Content | KVLayersError]:
        """As `StorageBackend.read`. All files are mapped first, so that the kernel reads ahead."""
        contents = [self._mapped(file.name) for file in files]
        for content in contents:
            if isinstance(content, mmap.mmap) and os.name == "posix":
                content.madvise(mmap.MADV_WILLNEED)
        for file, content in zip(files, contents, strict=True):
            if isinstance(content, KVLayersError):
                yield content
            elif len(content) != file.nbytes:
                path = self.path_of(file.name)
                yield CacheFileError(f"{path} is damaged: it must have {file.nbytes} bytes, got {len(content)}.")
            else:
                yield memoryview(content)

    def _mapped(self, name: str) -> mmap.mmap | bytes | KVLayersError:
        """The content of a file, or why it cannot be read."""
        path = self.path_of(name)
        try:
            check_regular(path, missing_is_fine=True)
            with open(path, "rb") as opened:
                return mapped(opened)
        except KVLayersError as error:
            return error
        except FileNotFoundError:
            return GoneError(f"{path} does not exist: it was deleted.")
        except OSError as error:
            return _unreachable(path, error)

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
