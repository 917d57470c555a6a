"""Entries in files: one small file for each entry, and blocks of tokens that entries share, wherever they are."""

import hashlib
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, CachePathError, KVLayersError
from kvlayers.persistence.inspect import CacheFile
from kvlayers.persistence.rebuild import check_remakeable
from kvlayers.persistence.saved_file import UnknownVersionError
from kvlayers.prefix.backends import GoneError, StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.backends.contract import ABANDONED_SECONDS, BLOCK_SUFFIX, SUFFIX
from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.entry_loader import EntryLoader, FileCandidate, FileReports, label_in, name_in
from kvlayers.prefix.entry_writer import EntryWriter
from kvlayers.prefix.keys import Tokens
from kvlayers.prefix.references import BlockReferences, known_entry

logger = logging.getLogger(__name__)

GRACE_SECONDS = ABANDONED_SECONDS
"""How long nobody may have touched a block before it counts as left behind by a writer that was killed."""

GRACE_SECONDS_WHEN_FULL = 120.0
"""The same for the blocks of entries that are deleted to make room."""

NANOSECONDS = 10**9


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
        reports: damaged files, and files that could not be reached.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self.reports = FileReports(backend)
        self._references = BlockReferences()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, blocks that several of them share counted once."""
        return self._references.nbytes

    def pieces(self, path: str) -> dict[str, int]:
        """Bytes of the file of an entry, and of each of its blocks, by path and by name. No file is read."""
        known = self._references.get(path)
        return {} if known is None else {path: known.nbytes, **known.table.sizes}

    @property
    def damaged(self) -> int:
        """How many damaged or missing files were seen."""
        return self.reports.damaged_files

    @property
    def failed_reads(self) -> int:
        """How often a file could not be reached, or not in time."""
        return self.reports.failed_reads

    def changes(self, known: Collection[str]) -> DirectoryChanges:
        """Compare the files with the known entries. Damaged files are reported and left alone.

        Args:
            known: paths of known files.

        Raises:
            CachePathError: the files cannot be listed now.
        """
        began = time.time_ns()
        entries = (file for file in self.backend.files() if file.name.endswith(SUFFIX))
        files = sorted(entries, key=lambda file: (file.used, file.name))
        paths = {self.backend.path_of(file.name) for file in files}
        # A damaged file is read again once somebody has written it anew.
        new = [
            file
            for file in files
            if (path := self.backend.path_of(file.name)) not in known and not self.reports.has(path, file)
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
                self.reports.unreachable(error)
            except (CacheFileError, CachePathError) as error:
                self.reports.damaged_file(self.backend.path_of(file.name), file, error)
            else:
                if entry is not None:
                    added.append(entry)
        self._references.forget_gone(paths, began)
        return DirectoryChanges(added, set(known) - paths)

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
        writer = EntryWriter(self.backend, self._references, cache, tables)
        written = writer.write(name, f"{label} {served}", torch.from_numpy(ids.copy())[None])
        path = self.backend.path_of(name)
        self.reports.forget(path)
        return WrittenEntry(path, written.nbytes + written.table.nbytes)

    def load(
        self,
        stored: FileCandidate,
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
        known = self._references.get(stored.path)
        if known is None:
            raise GoneError("the entry has no file any more.")
        loader = EntryLoader(self.backend, self.reports, deadline)
        try:
            return loader.load(stored, known, length, config, device)
        except GoneError:
            self._references.drop(stored.path)
            raise
        finally:
            self._references.add_unusable(loader.unusable)

    def oldest_first(self, paths: Iterable[str]) -> list[str]:
        """Paths of entries, least recently used first; empty if this cannot be known now."""
        try:
            uses = self.backend.last_uses()
        except UnreachableError as error:
            self.reports.unreachable(error)
            return []
        return sorted(paths, key=lambda path: uses.get(name_in(path), 0))

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
            self.backend.delete([name_in(path) for path in paths])
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
            return self._deleted_bytes(candidates, grace_seconds)
        except UnreachableError as error:
            logger.warning("Blocks of a prefix store were not deleted: %s", error)
            return 0

    def _deleted_bytes(self, candidates: Collection[str] | None, grace_seconds: float) -> int:
        """Delete blocks that no entry refers to, beside running writers. `entry_writer.py` says why that is safe.

        Blocks that this process has written, and that no other process has touched since, need no time of grace.

        Args:
            candidates: names of blocks, `None` for all.
            grace_seconds: how long nobody may have touched a block before the listing begins.

        Returns:
            Bytes of the blocks that were deleted.

        Raises:
            UnreachableError: the files cannot be listed or deleted now.
        """
        began = time.time_ns()
        files = self.backend.files()
        entries = [file for file in files if file.name.endswith(SUFFIX)]
        blocks = {file.name.removesuffix(BLOCK_SUFFIX): file for file in files if file.name.endswith(BLOCK_SUFFIX)}
        wanted = [name for name in (blocks if candidates is None else candidates) if name in blocks]
        if not wanted or not self._learn(entries):
            return 0
        self._references.forget_gone([self.backend.path_of(file.name) for file in entries], began)
        unreferenced = self._references.unreferenced(wanted)
        name_of = {blocks[name].name: name for name in unreferenced}
        alone = self._references.used_by_this_process_alone([blocks[name] for name in unreferenced], name_of)
        others = [name for name in unreferenced if name not in set(alone)]
        if alone:
            last_use = max(blocks[name].used for name in alone)
            self.backend.delete([blocks[name].name for name in alone], last_use + 1)
        if others:
            self.backend.delete([blocks[name].name for name in others], began - int(grace_seconds * NANOSECONDS))
        self._references.forget_uses(alone)
        left = self.backend.find([blocks[name].name for name in unreferenced]) if unreferenced else []
        return sum(blocks[name].nbytes for name, file in zip(unreferenced, left, strict=True) if file is None)

    def _learn(self, entries: Collection[StoredFile]) -> bool:
        """Read entries that other processes have written. Returns whether all references are known now."""
        new = []
        for file in entries:
            known = self._references.get(self.backend.path_of(file.name))
            if known is None or known.file != file:
                new.append(file)
        for file, seen in zip(new, self.backend.inspect(new), strict=True):
            if isinstance(seen, UnknownVersionError | UnreachableError):
                logger.info("Blocks of a prefix store are not deleted now, since some may be in use: %s", seen)
                return False
            if isinstance(seen, GoneError):
                continue
            if isinstance(seen, KVLayersError):
                # Nobody can load a damaged entry, so it needs no blocks.
                continue
            self._references.put(seen.path, known_entry(seen, file))
        return True


def entry_of(seen: CacheFile) -> PrefixEntry | None:
    """The entry that a file describes, `None` if it is not a file of a prefix store.

    Raises:
        CacheFileError: it is a file of a store, but damaged.
        CachePathError: it no longer exists.
    """
    label = label_in(seen)
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
