"""The files of a prefix store: rows of a cache, and a record that says of which tokens they are.

A node of tokens that can be used without those behind them holds its rows alone. What else its cache is made of is the
same for all nodes that follow one another, so it is in the first one: a whole saved cache that has no rows.
"""

import hashlib
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlayers.errors import CachePathError
from kvlayers.persistence.checksums import DIGEST_BYTES
from kvlayers.persistence.format import FORMAT, MAX_TOKENS, NODE_VERSION, TOKEN_IDS, canonical
from kvlayers.persistence.safetensors_header import (
    DTYPE_NAMES,
    DTYPES,
    MAX_EMPTY_ELEMENTS,
    Content,
    ContentTensors,
    Header,
    ReadRange,
    TensorEntry,
    begun,
    check_regular,
    header_of,
    parse_header,
    parse_json,
    refuse,
    shown,
)
from kvlayers.persistence.saved_file import MAX_RANGE_BYTES, SavedFile

NODE = "node"
"""In the metadata: the record."""

CACHE = "cache"
"""Tensor of bytes: a saved cache that has no rows."""

DIGEST = "digest"
"""The last tensor: the SHA-256 of all bytes before it."""

Rows = npt.NDArray[np.int64]


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
class NodeRecord:
    """The place of a node among others, and the rows in it.

    Attributes:
        label: model and namespace.
        kinds: names of the classes of the layers of its cache, sorted.
        parent: name of the file with the rows before, "" if there are none.
        start: rows that begin before this position are in the parent, or in its own parents.
        stop: rows that begin here or later are not in this node.
        cuttable: whether the first tokens can be used without the others.
        whole: whether all is there that is not in rows, so that the tokens of a cache may end here.
        lengths: lengths that it serves if its tokens are the last ones of an entry that cannot be cut.
        groups: the rows of a whole node and of its parents, or the rows of this node alone.
        settings: equal for caches of the same kinds and settings. Only they share nodes.
        cache: SHA-256 of the saved cache without rows in this node, "" if there is none.
        versions: what has written it.
    """

    label: str
    kinds: tuple[str, ...]
    parent: str
    start: int
    stop: int
    cuttable: bool
    whole: bool = True
    lengths: tuple[int, ...] = ()
    groups: tuple[RowGroup, ...] = ()
    settings: str = ""
    cache: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def has_cache(self) -> bool:
        """Whether the saved cache without rows is in this node. The nodes behind it need no other one."""
        return self.whole and not (self.cuttable and self.parent)

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
        """The record as text. Equal records give equal texts."""
        groups = [
            {
                "layers": group.layers,
                "tensors": [(form.name, DTYPE_NAMES[form.dtype], *form[2:]) for form in group.tensors],
                "runs": group.runs,
            }
            for group in self.groups
        ]
        return canonical({**vars(self), "groups": groups})


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
        total = hashlib.sha256(self.header.metadata[NODE].encode("utf-8", "surrogatepass"))
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
    if set(header.metadata) != {"format", "format_version", NODE}:
        refuse(path, f"metadata of format, format_version, {NODE}", shown(sorted(header.metadata)))
    text = header.metadata[NODE].encode("utf-8", "surrogatepass")
    record = _record(path, parse_json(path, text, "the record of a node"))
    sizes = {name: math.prod(entry.shape) for name, entry in header.tensors.items()}
    tokens = sizes.get(TOKEN_IDS, 0)
    expected = record.tensors(tokens, sizes.get(CACHE, 0))
    if header.tensors != expected:
        refuse(path, "the rows that it describes", shown(sorted(header.tensors)))
    ordered = [header.ranges[name] for name in expected]
    end = ordered[0][1]
    if ordered != sorted(ordered) or end > MAX_RANGE_BYTES or tokens < record.stop - record.start:
        refuse(path, f"the ids of its {record.stop - record.start} tokens before its rows", f"{tokens} ids")
    content = read(0, end)
    if len(content) != end:
        refuse(path, f"{end} bytes of header and ids", str(len(content)))
    return NodeHead(content, header, record, np.frombuffer(content, np.int64, offset=ordered[0][0]))


class NodeFile:
    """The content of a node, all bytes of which were compared with their digest.

    Args:
        path: name of the file in errors.
        head: its beginning, which was compared with the content.
        content: its bytes.

    Attributes:
        digest: SHA-256 of all bytes before the digest.

    Raises:
        CacheFileError: bytes have changed since it was written.
    """

    def __init__(self, path: str, head: NodeHead, content: Content) -> None:
        self.path, self.head, self.record = path, head, head.record
        self._file = ContentTensors(head.header, content)
        view = memoryview(content)
        self.digest = hashlib.sha256(view[:-DIGEST_BYTES]).hexdigest()
        if self.digest != view[-DIGEST_BYTES:].hex():
            refuse(path, f"bytes with the digest {view[-DIGEST_BYTES:].hex()[:16]}...", "others", "it is damaged")

    def rows(self, group: int, tensor: str) -> Tensor:
        """The rows of one tensor of a group of layers, `[layers, batch, kv_heads, rows, width]`."""
        return self._file.get_tensor(rows_name(group, tensor))

    def cache(self) -> SavedFile:
        """The saved cache without rows.

        Raises:
            CacheFileError: it has none, or what it has is damaged.
        """
        if not self.record.has_cache:
            refuse(self.path, "what its cache is", "rows alone")
        content = self._file.get_tensor(CACHE).numpy().tobytes()
        header = parse_header(self.path, len(content), lambda start, end: content[start:end])
        return SavedFile(self.path, ContentTensors(header, content), header)


def read_node(path: str) -> NodeFile:
    """The node in a file.

    Raises:
        CacheFileError: it is damaged, or no node.
        CachePathError: it does not exist, or cannot be read.
    """
    check_regular(path)
    try:
        content = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise CachePathError(f"{path} cannot be read: {error.strerror}.") from error
    header = parse_header(path, len(content), lambda start, end: content[start:end])
    if not is_node(header):
        refuse(path, "a node of a prefix store", "another file")
    return NodeFile(path, read_head(path, header, lambda start, end: content[start:end]), content)


def new_head(record: NodeRecord, ids: Rows, cache_bytes: int) -> NodeHead:
    """The beginning of the file of a new node.

    Args:
        record: its place, and which rows it has.
        ids: its tokens.
        cache_bytes: bytes of the saved cache without rows, if it is to have that.

    Raises:
        CacheFileError: the record is larger than a file can hold.
    """
    metadata = {"format": FORMAT, "format_version": str(NODE_VERSION), NODE: record.to_json()}
    begin, header = header_of(record.tensors(len(ids), cache_bytes), metadata)
    return NodeHead(begin + ids.tobytes(), header, record, ids.copy())


def content_of(head: NodeHead, rows: Mapping[str, Sequence[Tensor]], cache: Content) -> bytearray:
    """The content of the file of a new node.

    Args:
        head: its beginning.
        rows: the tensors of each layer of a group, by the name of the tensor that they become.
        cache: the saved cache without rows, if it is to have that.
    """
    content = begun(head.content, head.header)
    file = ContentTensors(head.header, content)
    for name, of_layers in rows.items():
        for place, states in zip(file.get_tensor(name), of_layers, strict=True):
            place.copy_(states)
    view = memoryview(content)
    if head.record.has_cache:
        start, end = head.header.ranges[CACHE]
        view[start:end] = cache
    view[-DIGEST_BYTES:] = hashlib.sha256(view[:-DIGEST_BYTES]).digest()
    return content


def _record(path: str, content: Any) -> NodeRecord:
    try:
        record = _parsed(content)
    except (TypeError, ValueError, LookupError, AttributeError):
        refuse(path, "a record of a node", shown(content))
    seen: set[tuple[int, str]] = set()
    for group in record.groups:
        names = {(layer, form.name) for layer in group.layers for form in group.tensors}
        if seen & names or len(names) != len(group.layers) * len(group.tensors):
            refuse(path, "each tensor in one group of rows", "one in several")
        seen |= names
        end = 0
        for run in group.runs:
            if run.first < end or not run.rows or run.first + run.tokens * (run.rows - 1) >= record.stop:
                refuse(path, f"rows that follow one another before {record.stop}", shown(run))
            end = run.first + run.tokens * run.rows
        if any(math.prod(max(size, 1) for size in form[2:]) > MAX_EMPTY_ELEMENTS for form in group.tensors):
            refuse(path, "forms that states have", shown(group.tensors))
    return record


def _parsed(content: Any) -> NodeRecord:
    groups = []
    for group in content["groups"]:
        _check(set(group) == {"layers", "tensors", "runs"})
        forms = [TensorForm(_text(name), DTYPES[dtype], *map(_count, form)) for name, dtype, *form in group["tensors"]]
        layers = [_count(layer) for layer in group["layers"]]
        runs = [RowRun(*map(_count, run)) for run in group["runs"]]
        _check(bool(layers) and bool(forms) and all(run.tokens for run in runs))
        groups.append(RowGroup(tuple(layers), tuple(forms), tuple(runs)))
    kinds, lengths = map(_text, content["kinds"]), map(_count, content["lengths"])
    parts = {"kinds": tuple(kinds), "lengths": tuple(lengths), "groups": tuple(groups)}
    record = NodeRecord(**{**content, **parts})
    texts = [record.label, record.settings, *record.versions, *record.versions.values()]
    _check(all(isinstance(text, str) for text in texts))
    _check(re.fullmatch(r"([0-9a-f]{64}\.safetensors)?", record.parent) is not None)
    _check(re.fullmatch(r"([0-9a-f]{64})?", record.cache) is not None and bool(record.cache) == record.has_cache)
    _check(type(record.cuttable) is bool and type(record.whole) is bool)
    _check(_count(record.start) < _count(record.stop) and bool(record.parent) == (record.start > 0))
    return record


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
