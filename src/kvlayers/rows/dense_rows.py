"""Rows that keep every token in full precision, side by side in one tensor."""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import as_batch_indices, check_rollback, checked_forms, mismatch
from kvlayers.core.buffer import StateForm, form_of
from kvlayers.core.cache_layer import CacheLayer, LayerTraits, forwarded
from kvlayers.core.description import Fact
from kvlayers.core.token_layer import DynamicLayer
from kvlayers.core.token_store import KVPair
from kvlayers.errors import StateMismatchError
from kvlayers.kernels.attention.row_states import AdjacentRowStates, RowColumns, RowStates
from kvlayers.rows.rows_layer import RowsLayer, check_followed, stay_in_place

GROWTH_DIVISOR = 8
"""A full tensor grows by an eighth, as that of a `DenseStore`."""

MINIMUM_GROWTH = 128
"""Fewest tokens by which it grows."""


@functools.lru_cache(maxsize=8)
def places_behind(lengths: tuple[int, ...], new: int, device: torch.device) -> tuple[Tensor, RowColumns]:
    """Where new tokens of rows are written, and what their queries see: the same for all layers of a step.

    Returns:
        Columns of `new` tokens behind each row, int64 `[batch, 1, new, 1]`, and the columns of all tokens then.
    """
    with torch.inference_mode(False):
        first = torch.tensor(lengths, device=device)[:, None]
        written = (first + torch.arange(new, device=device))[:, None, :, None]
    return written, RowColumns([length + new for length in lengths], device)


class DenseRows(RowsLayer):
    """Rows of `DynamicLayer`s in full precision. A step costs what that of an ordinary batch costs.

    A row begins in column 0 and ends where it ends: to roll it back is to lower its length. Behind the rows there may
    be memory of rows that have left, which the next ones take.

    Args:
        layers: `DynamicLayer`s in full precision, and rows of them. Of rows that come first, the memory is shared, and
            the others are written behind them; they do not change, and must not grow any more.
    """

    traits = LayerTraits(counts_rows=True, keeps_every_token=True)
    capacity: int | None = None
    fidelity = "exact"

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        super().__init__()
        first = layers[0]
        self._lengths = tuple([length or 0 for layer in layers for length in layer.row_lengths])
        held = [layer._held if isinstance(layer, DenseRows) else layer.peek() for layer in layers]
        rows = [[row for states in side for row in torch.split(states, 1)] for side in zip(*held, strict=True)]
        # The first rows may have memory behind them already.
        known, keys, values = 0, rows[0][0][:0], rows[1][0][:0]
        if isinstance(first, DenseRows):
            known, keys, values = first.batch_size, first._keys, first._values
        self._keys: Tensor = _behind(keys, known, rows[0], self._lengths)
        self._values: Tensor = _behind(values, known, rows[1], self._lengths)

    @property
    def _held(self) -> KVPair:
        return self._keys[: self.batch_size], self._values[: self.batch_size]

    @override
    def side_by_side(self, layers: Sequence[CacheLayer]) -> CacheLayer:
        return DenseRows(layers)

    @property
    @override
    def kind(self) -> str:
        return DynamicLayer().kind

    @override
    def describe(self) -> dict[str, Fact]:
        return DynamicLayer().describe()

    @property
    @override
    def row_lengths(self) -> tuple[int, ...]:
        return self._lengths

    @property
    @override
    def forms(self) -> tuple[StateForm, ...]:  # type: ignore[override]
        keys, values = self._held
        return form_of(keys), form_of(values)

    dtype = forwarded("_keys")
    device = forwarded("_keys")

    @property
    @override
    def keys(self) -> Tensor:
        """Keys held, `[batch, kv_heads, held, head_dim]`, with zeros in front of rows that hold fewer."""
        return self._states(RowColumns(self._lengths, self.device))[0].dense()

    @property
    @override
    def values(self) -> Tensor:
        """Values held, as `keys`."""
        return self._states(RowColumns(self._lengths, self.device))[1].dense()

    def _states(self, columns: RowColumns) -> tuple[RowStates, RowStates]:
        keys, values = (states.narrow(2, 0, columns.tokens) for states in self._held)
        return AdjacentRowStates(keys, columns), AdjacentRowStates(values, columns)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from (self._keys, self._values)

    # Taking in states

    @override
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.check_new(key_states, value_states)
        check_followed(key_states, value_states)
        for states, held in ((key_states, self._keys), (value_states, self._values)):
            if states.shape[1::2] != held.shape[1::2] or states.dtype != held.dtype or states.device != held.device:
                raise mismatch(checked_forms(key_states, value_states), checked_forms(*self._held), self.length)
        new = key_states.shape[2]
        written, columns = places_behind(self._lengths, new, self.device)
        self._keys, self._values = (_with_room(states, columns.tokens) for states in (self._keys, self._values))
        for held, states in zip(self._held, (key_states, value_states), strict=True):
            held.scatter_(2, written.expand(states.shape), states)
        # Last, so that an interrupted update has not happened.
        self._lengths = columns.lengths
        return self._states(columns)

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        raise StateMismatchError("`cache` must be empty to reserve memory, got rows: make a new cache.")

    # Rolling back, and the batch

    @override
    def check_truncate_rows(self, lengths: Sequence[int]) -> None:
        for held, length in zip(self._lengths, lengths, strict=True):
            check_rollback(length, held)

    @override
    def truncate_rows(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)

    @override
    def row(self, index: int) -> CacheLayer:
        row, own = DynamicLayer(), self._lengths[index]
        with torch.no_grad():
            row.update(self._keys[index : index + 1, :, :own], self._values[index : index + 1, :, :own])
        return row

    @override
    def select(self, indices: Tensor) -> None:
        chosen, held = as_batch_indices(indices, self.batch_size).tolist(), self.batch_size
        self._lengths = tuple([self._lengths[index] for index in chosen])
        if stay_in_place((self._keys, self._values), chosen, held):
            for place, own in enumerate(chosen):
                if own != place:
                    self._keys[place].copy_(self._keys[own])
                    self._values[place].copy_(self._values[own])
            return
        # The rows that go may be the longest.
        columns = min(self._keys.shape[2], capacity_for(self.length))
        kept = (states[:, :, :columns] for states in (self._keys, self._values))
        self._keys, self._values = (states.index_select(0, torch.tensor(chosen, device=self.device)) for states in kept)

    @override
    def reset(self) -> None:
        self._lengths = (0,) * self.batch_size

    @override
    def fork(self) -> Self:
        twin = self._twin()
        twin._keys, twin._values = (states.clone() for states in self._held)
        return twin

    @override
    def trim(self) -> None:
        rows, tokens = self.batch_size, self.length
        if self._keys.shape[0] > rows or self._keys.shape[2] > tokens:
            self._keys, self._values = (states[:rows, :, :tokens].clone() for states in (self._keys, self._values))


def _behind(memory: Tensor, known: int, states: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Rows in one tensor with room for more: those behind the `known` ones are written to the memory of these.

    Args:
        memory: `[rows, kv_heads, any, head_dim]`.
        known: how many of its rows hold tokens.
        states: those of all rows, `[1, kv_heads, any, head_dim]` each.
        lengths: their tokens.
    """
    whole = _with_room(memory, max(lengths), len(states))
    with torch.inference_mode(False), torch.no_grad():
        for row in range(known, len(states)):
            whole[row, :, : lengths[row]] = states[row][0, :, : lengths[row]]
            # What a row before it has left may be no numbers, which no mask takes out of a sum.
            whole[row, :, lengths[row] :] = 0
    return whole


def capacity_for(tokens: int) -> int:
    """Tokens for which rows of so many have room."""
    return tokens + max(tokens // GROWTH_DIVISOR, MINIMUM_GROWTH)


def _with_room(states: Tensor, tokens: int, rows: int = 0) -> Tensor:
    """The states, or a copy of them with room for more tokens and rows if these do not fit."""
    held, _, capacity, _ = states.shape
    if held >= rows and capacity >= tokens:
        return states
    # The first rows take no spare memory. Rows that join later are followed by others.
    more_rows = rows + (rows // GROWTH_DIVISOR if held else 0) - held if rows > held else 0
    more_tokens = capacity_for(tokens) - capacity if tokens > capacity or not held else 0
    with torch.inference_mode(False), torch.no_grad():
        return torch.nn.functional.pad(states, (0, 0, 0, more_tokens, 0, 0, 0, more_rows))
