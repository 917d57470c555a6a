"""Loads the cache of an entry: of all its blocks, or of those before the first that cannot be used."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, CachePathError, KVLayersError
from kvlayers.persistence.block_table import BlockTable
from kvlayers.persistence.format import TOKEN_IDS
from kvlayers.persistence.inspect import CacheFile, summary
from kvlayers.persistence.load import StateReader, load_cache
from kvlayers.persistence.safetensors_header import MAX_HEADER_BYTES
from kvlayers.persistence.saved_file import SavedFile, opened, opened_by_ranges
from kvlayers.prefix.backends import GoneError, StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.backends.contract import Content
from kvlayers.prefix.block_references import KnownEntry
from kvlayers.prefix.block_states import BlockStates, can_be_cut
from kvlayers.prefix.blocks import file_of, read_blocks
from kvlayers.prefix.entry import fork_at, restorable_length
from kvlayers.prefix.file_reports import FileReports, name_in
from kvlayers.prefix.keys import LABEL_PREFIX
from kvlayers.prefix.radix_tree import Tokens
from kvlayers.utils.options import checked_device


class NeedsConfigError(Exception):
    """A file is in order, but its cache cannot be made without the model's config. It never leaves kvlayers."""


class StoredPrefix(Protocol):
    """What identifies an entry in a file, for `Directory.load`. It does not change meanwhile."""

    @property
    def label(self) -> str:
        """Model and namespace, as returned by `keys.label_of`."""

    @property
    def ids(self) -> Tokens:
        """The tokens, int64 `[tokens]`."""

    @property
    def path(self) -> str | None:
        """Path of the file."""


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
        stored: StoredPrefix,
        known: KnownEntry,
        length: int,
        config: object | None,
        device: torch.device | str | None,
    ) -> Cache | None:
        """See `Directory.load`."""
        with self._opened(str(stored.path), known) as saved:
            seen, path = summary(saved), saved.path
            # Compared now, and not only when the store was opened, since other processes may write to the directory.
            if label_in(seen) != stored.label or not saved.has_token_ids or not _are_ids(saved, stored.ids):
                raise CacheFileError(f"{path} was replaced: it no longer holds the tokens of its entry.")
            # The label has identified the model already, so the config is only for layers that cannot be made without.
            if seen.needs_config and config is None:
                raise NeedsConfigError
            config = config if seen.needs_config else None
            if saved.table is None:
                first = length if length < seen.length and seen.has_prefixes else None
                cache = _at_fault(lambda: load_cache(path, device, config, first, weights_id=seen.weights_id))
            else:
                cache = self._from_blocks(saved, saved.table, length, config, device)
        target = restorable_length(cache, min(length, cache.get_seq_length()))
        return fork_at(cache, target) if 0 < target < cache.get_seq_length() else (cache if target else None)

    @contextlib.contextmanager
    def _opened(self, path: str, known: KnownEntry) -> Iterator[SavedFile]:
        """The file of an entry. If it holds a whole cache, it is mapped, or copied to this machine."""
        name = name_in(path)
        if not known.table.sizes:
            # As in `_content`.
            most, wait_seconds = known.nbytes + MAX_HEADER_BYTES, self._seconds_left()
            with self._backend.reading(name, most, wait_seconds) as local, opened(local) as saved:
                yield saved
            return
        content = self._content(StoredFile(name, known.nbytes))
        with opened_by_ranges(path, len(content), lambda start, end: bytes(content[start:end])) as saved:
            yield saved
        with contextlib.suppress(UnreachableError):
            self._backend.touch([name])

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

    def _from_blocks(
        self,
        saved: SavedFile,
        table: BlockTable,
        length: int,
        config: object | None,
        device: torch.device | str | None,
    ) -> Cache:
        """The cache of an entry, with at least `length` tokens if all blocks that this takes can be used."""
        is_cuttable = can_be_cut(saved)
        states = BlockStates(table, length, is_cuttable)
        needed = states.needed_blocks
        for name, found in read_blocks(self._backend, needed, self._seconds_left()):
            if not states.take(self._backend.path_of(file_of(name, 0).name), name, found):
                break
        self._report_failures(saved.path, states)
        cut = states.length if is_cuttable else None
        place = torch.device("cpu") if device is None else checked_device(device)
        return _at_fault(lambda: StateReader(saved, place, cut, True, states).new(config))

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
