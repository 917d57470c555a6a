"""Files on other machines: a few bytes are read to inspect a file, and all bytes to load it."""

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotArrived
from functools import partial
from typing import NamedTuple

from kvlayers.errors import CacheFileError, KVLayersError
from kvlayers.persistence.safetensors_header import Content
from kvlayers.prefix.backends.contract import (
    Address,
    Found,
    GoneError,
    Look,
    StorageBackend,
    StoredFile,
    UnreachableError,
    ahead,
)

HEAD_BYTES = 2**16
"""Bytes that are read of each file first, which usually have the header and the ids."""

FILES_PER_REQUEST = 64
"""Files whose heads are requested together, which take 4 MiB."""

ATTEMPTS = 3
"""Attempts to read a file that other processes replace meanwhile."""

BATCHES_AT_ONCE = 2
"""Batches of whole files that are in memory, or on their way to it, at the same time."""

BATCH_BYTES = 32 * 2**20
"""Bytes of whole files that are requested together, unless a single one has more."""


class ByteRange(NamedTuple):
    """A range of bytes of a file: from `start` up to, but not including, `end`."""

    file: StoredFile
    start: int
    end: int


class RemoteBackend(StorageBackend):
    """Files on other machines. A subclass says how the bytes of files get here, and the rest of `StorageBackend`.

    All methods raise `UnreachableError`, and no other error, if the other machine cannot be reached.

    Args:
        address: the URL of the files.
    """

    def __init__(self, address: Address) -> None:
        self._address = address

    @abstractmethod
    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes | UnreachableError | None]:
        """The bytes of each range, fewer if the file is shorter, or the error that reading them raised.

        `None` stands for a file that does not exist.
        """

    def path_of(self, name: str) -> str:
        """The URL of a file, without credentials."""
        return f"{self._address.shown}/{name}"

    def inspect(self, files: Sequence[StoredFile], look: Look[Found]) -> Iterator[Found | KVLayersError]:
        """As `StorageBackend.inspect`."""
        for start in range(0, len(files), FILES_PER_REQUEST):
            some = files[start : start + FILES_PER_REQUEST]
            # Servers refuse ranges of nothing, and of what an empty file does not have.
            heads = [ByteRange(file, 0, min(HEAD_BYTES, max(file.nbytes, 1))) for file in some]
            for file, head in zip(some, self.read_ranges(heads), strict=True):
                try:
                    yield self._inspected(file, head if head and file.nbytes else b"", look)
                except KVLayersError as error:
                    yield error

    def _inspected(
        self, file: StoredFile, head: bytes | UnreachableError, look: Look[Found], attempts: int = ATTEMPTS
    ) -> Found:
        try:
            return look(self.path_of(file.name), file, partial(self._read, file, head))
        except (CacheFileError, UnreachableError):
            (now,) = self.find([file.name])
            if now is None:
                raise self._gone(file.name) from None
            if now == file or attempts == 1:
                raise
        # Another process has replaced it meanwhile.
        return self._inspected(now, b"", look, attempts - 1)

    def _read(self, file: StoredFile, head: bytes | UnreachableError, start: int, end: int) -> bytes:
        """A range of a file, whose first bytes were read already."""
        end, content = min(end, file.nbytes), head
        if isinstance(head, bytes) and start < end and end > len(head):
            content = self.read_ranges([ByteRange(file, start, end)])[0] or b""
            start, end = 0, end - start
        if isinstance(content, UnreachableError):
            raise content
        return content[start:end]

    def read(self, files: Sequence[StoredFile], wait_seconds: float | None = None) -> Iterator[Content | KVLayersError]:
        """As `StorageBackend.read`. A thread requests the next files while the caller looks at the ones before."""
        deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
        thread = ThreadPoolExecutor(1, thread_name_prefix="kvlayers-read")
        try:
            for batch, coming in ahead(thread, self._read_batch, _batches(files), BATCHES_AT_ONCE):
                try:
                    yield from coming.result(None if deadline is None else max(deadline - time.monotonic(), 0))
                except NotArrived:
                    yield from [
                        UnreachableError(f"{self.path_of(file.name)} has not arrived in time.") for file in batch
                    ]
                except UnreachableError as error:
                    yield from [error] * len(batch)
        finally:
            # The caller does not wait for what it does not want any more.
            thread.shutdown(wait=False, cancel_futures=True)

    def _read_batch(self, batch: list[StoredFile]) -> list[Content | KVLayersError]:
        # One byte more than a file should have.
        ranges = [ByteRange(file, 0, file.nbytes + 1) for file in batch]
        found: list[Content | KVLayersError] = []
        for file, each, content in zip(batch, ranges, self.read_ranges(ranges), strict=True):
            if isinstance(content, bytes) and len(content) != file.nbytes:
                # Some storages do not replace a file at once, and somebody may have written it anew meanwhile.
                (content,) = self.read_ranges([each])
            if content is None:
                found.append(self._gone(file.name))
            elif isinstance(content, bytes) and len(content) != file.nbytes:
                path = self.path_of(file.name)
                found.append(CacheFileError(f"{path} is damaged: it must have {file.nbytes} bytes, and has others."))
            else:
                found.append(content)
        return found

    def _gone(self, name: str) -> GoneError:
        return GoneError(f"{self.path_of(name)} does not exist: it was deleted.")


def _batches(files: Sequence[StoredFile]) -> Iterator[list[StoredFile]]:
    """Files in order, in groups that are requested together."""
    batch: list[StoredFile] = []
    for file in files:
        if batch and sum(each.nbytes for each in batch) + file.nbytes > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch
