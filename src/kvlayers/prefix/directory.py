"""Entries in files: a file for each, wherever the files are."""

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
from kvlayers.prefix.entry import PrefixEntry, put_back, reach
from kvlayers.prefix.keys import LABEL_PREFIX

logger = logging.getLogger(__name__)


class NeedsConfigError(Exception):
    """A file is in order, and its cache cannot be made without the config of the model. For this package alone."""


@dataclass(frozen=True)
class Changes:
    """What others have done to the files.

    Attributes:
        added: entries of files that were not known, the one used longest ago first.
        gone: paths of files that were known, and are not there any more.
    """

    added: list[PrefixEntry]
    gone: set[str]


class Directory:
    """The files of a store. A file says by itself whose and of what it is.

    Its `weights_id` is the entry's label and the lengths that it stands for; its name only keeps files apart.

    Args:
        place: where they are.
    """

    def __init__(self, place: StorageBackend) -> None:
        self.place = place
        self.damaged = self.failed_reads = 0
        self._reported: dict[str, StoredFile | None] = {}

    def changes(self, known: Collection[str]) -> Changes:
        """What is there now, compared with what is known; damaged files are reported and left alone.

        Args:
            known: paths of files.

        Raises:
            CachePathError: the files cannot be listed now.
        """
        files = sorted(self.place.files(), key=lambda file: (file.used, file.name))
        paths = {self.place.path_of(file.name) for file in files}
        # What was found damaged is looked at again when somebody has written it anew.
        new = [
            file
            for file in files
            if (path := self.place.path_of(file.name)) not in known and self._reported.get(path) != file
        ]
        added = []
        for file, seen in zip(new, self.place.inspect(new), strict=True):
            try:
                if isinstance(seen, KVLayersError):
                    raise seen
                entry = _entry_of(seen)
            except GoneError:
                continue
            except UnreachableError as error:
                self.missed(error)
            except (CacheFileError, CachePathError) as error:
                self._report(file.name, file, error)
            else:
                if entry is not None:
                    added.append(entry)
        return Changes(added, set(known) - paths)

    def report(self, entry: PrefixEntry, error: Exception) -> None:
        """Count the file of an entry, which is damaged, and say so in the log, once."""
        file = None
        with contextlib.suppress(UnreachableError):
            file = self.place.find(_name(entry))
        self._report(_name(entry), file, error)

    def _report(self, name: str, file: StoredFile | None, error: Exception) -> None:
        path = self.place.path_of(name)
        if path not in self._reported or self._reported[path] != file:
            self._reported[path] = file
            self.damaged += 1
            logger.warning("A file of a prefix store is skipped: %s", error)

    def missed(self, error: Exception) -> None:
        """Count a file that could not be reached, and say so in the log."""
        self.failed_reads += 1
        logger.warning("A file of a prefix store could not be read now: %s", error)

    def write(self, entry: PrefixEntry) -> None:
        """Write the cache of an entry that is in memory.

        Raises:
            KVLayersError: the disk is full, or the cache is of a kind that a file cannot give back.
        """
        cache = entry.cache
        if cache is None:
            return
        check_remakeable(cache)
        name = hashlib.sha256(entry.label.encode() + entry.ids.tobytes()).hexdigest() + SUFFIX
        boundaries = ",".join(map(str, sorted(entry.boundaries)))
        token_ids = torch.from_numpy(entry.ids.copy())[None]
        with self.place.writing(name) as path:
            save_cache(cache, path, token_ids=token_ids, weights_id=f"{entry.label} {boundaries}")
            try:
                file_bytes = os.path.getsize(path)
            except OSError as error:
                raise GoneError(f"expected the file that was written, but {path} is gone: it was deleted.") from error
        entry.path, entry.file_bytes = self.place.path_of(name), file_bytes
        self._reported.pop(entry.path, None)

    def load(
        self, entry: PrefixEntry, length: int, config: object | None, device: torch.device | str | None
    ) -> Cache | None:
        """What is in an entry's file, put back to `length` tokens or as near before as it can go; `None` for nowhere.

        Raises:
            CacheFileError: the file is damaged, or not of these tokens.
            UnreachableError: it cannot be reached now.
            CachePathError: it is gone.
            NeedsConfigError: its layers cannot be made without `config`.
        """
        # Who writes it anew may note other lengths that it stands for, and nothing else of another size.
        with self.place.reading(_name(entry), entry.file_bytes + MAX_HEADER_BYTES) as path:
            cache = _loaded(path, entry, length, config, device)
        target = reach(cache, min(length, cache.get_seq_length()))
        return put_back(cache, target) if 0 < target < cache.get_seq_length() else (cache if target else None)

    def oldest_first(self, entries: Iterable[PrefixEntry]) -> list[PrefixEntry]:
        """Entries in files by the last use of these; none where that cannot be known now."""
        try:
            uses = self.place.uses()
        except UnreachableError as error:
            self.missed(error)
            return []
        return sorted(entries, key=lambda entry: uses.get(_name(entry), 0))

    def delete(self, entry: PrefixEntry) -> bool:
        """Delete the file of an entry, where there is one.

        Returns:
            Whether it is gone.
        """
        if entry.path is not None:
            try:
                self.place.delete(_name(entry))
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
    """The cache in an entry's file, of its first `length` tokens where these can be read apart."""
    seen = inspect_cache(path)
    kept = _entry_of(seen)
    # Compared here, and not only when the store began: others may write to the directory.
    if kept is None or kept.label != entry.label or kept.ids.tobytes() != entry.ids.tobytes():
        raise CacheFileError(f"expected the tokens of its entry, but {path} is of others: it was replaced.")
    # The label has told models apart already, so a config is for what cannot be made without one.
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
    """What a file is the entry of, `None` where it is not one of a store.

    Raises:
        CacheFileError: it is, and cannot be.
        CachePathError: it is gone.
    """
    if seen.weights_id is None or not seen.weights_id.startswith(LABEL_PREFIX):
        return None
    label, _, boundaries = seen.weights_id.partition(" ")
    token_ids = seen.token_ids()
    if token_ids is None or token_ids.dtype != torch.int64 or tuple(token_ids.shape) != (1, seen.length):
        raise CacheFileError(f"expected the ids of {seen.length} tokens, but {seen.path} has others: it is damaged.")
    lengths = {int(text) for text in boundaries.split(",") if text.isascii() and text.isdigit()}
    return PrefixEntry(
        label,
        token_ids[0].numpy(),
        path=seen.path,
        file_bytes=seen.nbytes,
        boundaries={length for length in lengths if length <= seen.length},
    )
