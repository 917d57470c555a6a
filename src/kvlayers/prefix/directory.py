"""Entries in files: nodes that entries share, wherever they are."""

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotArrived
from dataclasses import dataclass
from typing import TypeVar

import torch

from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import LAYER_CLASSES
from kvlayers.errors import CacheFileError, KVLayersError
from kvlayers.persistence.load import StateReader, check_remakeable
from kvlayers.persistence.node_file import NodeFile
from kvlayers.persistence.tensor_file import Content, TensorFile, ranges_of
from kvlayers.prefix.backends.contract import (
    ABANDONED_SECONDS,
    ByteRange,
    GoneError,
    StorageBackend,
    StoredFile,
    UnreachableError,
)
from kvlayers.prefix.entry import PrefixEntry, restorable_length
from kvlayers.prefix.keys import Tokens
from kvlayers.prefix.nodes import Node, NodeTree, read_nodes
from kvlayers.prefix.states import MOST_PIECES, NODE_TOKENS, EntryStates, NodesFile, span_needed
from kvlayers.utils.options import checked_device

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

ATTEMPTS = 4
"""How often a writer starts again if nodes disappear while it writes."""

READERS = 2
"""Threads that read nodes and compare them with their digests, while the caller uses those before."""

ASIDE_SECONDS = 1.0
"""How long whoever looks something up waits at most for what a backend does besides reading."""

BATCH_BYTES = 32 * 2**20
"""Bytes after which the nodes that follow are another batch."""

LISTED_PARTS = 8
"""Files are listed again after so many parts of the bytes that all may take, since other stores write too."""


@dataclass(frozen=True)
class DirectoryChanges:
    """Changes to the files.

    Attributes:
        added: entries that are in files now, least recently used first.
        gone: paths of known files that no longer exist, or that nobody can use.
    """

    added: list[PrefixEntry]
    gone: set[str]


name_in = os.path.basename
"""The name of the file at a path or URL."""


class NeedsConfigError(Exception):
    """A file is in order, but its cache cannot be made without the model's config. It never leaves kvlayers."""


class Directory:
    """The files of a store. Threads may share a directory.

    Writers and those who delete need not know of each other. A writer marks the nodes before its own as used, writes
    its nodes in their order, and looks afterwards whether all of them exist; if not, it writes again. So an entry that
    was written is complete, unless a node of it goes at that very moment, or to make room. Then it is shorter.

    Args:
        backend: where the files are.

    Attributes:
        damaged_files: how many damaged files were seen.
        failed_reads: how often a file could not be reached, or not in time.
        unlisted_bytes: bytes of nodes that were written since all files were listed.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self.damaged_files = self.failed_reads = self.unlisted_bytes = 0
        self._reported: dict[str, StoredFile | None] = {}
        self._lock = threading.Lock()
        self._tree = NodeTree()
        self._unusable: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all nodes."""
        with self._lock:
            return sum(node.nbytes for node in self._tree.nodes.values())

    def chain(self, path: str) -> list[Node]:
        """The nodes of an entry, each behind its parent. No file is read."""
        with self._lock:
            return self._tree.chain(name_in(path))

    def changes(self, known: Collection[str]) -> DirectoryChanges:
        """Compare the files with the known entries. Damaged files are reported and left alone.

        Args:
            known: paths of known entries.

        Raises:
            CachePathError: the files cannot be listed now.
        """
        self._refresh()
        with self._lock:
            gone = {path for path in known if not self._tree.chain(name_in(path))}
            ends = sorted(self._tree.ends(), key=lambda node: (node.used, node.name))
            return DirectoryChanges(self._entries(ends, known), gone)

    def _entries(self, ends: Sequence[Node], known: Collection[str]) -> list[PrefixEntry]:
        """The entries that end in these nodes, except for known and damaged ones."""
        return [
            self._tree.entry(node, path)
            for node in ends
            if (path := self.backend.path_of(node.name)) not in known and not self._is_reported(path, node.file)
        ]

    def _is_reported(self, path: str, file: StoredFile | None) -> bool:
        """Whether exactly this file was reported as damaged."""
        # One look-up, as others may forget the path meanwhile. A file is never equal to a path.
        return self._reported.get(path, path) == file

    def report(self, name: str, error: Exception, deadline: float | None = None) -> None:
        """Count a file that is damaged, once, or one that could not be reached, and log it.

        Args:
            name: its name.
            error: what is wrong with it.
            deadline: when whoever looks something up must go on, as `time.monotonic()` counts; `None` for no limit.
        """
        if isinstance(error, UnreachableError):
            with self._lock:
                self.failed_reads += 1
            logger.warning("A file of a prefix store could not be read now: %s", error)
            return
        path, found = self.backend.path_of(name), self._aside(self.backend.find, [name], deadline)
        file = found[0] if found else None
        with self._lock:
            if self._is_reported(path, file):
                return
            self._reported[path] = file
            self.damaged_files += 1
        logger.warning("A file of a prefix store is skipped: %s", error)

    def _aside(
        self, call: Callable[[Sequence[str]], Answer], names: Sequence[str], deadline: float | None = None
    ) -> Answer | None:
        """What a call of the backend returns, `None` if it does not answer soon, or by a deadline."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="kvlayers-aside")
        answer = thread.submit(call, names)
        thread.shutdown(wait=False)
        with contextlib.suppress(NotArrived, UnreachableError):
            return answer.result(ASIDE_SECONDS if deadline is None else min(ASIDE_SECONDS, _seconds_to(deadline)))
        return None

    def _refresh(self) -> None:
        """Read nodes that others have written, and forget nodes that others have deleted."""
        with self._lock:
            before, self.unlisted_bytes = dict(self._tree.nodes), 0
        files = {file.name: file for file in self.backend.files()}
        new = [
            file
            for file in files.values()
            if file.name not in before and not self._is_reported(self.backend.path_of(file.name), file)
        ]
        found = []
        for file, node in read_nodes(self.backend, new):
            if isinstance(node, KVLayersError):
                self.report(file.name, node)
            elif node is not None:
                found.append(node)
        self._forget(before.keys() - files.keys())
        with self._lock:
            for node in found:
                self._tree.nodes.setdefault(node.name, node)
            for node in self._tree.nodes.values():
                node.file = files.get(node.name, node.file)

    def write(
        self,
        label: str,
        ids: Tokens,
        boundaries: Collection[int],
        cache: Cache,
        neighbours: Sequence[tuple[str, int]] = (),
    ) -> tuple[str, int]:
        """Write an entry. When this returns, it is acknowledged: a crash does not lose it.

        Tokens that neighbours have in nodes are not written again.

        Args:
            label: model and namespace, as returned by `keys.label_of`.
            ids: all tokens that `cache` has seen, int64 `[tokens]`.
            boundaries: lengths that the entry serves.
            cache: the cache, to which nobody writes.
            neighbours: entries of the same label in the directory that begin with some of the same tokens, the best
                first: the path of each, and the number of these tokens.

        Returns:
            Path of the file with its last tokens, or URL without credentials, and bytes of its nodes, which other
            entries may share.

        Raises:
            KVLayersError: the disk is full, or the cache is of a kind that cannot be loaded from a file.
        """
        check_remakeable(cache)
        with torch.no_grad():
            states = EntryStates(cache, label, ids, sorted(boundaries))
            for _ in range(ATTEMPTS):
                chain = self._written(states, neighbours)
                if chain is not None:
                    path = self.backend.path_of(chain[-1].name)
                    with self._lock:
                        # If it is damaged later, that is told again.
                        self._reported.pop(path, None)
                    return path, sum(node.nbytes for node in chain)
        raise UnreachableError(
            f"an entry in {self.backend.path_of('')} is incomplete, because its nodes were deleted {ATTEMPTS} times "
            "meanwhile: use one directory_max_bytes for all stores of a directory."
        )

    def _written(self, states: EntryStates, neighbours: Sequence[tuple[str, int]]) -> list[Node] | None:
        """The nodes of an entry, after all of them were marked as used or written; `None` if some have disappeared."""
        chain, start = self._shared(states, neighbours)
        self.backend.touch([node.name for node in chain])
        new = list(states.nodes(chain[-1].name if chain else "", start)) if start < len(states.ids) else []
        for node, file in zip(new, self.backend.find([node.name for node in new]), strict=True):
            if file is None or file.nbytes != node.nbytes or node.name in self._unusable:
                self.backend.write(node.name, states.content(node))
            with self._lock:
                self._unusable.discard(node.name)
                self._tree.nodes[node.name] = node
                self.unlisted_bytes += node.nbytes
        chain += new
        found = self.backend.find([node.name for node in chain])
        missing = [
            node.name for node, file in zip(chain, found, strict=True) if file is None or file.nbytes != node.nbytes
        ]
        self._forget(missing)
        return None if missing else chain

    def _shared(self, states: EntryStates, neighbours: Sequence[tuple[str, int]]) -> tuple[list[Node], int]:
        """Nodes of a neighbour that an entry may go on from, and the position of the first row that they lack."""
        # What follows the last usable node of a neighbour may begin with other tokens than the end of that node.
        usable = (
            (chain, min([tokens, *(node.record.start for node in chain if node.name in self._unusable)]))
            for chain, tokens in ((self.chain(path), tokens) for path, tokens in neighbours)
        )
        most, best = max(
            ((states.shared([node for node in chain if node.record.start < end], end), chain) for chain, end in usable),
            key=lambda found: found[0],
            default=(0, list[Node]()),
        )
        boundary = most // NODE_TOKENS * NODE_TOKENS
        if sum(boundary <= node.record.start < most for node in best) >= MOST_PIECES:
            most = boundary
        return [node for node in best if node.record.start < most], most

    def load(
        self,
        path: str,
        length: int,
        config: object | None,
        device: torch.device | str | None,
        deadline: float | None = None,
    ) -> Cache | None:
        """The cache of an entry, rolled back to `length` tokens, or as near before that as it can.

        Args:
            path: path of the file with its last tokens.
            length: how many of its first tokens are needed.
            config: config of the model, for layers that need it.
            device: device of the states, `None` for the host.
            deadline: when to go on with what has arrived, as `time.monotonic()` counts; `None` for no limit.

        Returns:
            The cache, `None` if it cannot be rolled back that far. It may have fewer tokens than `length`: damaged,
            missing and late nodes are reported, and the tokens before them are used.

        Raises:
            CacheFileError: a file is damaged, before which nothing can be used.
            UnreachableError: it cannot be reached now, or not in time.
            CachePathError: it no longer exists.
            NeedsConfigError: its layers cannot be made without `config`.
        """
        chain = self.chain(path)
        if not chain:
            raise GoneError("the entry has no file any more.")
        end = chain[-1].record
        length = min(length, end.stop)
        first, stop = span_needed(end, length)
        if end.entry.cuttable:
            chain = [node for node in chain if node.record.start < stop]
        chain = [node for node in chain if node.record.stop > first or node is chain[-1]]
        needs_config = not all(kind in LAYER_CLASSES for kind in end.entry.kinds)
        if needs_config and config is None:
            raise NeedsConfigError
        read, length = self._read(path, chain, length, end.entry.cuttable, deadline)
        place = torch.device("cpu") if device is None else checked_device(device)
        # It serves others as well, who may be in no inference mode, or have another default device.
        with torch.inference_mode(False), torch.device("cpu"):
            cut = length if end.entry.cuttable else None
            try:
                saved = NodesFile(read, end.stop if cut is None else cut)
                cache = StateReader(saved, place, cut, verify=True).new(config if needs_config else None)
            except KVLayersError as error:
                # The label has identified the model already, so the file is to blame.
                raise CacheFileError(str(error)) from error
            self._aside(self.backend.touch, [node.name for node in chain[: len(read)]], deadline)
            target = restorable_length(cache, min(length, cache.length))
            if 0 < target < cache.length:
                cache.truncate(target)
            return cache if target else None

    def _read(
        self, path: str, chain: Sequence[Node], length: int, cuttable: bool, deadline: float | None
    ) -> tuple[list[NodeFile], int]:
        """The files of these nodes up to the first that cannot be used, and how many tokens they serve."""
        read: list[NodeFile] = []
        for node, found in zip(chain, self._opened(chain, deadline), strict=False):
            if not isinstance(found, KVLayersError):
                read.append(found)
                continue
            if isinstance(found, CacheFileError | GoneError):
                self._unusable.add(node.name)
            can_end = bool(read) and chain[len(read) - 1].record.whole
            served = min(length, node.record.start) if cuttable and can_end else 0
            if not served:
                raise (
                    CacheFileError(f"{path} cannot be loaded: {found}") if isinstance(found, CacheFileError) else found
                )
            if not isinstance(found, GoneError):
                self.report(node.name, found, deadline)
            return read, served
        return read, length

    def _opened(self, chain: Sequence[Node], deadline: float | None) -> Iterator[NodeFile | KVLayersError]:
        """The file of each node, or what is wrong with it, in order. Threads read the next ones and compare digests.

        Behind the first node that cannot be used, some may be left out.
        """
        threads = ThreadPoolExecutor(READERS, thread_name_prefix="kvlayers-read")
        timeout = None if deadline is None else _seconds_to(deadline)
        try:
            # All of them are held in the end, so there is no need to read only a few ahead.
            for batch in threads.map(self._read_batch, _batches(chain), timeout=timeout):
                yield from batch
        except NotArrived:
            yield UnreachableError(f"files in {self.backend.path_of('')} have not arrived in time.")
        except UnreachableError as error:
            yield error
        finally:
            # The caller does not wait for what it does not want any more.
            threads.shutdown(wait=False, cancel_futures=True)

    def _read_batch(self, batch: Sequence[Node]) -> list[NodeFile | KVLayersError]:
        # One byte more than a file should have.
        ranges = [ByteRange(node.name, 0, node.nbytes + 1) for node in batch]
        return [self._checked(*each) for each in zip(batch, ranges, self.backend.read_ranges(ranges), strict=True)]

    def _checked(
        self, node: Node, whole: ByteRange, content: Content | KVLayersError | None
    ) -> NodeFile | KVLayersError:
        """The file of a node, all bytes of which were compared with their digest, or what is wrong with it."""
        path = self.backend.path_of(node.name)
        if content is not None and not isinstance(content, KVLayersError) and len(content) != node.nbytes:
            # Some storages do not replace a file at once, and somebody may have written it anew meanwhile.
            (content,) = self.backend.read_ranges([whole])
        if content is None:
            return GoneError(f"{path} does not exist: it was deleted.")
        if isinstance(content, KVLayersError):
            return content
        if len(content) != node.nbytes:
            return CacheFileError(f"{path} is damaged: it must have {node.nbytes} bytes, and has others.")
        read = ranges_of(content)
        # Compared now, and not only when the store was opened, since other processes may write to the directory.
        if read(0, len(node.content)) != node.content:
            return CacheFileError(f"{path} was replaced: it no longer holds the tokens of its entry.")
        try:
            return NodeFile(TensorFile(path, node.header, read), node)
        except KVLayersError as error:
            return error

    def delete_all(self, paths: Collection[str]) -> None:
        """Delete entries, what they have replaced, and the nodes before them that no other entry needs.

        What cannot be reached now stays.
        """
        try:
            # Others may have written nodes behind these.
            self._refresh()
            with self._lock:
                inner = {node.record.parent for node in self._tree.nodes.values()}
                # What these entries have replaced is no end, and would be found again.
                others = {node.name for node in self._tree.ends()}
                names = self._tree.unneeded(others - inner - set(map(name_in, paths)))
            self._delete(names)
        except UnreachableError as error:
            logger.warning("A file of a prefix store was not deleted: %s", error)

    def _delete(self, names: Sequence[str], used_before: int | None = None) -> None:
        """Delete files, and forget the nodes whose files no longer exist."""
        self.backend.delete(names, used_before)
        left = self.backend.find(names) if used_before is not None else [None] * len(names)
        self._forget(name for name, file in zip(names, left, strict=True) if file is None)

    def _forget(self, names: Iterable[str]) -> None:
        """Forget nodes whose files no longer exist."""
        with self._lock:
            for name in names:
                self._tree.nodes.pop(name, None)

    def shrink(self, most: int, kept: Collection[str], used: Iterable[tuple[str, int]] = ()) -> DirectoryChanges:
        """Delete the nodes that were used longest ago, each after its children, until all take at most `most` bytes.

        Args:
            most: bytes.
            kept: paths of entries that stay.
            used: entries that were used since, the last one last: the path of each, and how many of its first tokens.

        Returns:
            Entries that are shorter now, and the paths of deleted nodes.
        """
        gone: dict[str, Node] = {}
        try:
            self.backend.touch(
                [node.name for path, tokens in used for node in self.chain(path) if node.record.start < tokens]
            )
            if self.unlisted_bytes * LISTED_PARTS > most:
                self._refresh()
            left = self.nbytes
            uses: dict[str, float] = dict(self.backend.last_uses()) if left > most else {}
            uses.update(dict.fromkeys(map(name_in, kept), math.inf))
            with self._lock:
                nodes = sorted(self._tree.nodes.values(), key=lambda node: -node.record.start)
            # Whoever uses a node uses those before it, and children begin behind the beginning of their parents.
            for node in nodes:
                parent = node.record.parent
                uses[parent] = max(uses.get(parent, 0), uses.setdefault(node.name, 0))
            for node in sorted(nodes, key=lambda node: uses[node.name]):
                if left <= most or uses[node.name] == math.inf:
                    break
                self._delete([node.name])
                left -= node.nbytes
                gone[self.backend.path_of(node.name)] = node
        except UnreachableError as error:
            logger.warning("A file of a prefix store was not deleted: %s", error)
        parents = {node.record.parent for node in gone.values()}
        with self._lock:
            shorter = [node for node in self._tree.ends() if node.name in parents] if parents else []
            return DirectoryChanges(self._entries(shorter, ()), set(gone))

    def tidy(self) -> None:
        """Delete nodes that nobody can use, or that longer entries have replaced, an hour after their last use."""
        with self._lock:
            useless = self._tree.unneeded(node.name for node in self._tree.ends())
        with contextlib.suppress(UnreachableError):
            self._delete(useless, time.time_ns() - ABANDONED_SECONDS * 10**9)


def _seconds_to(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)


def _batches(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Nodes in order, those together that are read at once."""
    ends = itertools.accumulate(node.nbytes for node in nodes)
    for _, batch in itertools.groupby(zip(nodes, ends, strict=True), lambda each: (each[1] - 1) // BATCH_BYTES):
        yield [node for node, _ in batch]
