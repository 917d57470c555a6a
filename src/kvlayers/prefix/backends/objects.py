"""What is asked of files that are not on this machine."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvlayers.prefix.backends.contract import StoredFile, UnreachableError


class Range(NamedTuple):
    """Some of the bytes of a file: from `start` on, up to `end`."""

    file: StoredFile
    start: int
    end: int


class Objects(Protocol):
    """Files elsewhere, as bytes. Methods raise `UnreachableError`, and nothing else, where they cannot be reached."""

    def files(self) -> list[StoredFile]:
        """All files, as `Place.files`."""

    def find(self, name: str) -> StoredFile | None:
        """One file as it is now, `None` where there is none."""

    def ranges(self, wanted: Sequence[Range]) -> list[bytes | UnreachableError]:
        """The bytes of each range, fewer where a file has no more; an error for those that could not be had."""

    def upload(self, path: str, name: str) -> None:
        """Put a local file there, in the place of the one that has its name."""

    def delete(self, name: str) -> None:
        """Delete a file, where there is one."""

    def uses(self) -> Mapping[str, int]:
        """As `Place.uses`."""

    def touch(self, name: str) -> None:
        """Note that a file was used now."""
