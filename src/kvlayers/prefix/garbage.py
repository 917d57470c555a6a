"""Deletes blocks that no entry refers to, beside running writers. `entry_writer.py` says why that is safe."""

import logging
import time
from collections.abc import Collection

from kvlayers.errors import KVLayersError
from kvlayers.persistence.saved_file import UnknownVersionError
from kvlayers.prefix.backends import GoneError, StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.backends.contract import ABANDONED_SECONDS, BLOCK_SUFFIX, SUFFIX
from kvlayers.prefix.block_references import BlockReferences, known_entry

logger = logging.getLogger(__name__)

GRACE_SECONDS = ABANDONED_SECONDS
"""How long nobody may have touched a block before it counts as left behind by a writer that was killed."""

GRACE_SECONDS_WHEN_FULL = 120.0
"""The same for the blocks of entries that are deleted to make room."""

NANOSECONDS = 10**9


class GarbageCollector:
    """Deletes blocks to which no entry refers.

    Args:
        backend: where they are.
        references: what this process refers to.
    """

    def __init__(self, backend: StorageBackend, references: BlockReferences) -> None:
        self._backend = backend
        self._references = references

    def collect(self, candidates: Collection[str] | None, grace_seconds: float) -> int:
        """Delete blocks that no entry refers to, and that nobody has touched in time.

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
        files = self._backend.files()
        entries = [file for file in files if file.name.endswith(SUFFIX)]
        blocks = {file.name.removesuffix(BLOCK_SUFFIX): file for file in files if file.name.endswith(BLOCK_SUFFIX)}
        wanted = [name for name in (blocks if candidates is None else candidates) if name in blocks]
        if not wanted or not self._learn(entries):
            return 0
        self._references.forget_gone([self._backend.path_of(file.name) for file in entries], began)
        unreferenced = self._references.unreferenced(wanted)
        name_of = {blocks[name].name: name for name in unreferenced}
        alone = self._references.used_by_this_process_alone([blocks[name] for name in unreferenced], name_of)
        others = [name for name in unreferenced if name not in set(alone)]
        if alone:
            last_use = max(blocks[name].used for name in alone)
            self._backend.delete([blocks[name].name for name in alone], last_use + 1)
        if others:
            self._backend.delete([blocks[name].name for name in others], began - int(grace_seconds * NANOSECONDS))
        self._references.forget_uses(alone)
        left = self._backend.find([blocks[name].name for name in unreferenced]) if unreferenced else []
        return sum(blocks[name].nbytes for name, file in zip(unreferenced, left, strict=True) if file is None)

    def _learn(self, entries: Collection[StoredFile]) -> bool:
        """Read entries that other processes have written. Returns whether all references are known now."""
        new = []
        for file in entries:
            known = self._references.get(self._backend.path_of(file.name))
            if known is None or known.file != file:
                new.append(file)
        for file, seen in zip(new, self._backend.inspect(new), strict=True):
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
