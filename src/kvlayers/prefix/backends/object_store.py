"""The contract of an object store: files on other machines, as bytes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvlayers.prefix.backends.contract import StoredFile, UnreachableError


class ByteRange(NamedTuple):
    """A range of bytes of a file: from `start` up to, but not including, `end`."""

    file: StoredFile
    start: int
    end: int


class ObjectStore(Protocol):
    """Files elsewhere, as bytes. Methods raise `UnreachableError`, and no other error, if it cannot be reached."""

    def files(self) -> list[StoredFile]:
        """All files; as `StorageBackend.files`."""

    def find(self, name: str) -> StoredFile | None:
        """One file as it is now, `None` if it does not exist."""

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes | UnreachableError]:
        """The bytes of each range, fewer if the file is shorter, or the error that reading them raised."""

    def upload(self, path: str, name: str) -> None:
        """Upload a local file, and replace the file of this name."""

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""

    def last_uses(self) -> Mapping[str, int]:
        """As `StorageBackend.last_uses`."""

    def touch(self, name: str) -> None:
        """Record that a file is used now."""
