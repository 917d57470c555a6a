"""Loads the cache of an entry: of all its blocks, or of those before the first that cannot be used."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, CachePathError, KVLayersError
from kvlayers.persistence.format import TOKEN_IDS
from kvlayers.persistence.inspect import CacheFile, summary
from kvlayers.persistence.load import StateReader
from kvlayers.persistence.safetensors_header import MAX_HEADER_BYTES, Header, parse_header
from kvlayers.persistence.saved_file import SavedFile
from kvlayers.prefix.backends import GoneError, StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.backends.contract import Content
from kvlayers.prefix.blocks import BlockStates, can_be_cut, file_of, read_blocks
from kvlayers.prefix.entry import PrefixEntry, fork_at, restorable_length
from kvlayers.prefix.keys import LABEL_PREFIX, Tokens
from kvlayers.prefix.references import KnownEntry
from kvlayers.utils.options import checked_device

logger = logging.getLogger(__name__)


class FileReports:
    """Counts files that cannot be used. Threads may share it.

    Args:
        backend: where the files are.

    Attributes:
        damaged_files: how many damaged or missing files were seen.
        failed_reads: how often a file could not be reached, or not in time.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.damaged_files = self.failed_reads = 0
        self._backend = backend
        self._lock = threading.Lock()
        self._reported: dict[str, StoredFile | None] = {}

    def has(self, path: str, file: StoredFile) -> bool:
        """Whether exactly this file was reported as damaged."""
        return self._reported.get(path) == file

    def damaged(self, path: str, error: Exception) -> None:
        """Count a file as damaged, and log it once."""
        file = None
        with contextlib.suppress(UnreachableError):
            (file,) = self._backend.find([name_in(path)])
        self.damaged_file(path, file, error)

    def damaged_file(self, path: str, file: StoredFile | None, error: Exception) -> None:
        """As `damaged`, for a file that was just listed; `None` if it does not exist."""
        with self._lock:
            if path in self._reported and self._reported[path] == file:
                return
            self._reported[path] = file
            self.damaged_files += 1
        logger.warning("A file of a prefix store is skipped: %s", error)

    def unreachable(self, error: Exception) -> None:
        """Count a file that could not be reached, and log it."""
        with self._lock:
            self.failed_reads += 1
        logger.warning("A file of a prefix store could not be read now: %s", error)

    def forget(self, path: str) -> None:
        """Report a file again if it is damaged, since it was written anew."""
        with self._lock:
            self._reported.pop(path, None)


def name_in(path: str) -> str:
    """The name of the file at a path or URL."""
    return os.path.basename(path)


class NeedsConfigError(Exception):
    """A file is in order, but its cache cannot be made without the model's config. It never leaves kvlayers."""


@dataclass(frozen=True)
class FileCandidate:
    """An entry in a file that may serve a prompt. It does not change, whatever becomes of the entry.

    Attributes:
        entry: the entry.
        label: model and namespace.
        ids: its tokens.
        path: path of its file.
        shared: number of tokens that it shares with the prompt and that are to be found.
    """

    entry: PrefixEntry
    label: str
    ids: Tokens
    path: str
    shared: int

    @property
    def is_whole(self) -> bool:
        """Whether all of its tokens are needed. Such an entry certainly works."""
        return len(self.ids) <= self.shared


class _ContentTensors:
    """The tensors of a file that was read, or mapped into memory."""

    def __init__(self, content: Content, header: Header) -> None:
        self._content, self._header = content, header

    def get_tensor(self, name: str) -> Tensor:
        """A copy of a tensor."""
        entry, (start, end) = self._header.tensors[name], self._header.ranges[name]
        if start == end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.frombuffer(bytearray(self._content[start:end]), dtype=entry.dtype).view(entry.shape)


class EntryLoader:
    """Loads one entry.

    Args:
        backend: where its files are.
        reports: takes what was wrong with them.
        deadline: when to go on with what has arrived, as `time.monotonic()` counts; `None` for no limit.

    Attributes:
        unusable: names of blocks that were damaged or missing.
    """

    def __init__(self, backend: StorageBackend, reports: FileReports, deadline: float | None) -> None:
        self._backend = backend
        self._reports = reports
        self._deadline = deadline
        self.unusable: set[str] = set()

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def load(
        self,
        stored: FileCandidate,
        known: KnownEntry,
        length: int,
        config: object | None,
        device: torch.device | str | None,
    ) -> Cache | None:
        """See `Directory.load`."""
        saved = self._opened(stored.path, known)
        seen = summary(saved)
        # Compared now, and not only when the store was opened, since other processes may write to the directory.
        if label_in(seen) != stored.label or not saved.has_token_ids or not _are_ids(saved, stored.ids):
            raise CacheFileError(f"{saved.path} was replaced: it no longer holds the tokens of its entry.")
        # The label has identified the model already, so the config is only for layers that cannot be made without.
        if seen.needs_config and config is None:
            raise NeedsConfigError
        config = config if seen.needs_config else None
        states: BlockStates | None = None
        cut = length if length < seen.length and seen.has_prefixes else None
        if saved.table is not None:
            is_cuttable = can_be_cut(saved)
            states = self._states(saved.path, BlockStates(saved.table, length, is_cuttable))
            cut = states.length if is_cuttable else None
        place = torch.device("cpu") if device is None else checked_device(device)
        cache = _at_fault(lambda: StateReader(saved, place, cut, True, states).new(config))
        with contextlib.suppress(UnreachableError):
            self._backend.touch([name_in(saved.path)])
        target = restorable_length(cache, min(length, cache.get_seq_length()))
        return fork_at(cache, target) if 0 < target < cache.get_seq_length() else (cache if target else None)

    def _opened(self, path: str, known: KnownEntry) -> SavedFile:
        content = self._content(StoredFile(name_in(path), known.nbytes))
        header = parse_header(path, len(content), lambda start, end: bytes(content[start:end]))
        return SavedFile(path, _ContentTensors(content, header), header)

    def _content(self, file: StoredFile) -> Content:
        """The content of a file that other processes may replace meanwhile."""
        # If the file is written anew, only its list of boundaries can differ in size.
        most = file.nbytes + MAX_HEADER_BYTES
        while True:
            (content,) = self._backend.read([file], self._seconds_left())
            if not isinstance(content, KVLayersError):
                return content
            if not isinstance(content, CacheFileError):
                raise content
            (now,) = self._backend.find([file.name])
            if now is None:
                raise GoneError(f"{self._backend.path_of(file.name)} does not exist: it was deleted.")
            if now.nbytes == file.nbytes or now.nbytes > most:
                raise content
            file = now

    def _states(self, path: str, states: BlockStates) -> BlockStates:
        """Read the blocks of an entry, until all that are needed have arrived, or the rest is of no use."""
        for name, found in read_blocks(self._backend, states.needed_blocks, self._seconds_left()):
            if not states.take(self._backend.path_of(file_of(name, 0).name), name, found):
                break
        self._report_failures(path, states)
        return states

    def _report_failures(self, path: str, states: BlockStates) -> None:
        """Report blocks that could not be used, and raise their error if nothing is left without them."""
        self.unusable |= {name for name, error in states.failures.items() if not isinstance(error, UnreachableError)}
        for name, error in states.failures.items():
            if isinstance(error, UnreachableError):
                if not states.length:
                    raise error
                self._reports.unreachable(error)
                continue
            if isinstance(error, GoneError) and self._backend.find([name_in(path)]) == [None]:
                raise GoneError(f"{path} does not exist: it was deleted.")
            if not states.length:
                raise CacheFileError(f"{path} cannot be loaded: {error}")
            self._reports.damaged(self._backend.path_of(file_of(name, 0).name), error)


def _at_fault(load: Callable[[], Cache]) -> Cache:
    """The result of a call, for whose errors the file is to blame."""
    try:
        return load()
    except CachePathError:
        raise
    except KVLayersError as error:
        raise CacheFileError(str(error)) from error


def _are_ids(saved: SavedFile, ids: Tokens) -> bool:
    """Whether a file has exactly these token ids."""
    found = saved.tensor(TOKEN_IDS)
    return found.dtype == torch.int64 and found.shape == (1, len(ids)) and found.numpy().tobytes() == ids.tobytes()


def label_in(seen: CacheFile) -> str | None:
    """The label of an entry, `None` if a file does not belong to a prefix store."""
    if seen.weights_id is None or not seen.weights_id.startswith(LABEL_PREFIX):
        return None
    return seen.weights_id.partition(" ")[0]
