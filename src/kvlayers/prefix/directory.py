"""Entries in files: one small file for each entry, and blocks of tokens that entries share, wherever they are."""

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, CachePathError, KVLayersError
from kvlayers.persistence.block_table import BlockTable
from kvlayers.persistence.format import TOKEN_IDS
from kvlayers.persistence.inspect import CacheFile, summary
from kvlayers.persistence.load import StateReader, load_cache
from kvlayers.persistence.rebuild import check_remakeable
from kvlayers.persistence.safetensors_header import MAX_HEADER_BYTES
from kvlayers.persistence.saved_file import SavedFile, opened, opened_by_ranges
from kvlayers.prefix.backends import GoneError, StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.backends.contract import SUFFIX, Content
from kvlayers.prefix.block_references import BlockReferences, KnownEntry, known_entry
from kvlayers.prefix.block_states import BlockStates, can_be_cut
from kvlayers.prefix.blocks import file_of, read_blocks
from kvlayers.prefix.entry import PrefixEntry, fork_at, restorable_length
from kvlayers.prefix.entry_writer import EntryFile, EntryWriter
from kvlayers.prefix.garbage import GRACE_SECONDS, GRACE_SECONDS_WHEN_FULL, GarbageCollector
from kvlayers.prefix.keys import LABEL_PREFIX
from kvlayers.prefix.radix_tree import Tokens
from kvlayers.utils.options import checked_device

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class WrittenEntry:
    """An entry that was written.

    Attributes:
        path: path of its file, or URL without credentials.
        nbytes: bytes of the file and of the blocks that it refers to, which other entries may share.
    """

    path: str
    nbytes: int


@dataclass(frozen=True)
class DirectoryChanges:
    """Changes that other processes have made to the files.

    Attributes:
        added: entries of new files, least recently used first.
        gone: paths of known files that no longer exist.
    """

    added: list[PrefixEntry]
    gone: set[str]


class Directory:
    """The files of a store. Each entry contains all that identifies it. Threads may share a directory.

    The `weights_id` of a file holds the entry's label and its boundaries. Its name only distinguishes it from others.

    Args:
        backend: where the files are.

    Attributes:
        damaged: how many damaged or missing files were seen.
        failed_reads: how often a file could not be reached, or not in time.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self.damaged = self.failed_reads = 0
        self._lock = threading.Lock()
        self._reported: dict[str, StoredFile | None] = {}
        self._references = BlockReferences()
        self._garbage = GarbageCollector(backend, self._references)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, blocks that several of them share counted once."""
        return self._references.nbytes

    def pieces(self, path: str) -> dict[str, int]:
        """Bytes of the file of an entry, and of each of its blocks, by path and by name. No file is read."""
        known = self._references.get(path)
        return {} if known is None else {path: known.nbytes, **known.table.sizes}

    def changes(self, known: Collection[str]) -> DirectoryChanges:
        """Compare the files with the known entries. Damaged files are reported and left alone.

        Args:
            known: paths of known files.

        Raises:
            CachePathError: the files cannot be listed now.
        """
        entries = (file for file in self.backend.files() if file.name.endswith(SUFFIX))
        files = sorted(entries, key=lambda file: (file.used, file.name))
        paths = {self.backend.path_of(file.name) for file in files}
        # A damaged file is read again once somebody has written it anew.
        new = [
            file
            for file in files
            if (path := self.backend.path_of(file.name)) not in known and self._reported.get(path) != file
        ]
        added = []
        for file, seen in zip(new, self.backend.inspect(new), strict=True):
            try:
                if isinstance(seen, KVLayersError):
                    raise seen
                entry = entry_of(seen)
                if entry is not None:
                    self._references.put(seen.path, known_entry(seen, file))
            except GoneError:
                continue
            except UnreachableError as error:
                self.report_unreachable(error)
            except (CacheFileError, CachePathError) as error:
                self._report(file.name, file, error)
            else:
                if entry is not None:
                    added.append(entry)
        gone = set(known) - paths
        for path in gone:
            self._references.drop(path)
        return DirectoryChanges(added, gone)

    def report_damaged(self, path: str, error: Exception) -> None:
        """Count the file of an entry as damaged, and log it once."""
        file = None
        with contextlib.suppress(UnreachableError):
            (file,) = self.backend.find([_name(path)])
        self._report(_name(path), file, error)

    def _report(self, name: str, file: StoredFile | None, error: Exception) -> None:
        path = self.backend.path_of(name)
        with self._lock:
            if path in self._reported and self._reported[path] == file:
                return
            self._reported[path] = file
            self.damaged += 1
        logger.warning("A file of a prefix store is skipped: %s", error)

    def report_unreachable(self, error: Exception) -> None:
        """Count a file that could not be reached, and log it."""
        with self._lock:
            self.failed_reads += 1
        logger.warning("A file of a prefix store could not be read now: %s", error)

    def write(
        self,
        label: str,
        ids: Tokens,
        boundaries: Collection[int],
        cache: Cache,
        neighbours: Sequence[tuple[str, int]] = (),
    ) -> WrittenEntry:
        """Write an entry. When this returns, it is acknowledged: a crash does not lose it.

        Tokens that neighbours have in blocks are not written again.

        Args:
            label: model and namespace, as returned by `keys.label_of`.
            ids: all tokens that `cache` has seen, int64 `[tokens]`.
            boundaries: lengths that the entry serves.
            cache: the cache, to which nobody writes.
            neighbours: entries of the same label in the directory that begin with some of the same tokens, the best
                first: the path of each, and the number of these tokens.

        Raises:
            KVLayersError: the disk is full, or the cache is of a kind that cannot be loaded from a file.
        """
        check_remakeable(cache)
        name = hashlib.sha256(label.encode() + ids.tobytes()).hexdigest() + SUFFIX
        served = ",".join(map(str, sorted(boundaries)))
        known = [(self._references.get(path), tokens) for path, tokens in neighbours]
        tables = [(entry.table, tokens) for entry, tokens in known if entry is not None]
        file = EntryFile(name, f"{label} {served}", torch.from_numpy(ids.copy())[None])
        written = EntryWriter(self.backend, self._references, cache, tables).write(file)
        path = self.backend.path_of(name)
        with self._lock:
            self._reported.pop(path, None)
        return WrittenEntry(path, written.nbytes + written.table.nbytes)

    def load(
        self,
        stored: StoredPrefix,
        length: int,
        config: object | None,
        device: torch.device | str | None,
        deadline: float | None = None,
    ) -> Cache | None:
        """The cache of an entry, rolled back to `length` tokens, or as near before that as it can.

        Args:
            stored: the entry. Its label and tokens must be those in the file.
            length: how many of its first tokens are needed.
            config: config of the model, for layers that need it.
            device: device of the states, `None` for the host.
            deadline: when to go on with what has arrived, as `time.monotonic()` counts; `None` for no limit.

        Returns:
            The cache, `None` if it cannot be rolled back that far. It may have fewer tokens than `length`: damaged,
            missing and late blocks are reported, and the tokens before them are used.

        Raises:
            CacheFileError: the file is damaged, or holds other tokens; or a block of it is, before which nothing can be
                used.
            UnreachableError: it cannot be reached now, or not in time.
            CachePathError: it no longer exists.
            NeedsConfigError: its layers cannot be made without `config`.
        """
        known = None if stored.path is None else self._references.get(stored.path)
        if stored.path is None or known is None:
            raise GoneError("the entry has no file any more.")
        with self._opened(stored.path, known, deadline) as saved:
            seen, path = summary(saved), saved.path
            # Compared now, and not only when the store was opened, since other processes may write to the directory.
            if _label_of(seen) != stored.label or not saved.has_token_ids or not _are_ids(saved, stored.ids):
                raise CacheFileError(f"{path} was replaced: it no longer holds the tokens of its entry.")
            # The label has identified the model already, so the config is only for layers that cannot be made without.
            if seen.needs_config and config is None:
                raise NeedsConfigError
            config = config if seen.needs_config else None
            if saved.table is None:
                first = length if length < seen.length and seen.has_prefixes else None
                cache = _at_fault(lambda: load_cache(path, device, config, first, weights_id=seen.weights_id))
            else:
                cache = self._from_blocks(saved, saved.table, length, config, device, deadline)
        target = restorable_length(cache, min(length, cache.get_seq_length()))
        return fork_at(cache, target) if 0 < target < cache.get_seq_length() else (cache if target else None)

    @contextlib.contextmanager
    def _opened(self, path: str, known: KnownEntry, deadline: float | None) -> Iterator[SavedFile]:
        """The file of an entry. If it holds a whole cache, it is mapped, or copied to this machine."""
        name = _name(path)
        if not known.table.sizes:
            # As in `_content`.
            most, wait_seconds = known.nbytes + MAX_HEADER_BYTES, _seconds_until(deadline)
            with self.backend.reading(name, most, wait_seconds) as local, opened(local) as saved:
                yield saved
            return
        content = self._content(StoredFile(name, known.nbytes), deadline)
        with opened_by_ranges(path, len(content), lambda start, end: bytes(content[start:end])) as saved:
            yield saved
        with contextlib.suppress(UnreachableError):
            self.backend.touch([name])

    def _content(self, file: StoredFile, deadline: float | None) -> Content:
        """The content of a file that other processes may replace meanwhile."""
        # If the file is written anew, only its list of boundaries can differ in size.
        most = file.nbytes + MAX_HEADER_BYTES
        while True:
            (content,) = self.backend.read([file], _seconds_until(deadline))
            if not isinstance(content, KVLayersError):
                return content
            if not isinstance(content, CacheFileError):
                raise content
            (now,) = self.backend.find([file.name])
            if now is None:
                raise GoneError(f"{self.backend.path_of(file.name)} does not exist: it was deleted.")
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
        deadline: float | None,
    ) -> Cache:
        """The cache of an entry, with at least `length` tokens if all blocks that this takes can be used."""
        is_cuttable = can_be_cut(saved)
        states = BlockStates(table, length, is_cuttable)
        needed = states.needed_blocks
        for name, found in read_blocks(self.backend, needed, _seconds_until(deadline)):
            if not states.take(self.backend.path_of(file_of(name, 0).name), name, found):
                break
        self._report_failures(saved.path, states)
        cut = states.length if is_cuttable else None
        place = torch.device("cpu") if device is None else checked_device(device)
        return _at_fault(lambda: StateReader(saved, place, cut, True, states).new(config))

    def _report_failures(self, path: str, states: BlockStates) -> None:
        """Report blocks that could not be used, and raise their error if nothing is left without them."""
        lost = {name for name, error in states.failures.items() if not isinstance(error, UnreachableError)}
        self._references.add_unusable(lost)
        for name, error in states.failures.items():
            file = file_of(name, 0)
            if isinstance(error, UnreachableError):
                if not states.length:
                    raise error
                self.report_unreachable(error)
                continue
            if isinstance(error, GoneError) and self.backend.find([_name(path)]) == [None]:
                raise GoneError(f"{path} does not exist: it was deleted.")
            self.report_damaged(self.backend.path_of(file.name), error)
            if not states.length:
                raise CacheFileError(f"{path} cannot be loaded: {error}")

    def oldest_first(self, paths: Iterable[str]) -> list[str]:
        """Paths of entries, least recently used first; empty if this cannot be known now."""
        try:
            uses = self.backend.last_uses()
        except UnreachableError as error:
            self.report_unreachable(error)
            return []
        return sorted(paths, key=lambda path: uses.get(_name(path), 0))

    def delete(self, path: str) -> bool:
        """Delete an entry, and the blocks that no other entry refers to.

        Returns:
            Whether it is deleted now.
        """
        return self.delete_all([path])

    def delete_all(self, paths: Collection[str]) -> bool:
        """Delete entries, and the blocks that no other entry refers to; as `delete`, with one look at what is left.

        Returns:
            Whether all of them are deleted now.
        """
        try:
            self.backend.delete([_name(path) for path in paths])
        except UnreachableError as error:
            logger.warning("A file of a prefix store was not deleted: %s", error)
            return False
        blocks = {name for path in paths for name in self._references.drop(path)}
        self._collect(blocks, GRACE_SECONDS_WHEN_FULL)
        return True

    def collect_garbage(self) -> int:
        """Delete blocks that no entry refers to, left behind by writers that were killed.

        Returns:
            Bytes of the deleted blocks.
        """
        return self._collect(None, GRACE_SECONDS)

    def _collect(self, candidates: Collection[str] | None, grace_seconds: float) -> int:
        try:
            return self._garbage.collect(candidates, grace_seconds)
        except UnreachableError as error:
            logger.warning("Blocks of a prefix store were not deleted: %s", error)
            return 0


def _name(path: str) -> str:
    return os.path.basename(path)


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


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


def _label_of(seen: CacheFile) -> str | None:
    """The label of an entry, `None` if a file does not belong to a prefix store."""
    if seen.weights_id is None or not seen.weights_id.startswith(LABEL_PREFIX):
        return None
    return seen.weights_id.partition(" ")[0]


def entry_of(seen: CacheFile) -> PrefixEntry | None:
    """The entry that a file describes, `None` if it is not a file of a prefix store.

    Raises:
        CacheFileError: it is a file of a store, but damaged.
        CachePathError: it no longer exists.
    """
    label = _label_of(seen)
    if label is None:
        return None
    boundaries = str(seen.weights_id).partition(" ")[2]
    token_ids = seen.token_ids()
    if token_ids is None or token_ids.dtype != torch.int64 or tuple(token_ids.shape) != (1, seen.length):
        raise CacheFileError(f"{seen.path} is damaged: it does not have one id for each of its {seen.length} tokens.")
    lengths = {int(text) for text in boundaries.split(",") if text.isascii() and text.isdigit()}
    return PrefixEntry(
        label,
        token_ids[0].numpy(),
        path=seen.path,
        file_bytes=seen.nbytes + (0 if seen.blocks is None else seen.blocks.nbytes),
        boundaries={length for length in lengths if length <= seen.length},
    )
