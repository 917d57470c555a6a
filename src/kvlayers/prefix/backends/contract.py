"""The contract of a storage backend: where the files of a prefix store are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from kvlayers.errors import CachePathError, KVLayersError
from kvlayers.persistence.inspect import CacheFile

SUFFIX = ".safetensors"
"""Suffix of the files of entries. Other files are left alone."""


class UnreachableError(CachePathError):
    """A backend does not answer now, so that it is unknown whether a file exists."""


class GoneError(CachePathError):
    """A file was deleted since it was listed."""


@dataclass(frozen=True)
class StoredFile:
    """A file in the listing of a backend.

    Attributes:
        name: its name.
        nbytes: its size in bytes.
        version: differs between different contents under the same name, as far as the backend can tell.
        used: time of the last read or write, as far as the backend knows, in nanoseconds since 1970.
    """

    name: str
    nbytes: int
    version: str = field(default="", repr=False)
    used: int = field(default=0, compare=False)


class StorageBackend(Protocol):
    """Files by name. A file exists completely or not at all, as far as the underlying storage can ensure that.

    Methods raise `UnreachableError` if it is unknown whether a file exists.
    """

    def path_of(self, name: str) -> str:
        """The path of a file in messages to users: it ends with the name, and has no credentials."""

    def files(self) -> list[StoredFile]:
        """All files whose names end with `SUFFIX`, in no particular order."""

    def find(self, name: str) -> StoredFile | None:
        """One file as it is now, `None` if it does not exist."""

    def inspect(self, files: Sequence[StoredFile]) -> Iterator[CacheFile | KVLayersError]:
        """For each file, its header, or the error that reading it raised. One file must not hide the others."""

    def reading(self, name: str, max_bytes: int) -> AbstractContextManager[str]:
        """The path of a local file with the content of `name`, for the length of the context.

        Args:
            name: name of the file, which counts as used now.
            max_bytes: size that the expected file cannot exceed.

        Raises:
            CacheFileError: a part of the file is missing, or it is too large. If the body of the context raises such
                an error, its message gets the path that users know.
            GoneError: the file does not exist.
        """

    def writing(self, name: str) -> AbstractContextManager[str]:
        """The path of a local file to write to. It replaces `name` when the context ends without error.

        Raises:
            CachePathError: the file cannot be written.
        """

    def last_uses(self) -> Mapping[str, int]:
        """Time of the last read or write of each file, by name, in nanoseconds since 1970."""

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
