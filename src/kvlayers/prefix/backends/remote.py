"""Files that are not on this machine: a few of their bytes are read to know them, all to load them."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from kvlayers.errors import CacheFileError, CachePathError, KVLayersError
from kvlayers.persistence.inspect import CacheFile, inspect_ranges
from kvlayers.prefix.backends.address import Address
from kvlayers.prefix.backends.contract import GoneError, StoredFile, UnreachableError
from kvlayers.prefix.backends.objects import Objects, Range

HEAD_BYTES = 128 * 2**10
TAIL_BYTES = 64 * 2**10
"""Read of each file at once: mostly, its header and the ids are in the one, and the digests in the other."""

FILES_AT_ONCE = 64
"""Whose ends are asked for together: they take 12 MiB."""

CHUNK_BYTES = 8 * 2**20
CHUNKS_AT_ONCE = 4
"""Of a file that is loaded, in memory at once."""

ATTEMPTS = 3
"""At a file that is replaced by another writer while it is read."""


class Remote:
    """Files elsewhere. They come through files of this machine's temporary directory, which are deleted in every case.

    Args:
        objects: what reaches them.
        address: where they are.
    """

    def __init__(self, objects: Objects, address: Address) -> None:
        self._objects = objects
        self._address = address

    def path_of(self, name: str) -> str:
        """The URL of a file, without credentials."""
        return self._address.path_of(name)

    def files(self) -> list[StoredFile]:
        """As `Place.files`."""
        # Names come from elsewhere: those that a terminal might obey are none of ours.
        return [file for file in self._objects.files() if file.name.isprintable()]

    def find(self, name: str) -> StoredFile | None:
        """As `Place.find`."""
        return self._objects.find(name)

    def uses(self) -> Mapping[str, int]:
        """As `Place.uses`."""
        return self._objects.uses()

    def delete(self, name: str) -> None:
        """As `Place.delete`."""
        self._objects.delete(name)

    def inspect(self, files: Sequence[StoredFile]) -> Iterator[CacheFile | KVLayersError]:
        """As `Place.inspect`."""
        for start in range(0, len(files), FILES_AT_ONCE):
            batch = files[start : start + FILES_AT_ONCE]
            ends = [each for file in batch for each in _ends(file)]
            found = dict(zip(ends, self._objects.ranges(ends), strict=True))
            for file in batch:
                try:
                    yield self._inspected(file, {each: found[each] for each in _ends(file)})
                except (CacheFileError, CachePathError) as error:
                    yield error

    def _inspected(self, file: StoredFile, known: Mapping[Range, bytes | UnreachableError]) -> CacheFile:
        for _ in range(ATTEMPTS):
            try:
                seen = inspect_ranges(self.path_of(file.name), file.nbytes, partial(self._read, file, known))
                # They are checked now, when it can still be told whether the file was replaced meanwhile.
                seen.token_ids()
                return seen
            except (CacheFileError, UnreachableError):
                now = self._existing(file.name)
                if now == file:
                    raise
                file, known = now, {}
        raise self._keeps_changing(file.name)

    def _read(self, file: StoredFile, known: Mapping[Range, bytes | UnreachableError], start: int, end: int) -> bytes:
        end = min(end, file.nbytes)
        if start >= end:
            return b""
        for each, content in known.items():
            if each.start <= start and end <= each.end:
                if isinstance(content, UnreachableError):
                    raise content
                return content[start - each.start : end - each.start]
        (content,) = self._objects.ranges([Range(file, start, end)])
        if isinstance(content, UnreachableError):
            raise content
        return content

    @contextlib.contextmanager
    def reading(self, name: str, most: int) -> Iterator[str]:
        """As `Place.reading`."""
        with self._temporary(name) as path:
            self._download(name, path, most)
            yield path
        with contextlib.suppress(UnreachableError):
            self._objects.touch(name)

    def _download(self, name: str, path: str, most: int) -> None:
        for _ in range(ATTEMPTS):
            file = self._existing(name)
            if file.nbytes > most:
                raise CacheFileError(
                    f"expected a file of at most {most} bytes, but {self.path_of(name)} has {file.nbytes}: it was "
                    "replaced by another one."
                )
            failure = self._copy(file, path)
            # What was replaced while it was read may be parts of two, or have ended too soon.
            if self._existing(name) == file:
                if failure is not None:
                    raise failure
                return
        raise self._keeps_changing(name)

    def _copy(self, file: StoredFile, path: str) -> CacheFileError | UnreachableError | None:
        """Write a file to `path`, and say why that was not all of it."""
        starts = range(0, file.nbytes, CHUNK_BYTES)
        chunks = [Range(file, start, min(start + CHUNK_BYTES, file.nbytes)) for start in starts]
        with open(path, "wb") as copy:
            for number in range(0, len(chunks), CHUNKS_AT_ONCE):
                wanted = chunks[number : number + CHUNKS_AT_ONCE]
                for chunk, content in zip(wanted, self._objects.ranges(wanted), strict=True):
                    if isinstance(content, UnreachableError):
                        return content
                    if len(content) != chunk.end - chunk.start:
                        return CacheFileError(
                            f"expected {file.nbytes} bytes, but a part of {self.path_of(file.name)} is missing: it is "
                            "damaged."
                        )
                    copy.write(content)
        return None

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """As `Place.writing`."""
        with self._temporary(name) as path:
            yield path
            self._objects.upload(path, name)

    def _existing(self, name: str) -> StoredFile:
        file = self._objects.find(name)
        if file is None:
            raise GoneError(f"expected a file at {self.path_of(name)}, but there is none: it was deleted.")
        return file

    def _keeps_changing(self, name: str) -> UnreachableError:
        return UnreachableError(
            f"expected a file that stays what it is while it is read, but {self.path_of(name)} was replaced "
            f"{ATTEMPTS} times: look again later."
        )

    @contextlib.contextmanager
    def _temporary(self, name: str) -> Iterator[str]:
        """The path of a temporary file, which errors do not name: it is not there any more when they are read."""
        try:
            with tempfile.TemporaryDirectory(prefix="kvlayers-") as directory:
                path = os.path.join(directory, "file")
                try:
                    yield path
                except KVLayersError as error:
                    text = str(error).replace(path, self.path_of(name)).replace(directory, tempfile.gettempdir())
                    raise type(error)(text) from None
        except OSError as error:
            if isinstance(error, CachePathError):
                raise
            raise UnreachableError(
                f"expected room for a copy of {self.path_of(name)} in {tempfile.gettempdir()}, but saw "
                f"{error.strerror}: make some, or set TMPDIR."
            ) from error


def _ends(file: StoredFile) -> list[Range]:
    """What is read of a file first. Nothing is asked of an empty one: servers refuse that."""
    if file.nbytes <= HEAD_BYTES + TAIL_BYTES:
        return [Range(file, 0, file.nbytes)] if file.nbytes else []
    return [Range(file, 0, HEAD_BYTES), Range(file, file.nbytes - TAIL_BYTES, file.nbytes)]
