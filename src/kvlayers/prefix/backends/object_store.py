"""The contract of an object store: files on other machines, as bytes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvlayers.prefix.backends.contract import Content, StoredFile, UnreachableError


class ByteRange(NamedTuple):
    """A range of bytes of a file: from `start` up to, but not including, `end`."""

    file: StoredFile
    start: int
    end: int


class ObjectStore(Protocol):
    """Files elsewhere, as bytes. Methods raise `UnreachableError`, and no other error, if it cannot be reached.

    All methods may be called by several threads at once.
    """

    def prepare(self) -> None:
        """As `StorageBackend.prepare`."""

    def files(self) -> list[StoredFile]:
        """All files; as `StorageBackend.files`."""

    def find(self, names: Sequence[str]) -> list[StoredFile | None]:
        """As `StorageBackend.find`."""

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes | UnreachableError]:
        """The bytes of each range, fewer if the file is shorter, or the error that reading them raised."""

    def read(self, files: Sequence[StoredFile]) -> list[bytes | UnreachableError | None]:
        """The first bytes of each file, one more than it should have, or the error; `None` if it does not exist.

        Args:
            files: names and sizes in bytes.
        """

    def write(self, name: str, content: Content) -> None:
        """Write a file, and replace the file of this name."""

    def missing(self, files: Sequence[StoredFile]) -> list[StoredFile]:
        """As `StorageBackend.missing`."""

    def touch(self, names: Sequence[str]) -> None:
        """As `StorageBackend.touch`."""

    def last_uses(self) -> Mapping[str, int]:
        """As `StorageBackend.last_uses`."""

    def delete(self, names: Sequence[str], used_before: int | None = None) -> None:
        """As `StorageBackend.delete`."""
