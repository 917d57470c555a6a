"""Files on other machines: a few bytes are read to inspect a file, and all bytes to load it."""

import contextlib
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
)

HEAD_BYTES = 64 * 2**10
TAIL_BYTES = 16 * 2**10
"""Bytes that are read of each file first. The head usually has the header and the ids, the tail the digests."""

FILES_PER_REQUEST = 64
"""Files whose heads and tails are requested together, which take 5 MiB."""

BATCH_BYTES = 32 * 2**20
"""Bytes of whole files that are requested together, unless a single one has more."""

BATCHES_AT_ONCE = 2
"""Batches of whole files that are in memory, or on their way to it, at the same time."""

TOUCH_SECONDS = 1.0
"""How long a reader waits at most until it is recorded that a file was used."""

ATTEMPTS = 3
"""Attempts to read a file that other processes replace meanwhile."""


class ByteRange(NamedTuple):
    """A range of bytes of a file: from `start` up to, but not including, `end`."""

    file: StoredFile
    start: int
    end: int


KnownRanges = Mapping[ByteRange, bytes | UnreachableError]
"""Ranges that were read already, or the error that reading them raised."""


class RemoteBackend(StorageBackend):
    """Files on other machines. A subclass says how the bytes of files get here, and the rest of `StorageBackend`.

    All methods raise `UnreachableError`, and no other error, if the other machine cannot be reached.

    Args:
        address: the URL of the files.
    """

    def __init__(self, address: Address) -> None:
        self._address = address

    @abstractmethod
    def listed(self) -> list[StoredFile]:
        """All files whose names end with `SUFFIX`."""

    @abstractmethod
    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes | UnreachableError]:
        """The bytes of each range, fewer if the file is shorter, or the error that reading them raised."""

    @abstractmethod
    def read_whole(self, files: Sequence[StoredFile]) -> list[bytes | UnreachableError | None]:
        """The first bytes of each file, one more than it should have, or the error; `None` if it does not exist.

        Args:
            files: names and sizes in bytes.
        """

    @abstractmethod
    def record_uses(self, names: Sequence[str]) -> None:
        """As `touch`, however long it takes."""

    def path_of(self, name: str) -> str:
        """The URL of a file, without credentials."""
        return self._address.path_of(name)

    def files(self) -> list[StoredFile]:
        """As `StorageBackend.files`."""
        # kvlayers never writes names with control characters, which a terminal might obey.
        return [file for file in self.listed() if file.name.isprintable()]

    def touch(self, names: Sequence[str]) -> None:
        """As `StorageBackend.touch`. Whoever has read a file does not wait for a server that has stopped to answer."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="kvlayers-touch")
        touched = thread.submit(self.record_uses, names)
        thread.shutdown(wait=False)
        with contextlib.suppress(NotArrived):
            touched.result(TOUCH_SECONDS)

    def inspect(self, files: Sequence[StoredFile], look: Look[Found]) -> Iterator[Found | KVLayersError]:
        """As `StorageBackend.inspect`."""
        for start in range(0, len(files), FILES_PER_REQUEST):
            batch = files[start : start + FILES_PER_REQUEST]
            ends = [each for file in batch for each in _ends(file)]
            found = dict(zip(ends, self.read_ranges(ends), strict=True))
            for file in batch:
                try:
                    yield self._inspected(file, {each: found[each] for each in _ends(file)}, look)
                except KVLayersError as error:
                    yield error

    def _inspected(self, file: StoredFile, known: KnownRanges, look: Look[Found]) -> Found:
        for _ in range(ATTEMPTS):
            try:
                return look(self.path_of(file.name), file, partial(self._read, file, known))
            except (CacheFileError, UnreachableError):
                (now,) = self.find([file.name])
                if now is None:
                    raise self._gone(file.name) from None
                if now == file:
                    raise
                file, known = now, {}
        raise UnreachableError(
            f"{self.path_of(file.name)} was replaced {ATTEMPTS} times while it was read: try again later."
        )

    def _read(
        self, file: StoredFile, known: Mapping[ByteRange, bytes | UnreachableError], start: int, end: int
    ) -> bytes:
        end = min(end, file.nbytes)
        if start >= end:
            return b""
        for each, content in known.items():
            if each.start <= start and end <= each.end:
                if isinstance(content, UnreachableError):
                    raise content
                return content[start - each.start : end - each.start]
        (content,) = self.read_ranges([ByteRange(file, start, end)])
        if isinstance(content, UnreachableError):
            raise content
        return content

    def read(self, files: Sequence[StoredFile], wait_seconds: float | None = None) -> Iterator[Content | KVLayersError]:
        """As `StorageBackend.read`. A thread requests the next files while the caller looks at the ones before."""
        deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
        coming: deque[tuple[list[StoredFile], Future[list[Content | KVLayersError]]]] = deque()
        batches = iter(_batches(files))
        thread = ThreadPoolExecutor(1, thread_name_prefix="kvlayers-read")
        try:
            for batch in batches:
                coming.append((batch, thread.submit(self._read_batch, batch)))
                if len(coming) == BATCHES_AT_ONCE:
                    yield from self._arrived(*coming.popleft(), deadline)
            while coming:
                yield from self._arrived(*coming.popleft(), deadline)
        finally:
            # The caller does not wait for what it does not want any more.
            thread.shutdown(wait=False, cancel_futures=True)

    def _arrived(
        self, batch: list[StoredFile], coming: Future[list[Content | KVLayersError]], deadline: float | None
    ) -> list[Content | KVLayersError]:
        try:
            return coming.result(None if deadline is None else max(deadline - time.monotonic(), 0))
        except NotArrived:
            return [UnreachableError(f"{self.path_of(file.name)} has not arrived in time.") for file in batch]
        except UnreachableError as error:
            return [error] * len(batch)

    def _read_batch(self, batch: list[StoredFile]) -> list[Content | KVLayersError]:
        found: list[Content | KVLayersError] = []
        for file, content in zip(batch, self.read_whole(batch), strict=True):
            if isinstance(content, bytes) and len(content) != file.nbytes:
                # Some storages do not replace a file at once, and somebody may have written it anew meanwhile.
                (content,) = self.read_whole([file])
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


def _ends(file: StoredFile) -> list[ByteRange]:
    """The ranges of a file that are read first. An empty file has no ranges, since servers refuse empty ones."""
    if file.nbytes <= HEAD_BYTES + TAIL_BYTES:
        return [ByteRange(file, 0, file.nbytes)] if file.nbytes else []
    return [ByteRange(file, 0, HEAD_BYTES), ByteRange(file, file.nbytes - TAIL_BYTES, file.nbytes)]


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
