"""The files of a prefix store: rows of a cache, and a record that says of which tokens they are.

A node of tokens that can be used without those behind them holds its rows alone. What else its cache is made of is the
same for all nodes that follow one another, so it is in the first one: a whole saved cache that has no rows.
"""

import functools
import hashlib
import math
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvlayers.persistence.format import MOST_FILE_BYTES, Count, parsed, refuse, shown
from kvlayers.persistence.tensor_file import (
    DIGESTS,
    TOKEN_IDS,
    Header,
    ReadRange,
    TensorEntry,
    TensorFile,
    file_header,
    file_in,
)

NODE = "node"
"""In the metadata: the record of a node, as JSON."""

SUFFIX = ".safetensors"
"""Suffix of the names of all nodes."""

CACHE = "cache"
"""Tensor of bytes: a saved cache that has no rows."""

MAX_HEAD_BYTES = 64 * 2**20
"""Of header and ids, which are read to inspect a file: the ids of 8 million tokens."""

Parent = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64}\.safetensors)?\Z")]
Checksum = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST_FILE_BYTES)]

Rows = npt.NDArray[np.int64]


class TensorForm(NamedTuple):
    """Form of one tensor of a layer, whose dimension 2 counts tokens or packed blocks."""

    name: str
    dtype: torch.dtype
    batch: Count
    kv_heads: Count
    width: Count


class RowRun(NamedTuple):
    """Consecutive rows: position of the first token, tokens of each row, number of rows."""

    first: Count
    tokens: Positive
    rows: Positive


class RowGroup(NamedTuple):
    """Layers whose tensors have the same forms and the same tokens. A node holds rows of all of them.

    Attributes:
        layers: their indices.
        tensors: the forms, sorted by name.
        runs: the tokens of the rows.
    """

    layers: tuple[Count, ...]
    tensors: tuple[TensorForm, ...]
    runs: tuple[RowRun, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Two groups with the same key hold the same kind of states."""
        return self.layers, self.tensors

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(run.rows for run in self.runs)

    def positions(self) -> tuple[Rows, Rows]:
        """For each row the position of its first token and the one behind its last, int64 `[rows]`."""
        starts = [run.first + run.tokens * np.arange(run.rows, dtype=np.int64) for run in self.runs]
        tokens = [np.full(run.rows, run.tokens, np.int64) for run in self.runs]
        begin = np.concatenate([np.empty(0, np.int64), *starts])
        return begin, begin + np.concatenate([np.empty(0, np.int64), *tokens])

    def between(self, start: int, stop: int) -> "RowGroup":
        """The group with those rows alone that begin from `start` on, and before `stop`."""
        runs = []
        for run in self.runs:
            first = max(-((run.first - start) // run.tokens), 0)
            last = min(max(-((run.first - stop) // run.tokens), 0), run.rows)
            if first < last:
                runs.append(RowRun(run.first + first * run.tokens, run.tokens, last - first))
        return RowGroup(self.layers, self.tensors, tuple(runs))


def rows_name(group: int, tensor: str) -> str:
    """Name of a tensor with the rows of a group, `[layers, batch, kv_heads, rows, width]`."""
    return f"rows.{group}.{tensor}"


@dataclass(frozen=True)
class EntryFacts:
    """What all nodes of an entry have in common.

    Attributes:
        label: model and namespace.
        cuttable: whether the first tokens can be used without the others.
        settings: equal for caches of the same kinds and settings. Only they share nodes.
        kinds: the kinds of its layers, each once, sorted.
        versions: what has written it.
        groups: the layers and the forms of its rows, without the rows.
    """

    label: str
    cuttable: bool
    settings: str = ""
    kinds: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    groups: tuple[RowGroup, ...] = ()


@dataclass(frozen=True)
class NodeRecord:
    """The place of a node among others, and the rows in it.

    Attributes:
        entry: what all nodes of its entry have in common.
        parent: name of the file with the rows before, "" if there are none.
        start: rows that begin before this position are in the parent, or in its own parents.
        stop: rows that begin here or later are not in this node.
        whole: whether all is there that is not in rows, so that the tokens of a cache may end here.
        lengths: lengths that it serves if its tokens are the last ones of an entry that cannot be cut.
        runs: of each group, the rows of a whole node and of its parents, or the rows of this node alone.
        cache: checksum of the saved cache without rows in this node, "" if the node has no such cache.
    """

    entry: EntryFacts
    parent: Parent
    start: Count
    stop: Count
    whole: bool = True
    lengths: tuple[Count, ...] = ()
    runs: tuple[tuple[RowRun, ...], ...] = ()
    cache: Checksum = ""

    @functools.cached_property
    def groups(self) -> tuple[RowGroup, ...]:
        """The groups of its entry, with these rows."""
        return tuple(group._replace(runs=runs) for group, runs in zip(self.entry.groups, self.runs, strict=True))

    @property
    def has_cache(self) -> bool:
        """Whether the saved cache without rows is in this node. The nodes behind it need no other one."""
        return not self.parent if self.entry.cuttable else self.whole

    def own(self) -> tuple[RowGroup, ...]:
        """The groups, with the rows alone that are in this node."""
        return tuple(group.between(self.start, self.stop) for group in self.groups)

    def tensors(self, tokens: int, cache_bytes: int) -> dict[str, TensorEntry]:
        """Names and forms of the tensors in the file, besides digests.

        Args:
            tokens: number of ids.
            cache_bytes: bytes of the saved cache without rows.
        """
        rows = {
            rows_name(number, form.name): TensorEntry(
                form.dtype, (len(group.layers), form.batch, form.kv_heads, group.rows, form.width)
            )
            for number, group in enumerate(self.own())
            if group.rows
            for form in group.tensors
        }
        cache = {CACHE: TensorEntry(torch.uint8, (cache_bytes,))} if self.has_cache else {}
        return {TOKEN_IDS: TensorEntry(torch.int64, (1, tokens)), **rows, **cache}


@dataclass(eq=False)
class NodeHead:
    """The beginning of the file of a node, up to its rows.

    Attributes:
        header: the header.
        record: the place of the node, and which rows it has.
        ids: its tokens, from `record.start` on, int64 `[tokens]`. There may be more than it has rows for.
    """

    header: Header
    record: NodeRecord
    ids: Rows

    @functools.cached_property
    def name(self) -> str:
        """The name of its file, which identifies it: a SHA-256 of its record and its tokens."""
        content = f"{self.header.metadata[NODE]}\n".encode() + self.ids.tobytes()
        return hashlib.sha256(content).hexdigest() + SUFFIX

    @property
    def content(self) -> bytes:
        """Its bytes. Two files that begin with the same ones are of the same node."""
        return self.header.content + self.ids.tobytes()

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.record.start + len(self.ids)


def read_head(path: str, header: Header, read: ReadRange) -> NodeHead:
    """The beginning of the file of a node. Nothing else is read.

    Args:
        path: name of the file in errors.
        header: its header.
        read: reads a range of its bytes.

    Raises:
        CacheFileError: it has no record of a node, or other tensors than the record says.
    """
    record = parsed(path, "a record of a node", NodeRecord, header.metadata[NODE])
    _check_record(path, record)
    sizes = {name: math.prod(entry.shape) for name, entry in header.tensors.items()}
    tokens, wanted = sizes.get(TOKEN_IDS, 0), record.stop - record.start
    if header != file_header(record.tensors(tokens, sizes.get(CACHE, 0)), {NODE: header.metadata[NODE]}):
        refuse(path, "the rows that it describes, and nothing else", shown(sorted(header.tensors)))
    start, end = header.ranges[TOKEN_IDS]
    if end > MAX_HEAD_BYTES or tokens < wanted:
        refuse(path, f"the ids of its {wanted} tokens before its rows", f"{tokens} ids")
    ids = bytes(read(start, end))
    if len(ids) != end - start:
        refuse(path, f"{end} bytes of header and ids", str(start + len(ids)))
    return NodeHead(header, record, np.frombuffer(ids, np.int64))


class NodeFile:
    """A node, all bytes of which were compared with their digests.

    Args:
        file: its tensors.
        head: its beginning, which was compared with the file.

    Attributes:
        path: path of the file.
        head: its beginning.
        record: its place, and which rows it has.
        tensors: its tensors by name, as views of the content where that is possible: do not write to them.

    Raises:
        CacheFileError: bytes have changed since it was written.
    """

    def __init__(self, file: TensorFile, head: NodeHead) -> None:
        self.path, self.head, self.record = file.path, head, head.record
        self.tensors = {name: file.tensor(name) for name in head.header.tensors if name != DIGESTS}

    def cache(self) -> TensorFile:
        """The saved cache without rows.

        Raises:
            CacheFileError: the node has no such cache, or it is damaged.
        """
        if not self.record.has_cache:
            refuse(self.path, "what its cache is", "rows alone")
        # A copy, since its numbers need not be where numbers of their dtype can be in this file.
        return file_in(self.path, self.tensors[CACHE].numpy().tobytes())


def read_node(file: TensorFile) -> NodeFile:
    """The node in a file.

    Raises:
        CacheFileError: it is damaged, or no node.
    """
    return NodeFile(file, read_head(file.path, file.header, file.read))


def _check_record(path: str, record: NodeRecord) -> None:
    """Raise `CacheFileError` if a record contradicts itself."""
    groups, is_first = record.entry.groups, not record.start
    tensors = [(layer, form.name) for group in groups for layer in group.layers for form in group.tensors]
    if len({*tensors}) != len(tensors) or not all(
        group.layers and group.tensors and not group.runs for group in groups
    ):
        refuse(path, "each tensor in one group of rows", shown(groups))
    is_placed = record.start < record.stop and is_first != bool(record.parent)
    if not is_placed or record.has_cache != bool(record.cache) or len(record.runs) != len(groups):
        refuse(path, "the record of a node among others", shown(record))
    for runs in record.runs:
        end = 0
        for run in runs:
            last = run.first + run.tokens * (run.rows - 1)
            if run.first < end or last >= record.stop:
                refuse(path, f"rows that follow one another before {record.stop}", shown(run))
            end = last + run.tokens
