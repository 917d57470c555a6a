"""Entries in files: one file per entry, wherever the files are."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, CachePathError, KVLayersError
from kvlayers.persistence.inspect import CacheFile, inspect_cache
from kvlayers.persistence.load import load_cache
from kvlayers.persistence.rebuild import check_remakeable
from kvlayers.persistence.safetensors_header import MAX_HEADER_BYTES
from kvlayers.persistence.save import save_cache
from kvlayers.prefix.backends import GoneError, StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.backends.contract import SUFFIX
from kvlayers.prefix.entry import PrefixEntry, fork_at, restorable_length
from kvlayers.prefix.keys import LABEL_PREFIX

logger = logging.getLogger(__name__)


class NeedsConfigError(Exception):
    """A file is in order, but its cache cannot be made without the model's config. It never leaves kvlayers."""


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
    """The files of a store. Each file contains all that identifies its entry.

    The `weights_id` of a file holds the entry's label and its boundaries. Its name only distinguishes it from others.

    Args:
        backend: where the files are.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self.damaged = self.failed_reads = 0
        self._reported: dict[str, StoredFile | None] = {}

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
                entry = _entry_of(seen)
            except GoneError:
                continue
            except UnreachableError as error:
                self.report_unreachable(error)
            except (CacheFileError, CachePathError) as error:
                self._report(file.name, file, error)
            else:
                if entry is not None:
                    added.append(entry)
        return DirectoryChanges(added, set(known) - paths)

    def report_damaged(self, entry: PrefixEntry, error: Exception) -> None:
        """Count the file of an entry as damaged, and log it once."""
        file = None
        with contextlib.suppress(UnreachableError):
            (file,) = self.backend.find([_name(entry)])
        self._report(_name(entry), file, error)

    def _report(self, name: str, file: StoredFile | None, error: Exception) -> None:
        path = self.backend.path_of(name)
        if path not in self._reported or self._reported[path] != file:
            self._reported[path] = file
            self.damaged += 1
            logger.warning("A file of a prefix store is skipped: %s", error)

    def report_unreachable(self, error: Exception) -> None:
        """Count a file that could not be reached, and log it."""
        self.failed_reads += 1
        logger.warning("A file of a prefix store could not be read now: %s", error)

    def write(self, entry: PrefixEntry) -> None:
        """Write the cache of an entry that is in memory.

        Raises:
            KVLayersError: the disk is full, or the cache is of a kind that cannot be loaded from a file.
        """
        cache = entry.cache
        if cache is None:
            return
        check_remakeable(cache)
        name = hashlib.sha256(entry.label.encode() + entry.ids.tobytes()).hexdigest() + SUFFIX
        boundaries = ",".join(map(str, sorted(entry.boundaries)))
        token_ids = torch.from_numpy(entry.ids.copy())[None]
        with self.backend.writing(name) as path:
            save_cache(cache, path, token_ids=token_ids, weights_id=f"{entry.label} {boundaries}")
            try:
                file_bytes = os.path.getsize(path)
            except OSError as error:
                raise GoneError(f"the file {path} was deleted right after it was written.") from error
        entry.path, entry.file_bytes = self.backend.path_of(name), file_bytes
        self._reported.pop(entry.path, None)

    def load(
        self, entry: PrefixEntry, length: int, config: object | None, device: torch.device | str | None
    ) -> Cache | None:
        """The cache in an entry's file, rolled back to `length` tokens, or as near before that as it can.

        Returns:
            The cache, `None` if it cannot be rolled back that far.

        Raises:
            CacheFileError: the file is damaged, or holds other tokens.
            UnreachableError: it cannot be reached now.
            CachePathError: it no longer exists.
            NeedsConfigError: its layers cannot be made without `config`.
        """
        # If the file is written anew, only its list of boundaries can differ in size.
        with self.backend.reading(_name(entry), entry.file_bytes + MAX_HEADER_BYTES) as path:
            cache = _loaded(path, entry, length, config, device)
        target = restorable_length(cache, min(length, cache.get_seq_length()))
        return fork_at(cache, target) if 0 < target < cache.get_seq_length() else (cache if target else None)

    def oldest_first(self, entries: Iterable[PrefixEntry]) -> list[PrefixEntry]:
        """Entries in files, least recently used file first; empty if this cannot be known now."""
        try:
            uses = self.backend.last_uses()
        except UnreachableError as error:
            self.report_unreachable(error)
            return []
        return sorted(entries, key=lambda entry: uses.get(_name(entry), 0))

    def delete(self, entry: PrefixEntry) -> bool:
        """Delete the file of an entry, if it has one.

        Returns:
            Whether the entry has no file now.
        """
        if entry.path is not None:
            try:
                self.backend.delete([_name(entry)])
            except UnreachableError as error:
                logger.warning("A file of a prefix store was not deleted: %s", error)
                return False
            entry.path, entry.file_bytes = None, 0
        return True


def _name(entry: PrefixEntry) -> str:
    return os.path.basename(str(entry.path))


def _loaded(
    path: str, entry: PrefixEntry, length: int, config: object | None, device: torch.device | str | None
) -> Cache:
    """The cache in an entry's file; its first `length` tokens only, if they can be read separately."""
    seen = inspect_cache(path)
    kept = _entry_of(seen)
    # Compared now, and not only when the store was opened, since other processes may write to the directory.
    if kept is None or kept.label != entry.label or kept.ids.tobytes() != entry.ids.tobytes():
        raise CacheFileError(f"{path} was replaced: it no longer holds the tokens of its entry.")
    # The label has identified the model already, so the config is only for layers that cannot be made without one.
    if seen.needs_config and config is None:
        raise NeedsConfigError
    first = length if length < entry.length and seen.has_prefixes else None
    try:
        return load_cache(path, device, config if seen.needs_config else None, first, weights_id=seen.weights_id)
    except CachePathError:
        raise
    except KVLayersError as error:
        raise CacheFileError(str(error)) from error


def _entry_of(seen: CacheFile) -> PrefixEntry | None:
    """The entry that a file describes, `None` if it is not a file of a prefix store.

    Raises:
        CacheFileError: it is a file of a store, but damaged.
        CachePathError: it no longer exists.
    """
    if seen.weights_id is None or not seen.weights_id.startswith(LABEL_PREFIX):
        return None
    label, _, boundaries = seen.weights_id.partition(" ")
    token_ids = seen.token_ids()
    if token_ids is None or token_ids.dtype != torch.int64 or tuple(token_ids.shape) != (1, seen.length):
        raise CacheFileError(f"{seen.path} is damaged: it does not have one id for each of its {seen.length} tokens.")
    lengths = {int(text) for text in boundaries.split(",") if text.isascii() and text.isdigit()}
    return PrefixEntry(
        label,
        token_ids[0].numpy(),
        path=seen.path,
        file_bytes=seen.nbytes,
        boundaries={length for length in lengths if length <= seen.length},
    )
