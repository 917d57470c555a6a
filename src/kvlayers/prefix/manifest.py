"""What an entry of a directory consists of: rows that other entries have written, and rows to write."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.caches.operations import CacheState
from kvlayers.errors import UnsupportedLayerError
from kvlayers.layers import LayerState, TokenLayer
from kvlayers.persistence.block_table import BlockGroup, BlockTable, Piece, RowRun, TensorForm
from kvlayers.persistence.format import canonical
from kvlayers.persistence.safetensors_header import DTYPES
from kvlayers.prefix.blocks import BLOCK_TOKENS, CODE_NAMES, DENSE_NAMES, filled_block
from kvlayers.quantizers.smoothing import NAMES as SMOOTHING_NAMES
from kvlayers.stores import DenseStore

MOST_PIECES = 4
"""Pieces of other blocks that stand for the tokens of one block. More are written as one block."""

Neighbour = tuple[BlockTable, int]
"""The blocks of an entry, and how many of the first tokens it shares."""


class NewRows(NamedTuple):
    """Rows of a group that become a block."""

    first: int
    rows: int


@dataclass(frozen=True)
class _LayerRows:
    """The tensors of a layer with rows of the same tokens.

    Attributes:
        forms: their forms, sorted by name.
        runs: the tokens of the rows.
        read: given the first row and the number of rows, the tensors by name.
    """

    forms: tuple[TensorForm, ...]
    runs: tuple[RowRun, ...]
    read: Callable[[int, int], Mapping[str, Tensor]]


class EntryStates:
    """The states of a cache, divided into rows of tokens and all else.

    Args:
        cache: the cache, to which nobody writes.

    Attributes:
        state: the state of the cache, in which tensors with rows in blocks have no rows.
        groups: groups of layers with rows, without pieces.
        in_blocks: names of the tensors with rows, for each layer.
    """

    def __init__(self, cache: Cache) -> None:
        layers = list(cache.adapted_layers())
        divided = [_divided(layer) for layer in layers]
        self.state = CacheState(cache.kind, tuple(state for state, _ in divided))
        self.in_blocks = [{form.name for rows in found for form in rows.forms} for _, found in divided]
        together: dict[tuple[object, ...], list[tuple[int, _LayerRows]]] = {}
        for index, (_, found) in enumerate(divided):
            for rows in found:
                together.setdefault((rows.forms, rows.runs), []).append((index, rows))
        self.groups: list[BlockGroup] = []
        self._sources: list[list[_LayerRows]] = []
        for members in together.values():
            rows = members[0][1]
            indices = tuple(index for index, _ in members)
            settings = _settings([layers[index] for index in indices])
            if any(form.name in CODE_NAMES for form in rows.forms):
                settings = _with_smoothing(settings, [self.state.layers[index] for index in indices])
            self.groups.append(BlockGroup(indices, rows.forms, settings, rows.runs))
            self._sources.append([rows for _, rows in members])

    def block(self, number: int, rows: NewRows) -> bytearray:
        """The content of a block with rows of a group."""
        group = self.groups[number]
        position = int(group.positions()[0][rows.first])
        return filled_block(group, [source.read(*rows) for source in self._sources[number]], position)


def _settings(layers: Sequence[Any]) -> str:
    """A text that is equal for layers whose states for the same tokens can stand for one another; "" for no others.

    A lookup serves the first tokens of any entry that has them, so an entry may as well begin with the states of
    another one. It may not if states depend on more than tokens: those of layers that evict tokens depend on which
    tokens came together, and of unknown layers nobody knows.
    """
    try:
        if any(layer.is_upstream or layer.fidelity == "evicting" for layer in layers):
            return ""
        described = [[layer.kind, layer.describe()] for layer in layers]
    except UnsupportedLayerError:
        return ""
    return hashlib.sha256(canonical(described).encode()).hexdigest()[:32]


def _with_smoothing(settings: str, states: Sequence[LayerState]) -> str:
    """Settings of layers with packed tokens, whose codes mean nothing without the vectors that smoothed the keys."""
    vectors = [state.tensors[name] for state in states for name in SMOOTHING_NAMES if name in state.tensors]
    if not settings or not vectors:
        return settings
    digest = hashlib.sha256(settings.encode())
    for each in vectors:
        digest.update(each.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _divided(layer: Any) -> tuple[LayerState, list[_LayerRows]]:
    """The state of a layer without rows of tokens, and these rows."""
    if isinstance(layer, TokenLayer) and layer.keeps_every_token and isinstance(layer.store, DenseStore):
        return _of_dense(layer, layer.store)
    state = layer.state()
    found = list(_rows_of(state, layer.is_upstream))
    names = {form.name for rows in found for form in rows.forms}
    small = {name: tensor[:, :, :0] if name in names else tensor for name, tensor in state.tensors.items()}
    return LayerState(state.kind, small, state.facts), found


def _of_dense(layer: TokenLayer, store: DenseStore) -> tuple[LayerState, list[_LayerRows]]:
    """As `_divided`, without copies of rows that nobody reads."""
    length = store.length
    twin = layer.fork()
    twin.store.truncate(0)
    state = twin.state()

    def read(first: int, rows: int) -> Mapping[str, Tensor]:
        part = store.fork()
        part.truncate(first + rows)
        part.drop_oldest(first)
        return part.state()

    forms = _forms({name: state.tensors[name] for name in DENSE_NAMES if name in state.tensors})
    whole = LayerState(state.kind, state.tensors, {**state.facts, "length": length})
    return whole, [_LayerRows(forms, (RowRun(0, 1, length),), read)] if length and forms else []


def _rows_of(state: LayerState, is_upstream: bool) -> Iterator[_LayerRows]:
    """The rows of tokens in a state. Its newest tokens are in `keys` and `values`, the ones before may be packed."""
    length, tensors = state.facts.get("length"), state.tensors
    dense = {name: tensors[name] for name in DENSE_NAMES if name in tensors}
    if type(length) is not int or len({states.shape[2:3] for states in dense.values()}) != 1:
        return
    newest = next(iter(dense.values())).shape[2]
    packed = {name: tensors[name] for name in CODE_NAMES if name in tensors}
    # Other packages may count something else in this dimension, unless it has all tokens.
    if newest > length or (is_upstream and newest != length):
        return
    if newest and (forms := _forms(dense)):
        yield _LayerRows(forms, (RowRun(length - newest, 1, newest),), _reader(dense))
    ends = tensors.get("block_ends")
    if packed and ends is not None and (forms := _forms(packed)):
        held = [int(end) for end in ends[1:]]
        yield _LayerRows(forms, _runs(length - newest - sum(held), held), _reader(packed))


def _reader(tensors: Mapping[str, Tensor]) -> Callable[[int, int], Mapping[str, Tensor]]:
    return lambda first, rows: {name: states[:, :, first : first + rows] for name, states in tensors.items()}


def _forms(tensors: Mapping[str, Tensor]) -> tuple[TensorForm, ...]:
    """The forms of tensors `[batch, kv_heads, rows, width]`; none if a block cannot hold them."""
    forms = []
    for name, states in sorted(tensors.items()):
        if states.dim() != 4 or states.layout != torch.strided or states.dtype not in DTYPES.values():
            return ()
        batch, kv_heads, _, width = states.shape
        if not batch * kv_heads * width:
            return ()
        forms.append(TensorForm(name, states.dtype, batch, kv_heads, width))
    return tuple(forms)


def _runs(first: int, tokens: Sequence[int]) -> tuple[RowRun, ...]:
    runs: list[RowRun] = []
    for each in tokens:
        if runs and runs[-1].tokens == each:
            runs[-1] = runs[-1]._replace(rows=runs[-1].rows + 1)
        else:
            runs.append(RowRun(first, each, 1))
        first += each
    return tuple(runs)


def planned(group: BlockGroup, neighbours: Sequence[Neighbour], unusable: AbstractSet[str]) -> list[Piece | NewRows]:
    """Where the rows of a group are taken from, in order.

    Args:
        group: the group.
        neighbours: entries that begin with the same tokens, the best first.
        unusable: blocks that are missing or damaged.
    """
    begins, ends = group.positions()
    names: list[str] = []
    block, row = np.full(group.rows, -1), np.full(group.rows, -1)
    for table, tokens in neighbours if group.settings else ():
        for other in table.groups:
            if other.key == group.key:
                _take(other, tokens, unusable, (begins, ends), names, block, row)
    follows = (block[1:] >= 0) & (block[1:] == block[:-1]) & (row[1:] == row[:-1] + 1)
    follows |= (block[1:] < 0) & (block[:-1] < 0)
    spans = begins // BLOCK_TOKENS
    for span in np.unique(spans):
        inside = np.flatnonzero(spans == span)
        first, last = inside[0], inside[-1]
        if (last - first) - np.count_nonzero(follows[first:last]) >= MOST_PIECES:
            block[inside] = row[inside] = -1
    pieces: list[Piece | NewRows] = []
    first = 0
    for each in range(1, group.rows + 1):
        if each < group.rows and block[each] == block[each - 1]:
            is_new = block[each] < 0
            if (spans[each] == spans[each - 1]) if is_new else row[each] == row[each - 1] + 1:
                continue
        found = NewRows(first, each - first)
        pieces.append(found if block[first] < 0 else Piece(names[block[first]], int(row[first]), each - first))
        first = each
    return pieces


def _take(
    other: BlockGroup,
    tokens: int,
    unusable: AbstractSet[str],
    positions: tuple[Any, Any],
    names: list[str],
    block: Any,
    row: Any,
) -> None:
    """Record for each row that is not taken yet where another group has the same tokens, if it shares all of them."""
    begins, ends = positions
    other_begins, other_ends = other.positions()
    there = np.full(other.rows, -1)
    place = np.full(other.rows, -1)
    first = 0
    for piece in other.pieces:
        if piece.block not in unusable:
            there[first : first + piece.rows] = len(names)
            place[first : first + piece.rows] = piece.first + np.arange(piece.rows)
            names.append(piece.block)
        first += piece.rows
    nearest = np.minimum(np.searchsorted(other_begins, begins), other.rows - 1)
    same = (other_begins[nearest] == begins) & (other_ends[nearest] == ends) & (ends <= tokens)
    taken = same & (block < 0) & (there[nearest] >= 0)
    block[taken], row[taken] = there[nearest][taken], place[nearest][taken]


def with_pieces(group: BlockGroup, pieces: Sequence[Piece]) -> BlockGroup:
    """The group, with adjacent pieces of the same block joined."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.block == piece.block and last.first + last.rows == piece.first:
            joined[-1] = last._replace(rows=last.rows + piece.rows)
        else:
            joined.append(piece)
    return replace(group, pieces=tuple(joined))
