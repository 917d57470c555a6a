"""Entries in files: one directory, a file for each."""

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterator

import torch

from ..cache import Cache
from ..errors import CacheFileError, CachePathError, KVLayersError, OptionError
from ..persistence.files import TEMPORARY_PREFIX, TEMPORARY_SUFFIX
from ..persistence.inspecting import CacheFile, inspect_cache
from ..persistence.kinds import CACHES, LAYERS
from ..persistence.loading import PREFIXED, load_cache
from ..persistence.saving import save_cache
from .entry import Entry, put_back, reach
from .keys import LABEL_PREFIX

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
OWNER_ONLY = 0o700
"""Permissions of a directory that is made here: what is in it says what somebody has asked a model."""

ABANDONED_SECONDS = 3600
"""Nobody writes a file for as long as that: what is unfinished by then was left behind by a process that was killed."""


class NeedsConfigError(Exception):
    """A file is in order, and its cache cannot be made without the config of the model. For this package alone."""


class Directory:
    """The files of a store. A file is there as a whole or not at all, and says by itself whose and of what it is.

    Its `weights_id` is the entry's label and the lengths that it stands for; its name only keeps files apart.

    Args:
        path: the directory, which is made where there is none.

    Raises:
        CachePathError: it cannot be made, read or written to.
        OptionError: no path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.path = os.fsdecode(path)
        except TypeError:
            raise OptionError(f"expected the path of a directory, but saw a {type(path).__name__}.") from None
        self.damaged = 0
        self._reported: set[str] = set()
        try:
            os.makedirs(self.path, mode=OWNER_ONLY, exist_ok=True)
            # Tried, since permissions alone do not say: a disk may be mounted read-only.
            probe = os.path.join(self.path, f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            os.unlink(probe)
            self._clear_abandoned()
        except OSError as error:
            raise CachePathError(
                f"expected a directory that can be read and written to, but saw {self.path} ({error.strerror}): choose "
                "another, or leave directory out."
            ) from error

    def _clear_abandoned(self) -> None:
        for name in os.listdir(self.path):
            if name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX):
                path = os.path.join(self.path, name)
                # Another process may be done with it at this moment.
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - os.lstat(path).st_mtime > ABANDONED_SECONDS:
                        os.unlink(path)

    def entries(self) -> Iterator[Entry]:
        """An entry for each file in order, the one used longest ago first; damaged ones are reported and left alone."""
        found = []
        for name in os.listdir(self.path):
            if name.endswith(SUFFIX):
                path = os.path.join(self.path, name)
                with contextlib.suppress(OSError):
                    found.append((os.lstat(path).st_mtime_ns, path))
        for _, path in sorted(found):
            try:
                entry = _entry_of(inspect_cache(path))
            except (CacheFileError, CachePathError) as error:
                self.report(path, error)
                continue
            if entry is not None:
                yield entry

    def report(self, path: str, error: Exception) -> None:
        """Count a damaged file, and say so in the log, once."""
        if path not in self._reported:
            self._reported.add(path)
            self.damaged += 1
            logger.warning("A file of a prefix store is skipped: %s", error)

    def write(self, entry: Entry) -> None:
        """Write the cache of an entry that is in memory.

        Raises:
            KVLayersError: the disk is full, or the cache is of a kind that a file cannot give back.
        """
        cache = entry.cache
        if cache is None:
            return
        if type(cache).__name__ not in CACHES:
            raise CacheFileError(
                f"expected a cache that can be made from a file ({', '.join(CACHES)}), but saw a "
                f"{type(cache).__name__}: it stays in memory alone."
            )
        digest = hashlib.sha256(entry.label.encode() + entry.ids.tobytes()).hexdigest()
        path = os.path.join(self.path, digest + SUFFIX)
        boundaries = ",".join(map(str, sorted(entry.boundaries)))
        token_ids = torch.from_numpy(entry.ids.copy())[None]
        save_cache(cache, path, token_ids=token_ids, weights_id=f"{entry.label} {boundaries}")
        entry.path, entry.file_bytes = path, os.path.getsize(path)
        self._reported.discard(path)

    def load(self, entry: Entry, length: int, config: object | None, device: torch.device | str | None) -> Cache | None:
        """What is in an entry's file, put back to `length` tokens or as near before as it can go; `None` for nowhere.

        Raises:
            CacheFileError: the file is damaged, or not of these tokens.
            CachePathError: it is gone.
            NeedsConfigError: its layers cannot be made without `config`.
        """
        path = str(entry.path)
        seen = inspect_cache(path)
        kept = _entry_of(seen)
        # Compared here, and not only when the store began: others may write to the directory.
        if kept is None or kept.label != entry.label or kept.ids.tobytes() != entry.ids.tobytes():
            raise CacheFileError(f"expected the tokens of its entry, but {path} is of others: it was replaced.")
        # The label has told models apart already, so a config is for what cannot be made without one.
        tells_all = set(seen.layers) <= set(LAYERS)
        if not tells_all and config is None:
            raise NeedsConfigError
        first = length if length < entry.length and set(seen.layers) <= set(PREFIXED) else None
        try:
            cache = load_cache(path, device, None if tells_all else config, first, weights_id=seen.weights_id)
        except CachePathError:
            raise
        except KVLayersError as error:
            raise CacheFileError(str(error)) from error
        # For the order in which files go.
        with contextlib.suppress(OSError):
            os.utime(path)
        target = reach(cache, min(length, cache.get_seq_length()))
        return put_back(cache, target) if 0 < target < cache.get_seq_length() else (cache if target else None)

    def used(self, entry: Entry) -> int:
        """When the file of an entry was last used, in nanoseconds; 0 where it is gone."""
        try:
            return os.lstat(str(entry.path)).st_mtime_ns
        except OSError:
            return 0

    def delete(self, entry: Entry) -> None:
        """Delete the file of an entry, where there is one."""
        if entry.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
            entry.path, entry.file_bytes = None, 0


def _entry_of(seen: CacheFile) -> Entry | None:
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
    return Entry(
        label,
        token_ids[0].numpy(),
        path=seen.path,
        file_bytes=seen.nbytes,
        boundaries={length for length in lengths if length <= seen.length},
    )
