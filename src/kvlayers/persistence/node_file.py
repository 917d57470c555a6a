"""The files of a prefix store: rows of a cache, and a record that says of which tokens they are.

A node of tokens that can be used without those behind them holds its rows alone. What else its cache is made of is the
same for all nodes that follow one another, so it is in the first one: a whole saved cache that has no rows.
"""

import functools
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlayers.errors import CacheFileError
from kvlayers.persistence.checksums import DIGEST_BYTES
from kvlayers.persistence.format import FORMAT, MAX_TOKENS, NODE_VERSION, TOKEN_IDS, canonical
from kvlayers.persistence.safetensors_header import (
    DTYPE_NAMES,
    DTYPES,
    MAX_EMPTY_ELEMENTS,
    Content,
    FileTensors,
    Header,
    ReadRange,
    TensorEntry,
    header_of,
    parse_header,
    parse_json,
    ranges_of,
    refuse,
    shown,
)

ENTRY, NODE = "entry", "node"
"""In the metadata: what all nodes of an entry have in common, and the record."""

CACHE = "cache"
"""Tensor of bytes: a saved cache that has no rows."""

DIGEST = "digest"
"""The last tensor: the SHA-256 of all bytes before it."""

MAX_RANGE_BYTES = 64 * 2**20
"""The largest tensor that is read to inspect a file: the ids of 8 million tokens."""

KNOWN_ENTRIES = 8
"""Facts of entries that are not parsed again. Each may have as many bytes as a header."""

Rows = npt.NDArray[np.int64]

_MALFORMED = (TypeError, ValueError, LookupError, AttributeError)


class TensorForm(NamedTuple):
    """Form of one tensor of a layer, whose dimension 2 counts tokens or packed blocks."""

    name: str
    dtype: torch.dtype
    batch: int
    kv_heads: int
    width: int


class RowRun(NamedTuple):
    """Consecutive rows: position of the first token, tokens of each row, number of rows."""

    first: int
    tokens: int
    rows: int


@dataclass(frozen=True)
class RowGroup:
    """Layers whose tensors have the same forms and the same tokens. A node holds rows of all of them.

    Attributes:
        layers: their indices.
        tensors: the forms, sorted by name.
        runs: the tokens of the rows.
    """

    layers: tuple[int, ...]
    tensors: tuple[TensorForm, ...]
    runs: tuple[RowRun, ...]

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
        layers: names of the classes of the layers of its cache, sorted.
        cuttable: whether the first tokens can be used without the others.
        settings: equal for caches of the same kinds and settings. Only they share nodes.
        versions: what has written it.
        groups: the layers and the forms of its rows.
    """

    label: str
    layers: tuple[str, ...]
    cuttable: bool
    settings: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    groups: tuple[RowGroup, ...] = ()

    def to_json(self) -> str:
        """The facts as text. Equal facts give equal texts."""
        groups = [
            (group.layers, [(form.name, DTYPE_NAMES[form.dtype], *form[2:]) for form in group.tensors])
            for group in self.groups
        ]
        return canonical({**vars(self), "groups": groups})


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
        groups: the rows of a whole node and of its parents, or the rows of this node alone.
        cache: SHA-256 of the saved cache without rows in this node, "" if the node has no such cache.
    """

    entry: EntryFacts
    parent: str
    start: int
    stop: int
    whole: bool = True
    lengths: tuple[int, ...] = ()
    groups: tuple[RowGroup, ...] = ()
    cache: str = ""

    @property
    def has_cache(self) -> bool:
        """Whether the saved cache without rows is in this node. The nodes behind it need no other one."""
        return self.whole and not (self.entry.cuttable and self.parent)

    def own(self) -> tuple[RowGroup, ...]:
        """The groups, with the rows alone that are in this node."""
        return tuple(group.between(self.start, self.stop) for group in self.groups)

    def tensors(self, tokens: int, cache_bytes: int) -> dict[str, TensorEntry]:
        """Names and forms of the tensors in the file, in their order.

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
        # Each begins where a number of its dtype can be.
        ordered = dict(sorted(rows.items(), key=lambda row: -row[1].dtype.itemsize))
        cache = {CACHE: TensorEntry(torch.uint8, (cache_bytes,))} if self.has_cache else {}
        digest = TensorEntry(torch.uint8, (DIGEST_BYTES,))
        return {TOKEN_IDS: TensorEntry(torch.int64, (1, tokens)), **ordered, **cache, DIGEST: digest}

    def to_json(self) -> str:
        """The record as text, without the facts of its entry. Equal records give equal texts."""
        own = {name: value for name, value in vars(self).items() if name not in ("entry", "groups")}
        return canonical({**own, "runs": [group.runs for group in self.groups]})


@dataclass(frozen=True)
class NodeHead:
    """The beginning of the file of a node, up to its rows.

    Attributes:
        content: its bytes. Two files that begin with the same ones are of the same node.
        header: the header.
        record: the place of the node, and which rows it has.
        ids: its tokens, from `record.start` on, int64 `[tokens]`. There may be more than it has rows for.
    """

    content: bytes
    header: Header
    record: NodeRecord
    ids: Rows

    @property
    def digest(self) -> str:
        """What identifies the node: a SHA-256 of its record and its tokens."""
        texts = f"{self.header.metadata[ENTRY]}\n{self.header.metadata[NODE]}\n"
        total = hashlib.sha256(texts.encode("utf-8", "surrogatepass"))
        total.update(self.ids.tobytes())
        return total.hexdigest()


def is_node(header: Header) -> bool:
    """Whether a file is a node."""
    return header.metadata.get("format") == FORMAT and header.metadata.get("format_version") == str(NODE_VERSION)


def read_head(path: str, header: Header, read: ReadRange) -> NodeHead:
    """The beginning of the file of a node. Nothing else is read.

    Args:
        path: name of the file in errors.
        header: its header.
        read: reads a range of its bytes.

    Raises:
        CacheFileError: it has no record of a node, or other tensors than the record says.
    """
    if set(header.metadata) != {"format", "format_version", ENTRY, NODE}:
        refuse(path, f"metadata of format, format_version, {ENTRY} and {NODE}", shown(sorted(header.metadata)))
    try:
        entry = _entry(header.metadata[ENTRY])
    except CacheFileError as error:
        raise CacheFileError(f"{path} is damaged: {error}") from error
    record = _record(path, entry, header.metadata[NODE])
    sizes = {name: math.prod(entry.shape) for name, entry in header.tensors.items()}
    tokens = sizes.get(TOKEN_IDS, 0)
    expected = record.tensors(tokens, sizes.get(CACHE, 0))
    if header.tensors != expected:
        refuse(path, "the rows that it describes", shown(sorted(header.tensors)))
    ordered = [header.ranges[name] for name in expected]
    end = ordered[0][1]
    if ordered != sorted(ordered) or end > MAX_RANGE_BYTES or tokens < record.stop - record.start:
        refuse(path, f"the ids of its {record.stop - record.start} tokens before its rows", f"{tokens} ids")
    content = bytes(read(0, end))
    if len(content) != end:
        refuse(path, f"{end} bytes of header and ids", str(len(content)))
    return NodeHead(content, header, record, np.frombuffer(content, np.int64, offset=ordered[0][0]))


class NodeFile:
    """A node, all bytes of which were compared with their digest.

    Args:
        file: its tensors.
        head: its beginning, which was compared with the file.

    Attributes:
        path: path of the file.
        record: its place, and which rows it has.
        checksum: SHA-256 of all bytes before the digest.

    Raises:
        CacheFileError: bytes have changed since it was written.
    """

    def __init__(self, file: FileTensors, head: NodeHead) -> None:
        self.path, self.head, self.record = file.path, head, head.record
        # Every tensor is in the bytes that are compared here.
        self.tensor = file.get_tensor
        end = head.header.file_bytes - DIGEST_BYTES
        self.checksum = hashlib.sha256(file.read(0, end)).hexdigest()
        expected = bytes(file.read(end, end + DIGEST_BYTES)).hex()
        if self.checksum != expected:
            refuse(file.path, f"bytes with the digest {expected[:16]}...", "others", "it is damaged")

    def cache(self) -> FileTensors:
        """The tensors of the saved cache without rows.

        Raises:
            CacheFileError: the node has no such cache, or it is damaged.
        """
        if not self.record.has_cache:
            refuse(self.path, "what its cache is", "rows alone")
        # A copy, since its numbers need not be where numbers of their dtype can be in this file.
        content = self.tensor(CACHE).numpy().tobytes()
        read = ranges_of(content)
        return FileTensors(self.path, parse_header(self.path, len(content), read), read)


def read_node(file: FileTensors) -> NodeFile:
    """The node in a file.

    Raises:
        CacheFileError: it is damaged, or no node.
    """
    return NodeFile(file, read_head(file.path, file.header, file.read))


def new_head(record: NodeRecord, ids: Rows, cache_bytes: int) -> NodeHead:
    """The beginning of the file of a new node.

    Args:
        record: its place, and which rows it has.
        ids: its tokens.
        cache_bytes: bytes of the saved cache without rows, if it is to have that.

    Raises:
        CacheFileError: the record is larger than a file can hold.
    """
    texts = {ENTRY: record.entry.to_json(), NODE: record.to_json()}
    metadata = {"format": FORMAT, "format_version": str(NODE_VERSION), **texts}
    begin, header = header_of(record.tensors(len(ids), cache_bytes), metadata)
    return NodeHead(begin + ids.tobytes(), header, record, ids.copy())


def content_of(head: NodeHead, rows: Mapping[str, Sequence[Tensor]], cache: Content) -> bytearray:
    """The content of the file of a new node.

    Args:
        head: its beginning.
        rows: the tensors of each layer of a group, by the name of the tensor that they become.
        cache: the saved cache without rows, if it is to have that.
    """
    content = bytearray(head.header.file_bytes)
    content[: len(head.content)] = head.content
    file = FileTensors("The file", head.header, ranges_of(content))
    for name, of_layers in rows.items():
        for place, states in zip(file.get_tensor(name), of_layers, strict=True):
            place.copy_(states)
    view = memoryview(content)
    if head.record.has_cache:
        start, end = head.header.ranges[CACHE]
        view[start:end] = cache
    view[-DIGEST_BYTES:] = hashlib.sha256(view[:-DIGEST_BYTES]).digest()
    return content


@functools.lru_cache(KNOWN_ENTRIES)
def _entry(text: str) -> EntryFacts:
    path = "Its record"
    content = _json(path, text)
    try:
        facts = EntryFacts(
            **{
                **content,
                "layers": tuple(map(_text, content["layers"])),
                "groups": tuple(_form(*group) for group in content["groups"]),
            }
        )
        for text in (facts.label, facts.settings, *facts.versions, *facts.versions.values()):
            _text(text)
        _check(type(facts.cuttable) is bool)
    except _MALFORMED:
        refuse(path, "facts of an entry", shown(content))
    seen: set[tuple[int, str]] = set()
    for group in facts.groups:
        names = {(layer, form.name) for layer in group.layers for form in group.tensors}
        if seen & names or len(names) != len(group.layers) * len(group.tensors):
            refuse(path, "each tensor in one group of rows", "one in several")
        seen |= names
        if any(math.prod(max(size, 1) for size in form[2:]) > MAX_EMPTY_ELEMENTS for form in group.tensors):
            refuse(path, "forms that states have", shown(group.tensors))
    return facts


def _form(layers: list[Any], tensors: list[Any]) -> RowGroup:
    forms = tuple(TensorForm(_text(name), DTYPES[dtype], *map(_count, sizes)) for name, dtype, *sizes in tensors)
    _check(bool(layers) and bool(forms))
    return RowGroup(tuple(map(_count, layers)), forms, ())


def _record(path: str, entry: EntryFacts, text: str) -> NodeRecord:
    content = _json(path, text)
    try:
        runs = [tuple(RowRun(*map(_count, run)) for run in of_group) for of_group in content.pop("runs")]
        groups = [replace(group, runs=of_group) for group, of_group in zip(entry.groups, runs, strict=True)]
        parts = {"lengths": tuple(map(_count, content["lengths"])), "groups": tuple(groups)}
        record = NodeRecord(entry, **{**content, **parts})
        _check(re.fullmatch(r"([0-9a-f]{64}\.safetensors)?", record.parent) is not None)
        _check(re.fullmatch(r"([0-9a-f]{64})?", record.cache) is not None)
        _check(type(record.whole) is bool and bool(record.cache) == record.has_cache)
        _check(_count(record.start) < _count(record.stop) and bool(record.parent) == (record.start > 0))
    except _MALFORMED:
        refuse(path, "a record of a node", shown(content))
    for of_group in runs:
        end = 0
        for run in of_group:
            last = run.first + run.tokens * (run.rows - 1)
            if run.first < end or not run.rows or not run.tokens or last >= record.stop:
                refuse(path, f"rows that follow one another before {record.stop}", shown(run))
            end = last + run.tokens
    return record


def _json(path: str, text: str) -> Any:
    return parse_json(path, text.encode("utf-8", "surrogatepass"), "the record of a node")


def _check(condition: bool) -> None:
    if not condition:
        raise ValueError


def _text(value: object) -> str:
    _check(isinstance(value, str))
    return str(value)


def _count(number: object) -> int:
    if type(number) is not int or not 0 <= number <= MAX_TOKENS:
        raise ValueError
    return number
