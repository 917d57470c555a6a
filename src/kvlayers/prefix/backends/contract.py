"""What a prefix store asks of the place where its files are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from kvlayers.errors import CachePathError, KVLayersError
from kvlayers.persistence.inspect import CacheFile

SUFFIX = ".safetensors"
"""What the names of entries' files end with; others are left alone."""


class UnreachableError(CachePathError):
    """A place does not answer now, which says nothing of whether a file is there."""


class GoneError(CachePathError):
    """A file was deleted since it was listed."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a place, as it is listed.

    Attributes:
        name: what it is called there.
        nbytes: its size.
        version: differs from that of another content under the same name, as far as the place can tell them apart.
        used: when it was last read or written, as far as the place knows, in nanoseconds since 1970.
    """

    name: str
    nbytes: int
    version: str = field(default="", repr=False)
    used: int = field(default=0, compare=False)


class StorageBackend(Protocol):
    """Files by their names. Of each there is the whole or nothing, as far as what is underneath can do that.

    Methods raise `UnreachableError` where nobody can say whether a file is there.
    """

    def path_of(self, name: str) -> str:
        """What users are told that a file is called: it ends with the name, and has no credentials."""

    def files(self) -> list[StoredFile]:
        """All files whose names end with `SUFFIX`, in no order."""

    def find(self, name: str) -> StoredFile | None:
        """One of them as it is now, `None` where there is none."""

    def inspect(self, files: Sequence[StoredFile]) -> Iterator[CacheFile | KVLayersError]:
        """For each file what it says of itself, or what is wrong with it: one must not keep the others from view."""

    def reading(self, name: str, most: int) -> AbstractContextManager[str]:
        """The path of a local file with what is in the file, for as long as the context lasts.

        Args:
            name: the file, which counts as used now.
            most: bytes beyond which it cannot be what is expected.

        Raises:
            CacheFileError: a part of it is missing, or it is too large. Such errors of the context's body are given the
                name by which users know the file.
            GoneError: there is none.
        """

    def writing(self, name: str) -> AbstractContextManager[str]:
        """The path of a local file to be written, which takes the place of `name` when the context ends without error.

        Raises:
            CachePathError: it cannot be written.
        """

    def uses(self) -> Mapping[str, int]:
        """By name, when files were last read or written, in nanoseconds since 1970."""

    def delete(self, name: str) -> None:
        """Delete a file, where there is one."""
