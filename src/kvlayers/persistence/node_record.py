"""Which tokens the states in a node of a prefix store are of: JSON beside the description of its cache."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvlayers.persistence.format import MAX_TOKENS, Description, canonical, layer_prefix
from kvlayers.persistence.safetensors_header import (
    DTYPES,
    MAX_EMPTY_ELEMENTS,
    TensorEntry,
    parse_json,
    refuse,
    shown,
)

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

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
        settings: equal for layers of the same kinds and settings. Only they share nodes.
        runs: the tokens of the rows.
    """

    layers: tuple[int, ...]
    tensors: tuple[TensorForm, ...]
    settings: str
    runs: tuple[RowRun, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Two groups with the same key hold the same kind of states."""
        return self.layers, self.tensors, self.settings

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
        return RowGroup(self.layers, self.tensors, self.settings, tuple(runs))

    def shapes(self, rows: int) -> dict[str, TensorEntry]:
        """The tensors of so many rows, `[layers, batch, kv_heads, rows, width]`."""
        return {
            form.name: TensorEntry(form.dtype, (len(self.layers), form.batch, form.kv_heads, rows, form.width))
            for form in self.tensors
        }


def rows_name(group: int, tensor: str) -> str:
    """Name of a tensor with the rows of a group in the file of a node."""
    return f"rows.{group}.{tensor}"


@dataclass(frozen=True)
class NodeRecord:
    """The place of a node among others, and the rows in it.

    Attributes:
        parent: name of the file with the rows before, "" if there are none.
        start: rows that begin before this position are in the parent, or in its own parents.
        stop: rows that begin here or later are not in this node.
        cuttable: whether the first tokens can be used without the others.
        whole: whether all is there that is not in rows, so that the tokens of a cache may end here.
        groups: the rows of a whole node and of its parents, or the rows of this node alone.
    """

    parent: str
    start: int
    stop: int
    cuttable: bool
    whole: bool = True
    groups: tuple[RowGroup, ...] = ()

    def own(self) -> tuple[RowGroup, ...]:
        """The groups, with the rows alone that are in this node."""
        return tuple(group.between(self.start, self.stop) for group in self.groups)

    def stored(self) -> dict[str, TensorEntry]:
        """Names and forms of the tensors with rows in the file."""
        return {
            rows_name(number, name): entry
            for number, group in enumerate(self.own())
            if (rows := sum(run.rows for run in group.runs))
            for name, entry in group.shapes(rows).items()
        }

    def tensors(self) -> Iterator[tuple[str, TensorEntry]]:
        """Names and forms of the tensors with rows, as they would be in a file of a whole cache."""
        for group in self.groups:
            rows = sum(run.rows for run in group.runs)
            for layer in group.layers:
                for form in group.tensors:
                    shape = (form.batch, form.kv_heads, rows, form.width)
                    yield layer_prefix(None, layer) + form.name, TensorEntry(form.dtype, shape)

    def to_json(self) -> str:
        """The record as text. Equal records give equal texts."""
        groups = [
            {
                "layers": group.layers,
                "tensors": [(form.name, DTYPE_NAMES[form.dtype], *form[2:]) for form in group.tensors],
                "settings": group.settings,
                "runs": group.runs,
            }
            for group in self.groups
        ]
        return canonical({**vars(self), "groups": groups})


def read_node(path: str, text: str, description: Description, stored: dict[str, TensorEntry]) -> NodeRecord:
    """The record in a file.

    Args:
        path: name of the file in errors.
        text: the record.
        description: the cache.
        stored: the tensors in the file.

    Raises:
        CacheFileError: the text is not a record of this cache and of these tensors.
    """
    content = parse_json(path, text.encode("utf-8", "surrogatepass"), "the record of a node")
    try:
        record = _parsed(content)
    except (TypeError, ValueError, LookupError, AttributeError):
        refuse(path, "a record of a node", shown(content))
    layers = [layer for _, layer in description.layers()]
    seen: set[tuple[int, str]] = set()
    for group in record.groups:
        names = {(layer, form.name) for layer in group.layers for form in group.tensors}
        if description.cache.parts or seen & names or len(names) != len(group.layers) * len(group.tensors):
            refuse(path, "each tensor in one group of rows", "one in several")
        if any(layer >= len(layers) or name not in layers[layer].tensors for layer, name in names):
            refuse(path, "rows of the tensors that it describes", shown(sorted(names)))
        seen |= names
        end = 0
        for run in group.runs:
            if run.first < end or not run.rows or run.first + run.tokens * (run.rows - 1) >= record.stop:
                refuse(path, f"rows that follow one another before {record.stop}", shown(run))
            end = run.first + run.tokens * run.rows
        if any(math.prod(max(size, 1) for size in form[2:]) > MAX_EMPTY_ELEMENTS for form in group.tensors):
            refuse(path, "forms that states have", shown(group.tensors))
    found = {name: entry for name, entry in stored.items() if name.startswith("rows.")}
    if found != record.stored():
        refuse(path, "the rows that it describes", shown(sorted(found)))
    return record


def _parsed(content: Any) -> NodeRecord:
    groups = []
    for group in content["groups"]:
        _check(set(group) == {"layers", "tensors", "settings", "runs"} and isinstance(group["settings"], str))
        forms = [TensorForm(str(name), DTYPES[dtype], *map(_count, form)) for name, dtype, *form in group["tensors"]]
        layers = [_count(layer) for layer in group["layers"]]
        runs = [RowRun(*map(_count, run)) for run in group["runs"]]
        _check(bool(layers) and bool(forms) and all(run.tokens for run in runs))
        groups.append(RowGroup(tuple(layers), tuple(forms), group["settings"], tuple(runs)))
    record = NodeRecord(**{**content, "groups": tuple(groups)})
    _check(re.fullmatch(r"([0-9a-f]{64}\.safetensors)?", record.parent) is not None)
    _check(type(record.cuttable) is bool and type(record.whole) is bool)
    _check(_count(record.start) < _count(record.stop) and bool(record.parent) == (record.start > 0))
    return record


def _check(condition: bool) -> None:
    if not condition:
        raise ValueError


def _count(number: object) -> int:
    if type(number) is not int or not 0 <= number <= MAX_TOKENS:
        raise ValueError
    return number
