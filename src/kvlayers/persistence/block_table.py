"""Which blocks of tokens an entry of a prefix store refers to: JSON beside the description of its cache."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
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

MAX_BLOCK_BYTES = 2**34
"""A block is read as a whole. No model has states of 64 MiB for each token."""

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


class Piece(NamedTuple):
    """Consecutive rows of a block."""

    block: str
    first: int
    rows: int


@dataclass(frozen=True)
class BlockGroup:
    """Layers whose tensors have the same forms and the same tokens. A block holds rows of all of them.

    Attributes:
        layers: their indices.
        tensors: the forms, sorted by name.
        settings: equal for layers of the same kinds and settings. Only they share blocks.
        runs: the tokens of the rows.
        pieces: where the rows are, in order.
    """

    layers: tuple[int, ...]
    tensors: tuple[TensorForm, ...]
    settings: str
    runs: tuple[RowRun, ...]
    pieces: tuple[Piece, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Two groups with the same key hold the same kind of states."""
        return self.layers, self.tensors, self.settings

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

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all layers."""
        each = sum(form.batch * form.kv_heads * form.width * form.dtype.itemsize for form in self.tensors)
        return len(self.layers) * each

    def shapes(self, rows: int) -> dict[str, TensorEntry]:
        """The tensors of a block of so many rows, `[layers, batch, kv_heads, rows, width]`."""
        return {
            form.name: TensorEntry(form.dtype, (len(self.layers), form.batch, form.kv_heads, rows, form.width))
            for form in self.tensors
        }


@dataclass(frozen=True)
class BlockTable:
    """The blocks of an entry.

    Attributes:
        sizes: bytes of each block, by its name: the SHA-256 of its content, in hexadecimal.
        groups: groups of layers, and where their rows are.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    groups: tuple[BlockGroup, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(self.sizes.values())

    def tensors(self) -> Iterator[tuple[str, TensorEntry]]:
        """Names and forms of the tensors in blocks, as they would be in a file of a whole cache."""
        for group in self.groups:
            rows = group.rows
            for layer in group.layers:
                for form in group.tensors:
                    shape = (form.batch, form.kv_heads, rows, form.width)
                    yield layer_prefix(None, layer) + form.name, TensorEntry(form.dtype, shape)

    def to_json(self) -> str:
        """The table as text. Equal tables give equal texts."""
        numbers = {name: number for number, name in enumerate(self.sizes)}
        groups = [
            {
                "layers": group.layers,
                "tensors": [(form.name, DTYPE_NAMES[form.dtype], *form[2:]) for form in group.tensors],
                "settings": group.settings,
                "runs": group.runs,
                "pieces": [(numbers[piece.block], piece.first, piece.rows) for piece in group.pieces],
            }
            for group in self.groups
        ]
        return canonical({"blocks": list(self.sizes.items()), "groups": groups})


def read_table(path: str, text: str, description: Description) -> BlockTable:
    """The table in a file.

    Raises:
        CacheFileError: the text is not a table for this cache.
    """
    content = parse_json(path, text.encode("utf-8", "surrogatepass"), "the table of blocks")
    try:
        sizes, groups = _parsed(content)
    except (TypeError, ValueError, LookupError, AttributeError):
        refuse(path, "a table of blocks", shown(content))
    table = BlockTable(sizes, groups)
    if {piece.block for group in groups for piece in group.pieces} != set(sizes):
        # Their sizes count when a reservation is compared with the states.
        refuse(path, "blocks that hold some of its states", "others")
    layers = [layer for _, layer in description.layers()]
    seen: set[tuple[int, str]] = set()
    for group in groups:
        names = {(layer, form.name) for layer in group.layers for form in group.tensors}
        if description.cache.parts or seen & names or len(names) != len(group.layers) * len(group.tensors):
            refuse(path, "each tensor in one group of blocks", "one in several")
        if any(layer >= len(layers) or name not in layers[layer].tensors for layer, name in names):
            refuse(path, "blocks of the tensors that it describes", shown(sorted(names)))
        seen |= names
        _check_rows(path, table, group)
    return table


def _parsed(content: Any) -> tuple[dict[str, int], tuple[BlockGroup, ...]]:
    _check(isinstance(content, dict) and set(content) == {"blocks", "groups"})
    sizes = {str(name): _count(nbytes, MAX_BLOCK_BYTES) for name, nbytes in content["blocks"]}
    _check(len(sizes) == len(content["blocks"]) and all(re.fullmatch("[0-9a-f]{64}", name) for name in sizes))
    names = list(sizes)
    groups = []
    for group in content["groups"]:
        _check(set(group) == {"layers", "tensors", "settings", "runs", "pieces"})
        forms = [TensorForm(str(name), DTYPES[dtype], *map(_count, form)) for name, dtype, *form in group["tensors"]]
        layers = [_count(layer) for layer in group["layers"]]
        runs = [RowRun(*map(_count, run)) for run in group["runs"]]
        pieces = [Piece(names[_count(number)], _count(first), _count(rows)) for number, first, rows in group["pieces"]]
        _check(isinstance(group["settings"], str) and bool(layers) and bool(forms))
        groups.append(BlockGroup(tuple(layers), tuple(forms), group["settings"], tuple(runs), tuple(pieces)))
    return sizes, tuple(groups)


def _check(condition: bool) -> None:
    if not condition:
        raise ValueError


def _count(number: object, most: int = MAX_TOKENS) -> int:
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError
    return number


def _check_rows(path: str, table: BlockTable, group: BlockGroup) -> None:
    """Raise `CacheFileError` unless each row lies behind the one before it, and in a place of its own in a block."""
    end = 0
    for run in group.runs:
        if run.first < end or not run.tokens or not run.rows or run.first + run.tokens * run.rows > MAX_TOKENS:
            refuse(path, "rows of blocks that follow one another", shown(run))
        end = run.first + run.tokens * run.rows
    if any(math.prod(max(size, 1) for size in form[2:]) > MAX_EMPTY_ELEMENTS for form in group.tensors):
        refuse(path, "forms that states have in blocks", shown(group.tensors))
    if group.rows != sum(piece.rows for piece in group.pieces):
        refuse(path, f"blocks of {group.rows} rows", str(sum(piece.rows for piece in group.pieces)))
    ends: dict[str, int] = {}
    for piece in sorted(group.pieces):
        if piece.first < ends.get(piece.block, 0) or not piece.rows:
            refuse(path, "each row of a block once", shown(piece))
        ends[piece.block] = piece.first + piece.rows
        if ends[piece.block] * group.row_bytes > table.sizes[piece.block]:
            refuse(path, f"a block of at least {ends[piece.block]} rows", f"{table.sizes[piece.block]} bytes")
