"""Rows that keep every token in full precision, side by side in one tensor."""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import checked_forms, mismatch
from kvlayers.core.buffer import StateForm, form_of
from kvlayers.core.description import Fact
from kvlayers.core.dynamic_layer import DynamicLayer, check_rollback
from kvlayers.core.layer_operations import LayerOperations
from kvlayers.core.token_store import KVPair
from kvlayers.errors import StateMismatchError
from kvlayers.kernels.attention.row_states import AdjacentRowStates, RowColumns, RowStates
from kvlayers.rows.rows_layer import RowsLayer, check_followed

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

    A row begins in column 0 and ends where it ends: to roll it back is to lower its length.

    Args:
        layers: `DynamicLayer`s in full precision, and rows of them. Their states are copied.
    """

    keeps_every_token = True
    capacity: int | None = None
    fidelity = "exact"

    def __init__(self, layers: Sequence[LayerOperations]) -> None:
        super().__init__()
        self._lengths = tuple([length or 0 for layer in layers for length in layer.row_lengths])
        held = [layer._held if isinstance(layer, DenseRows) else layer.peek() for layer in layers]
        rows = [[row for states in side for row in torch.split(states, 1)] for side in zip(*held, strict=True)]
        self._keys: Tensor = _side_by_side(rows[0], self._lengths)
        self._values: Tensor = _side_by_side(rows[1], self._lengths)

    @property
    def _held(self) -> KVPair:
        return self._keys, self._values

    @override
    def side_by_side(self, layers: Sequence[LayerOperations]) -> LayerOperations:
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
    def forms(self) -> tuple[StateForm, ...]:
        return form_of(self._keys), form_of(self._values)

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self._keys.dtype

    @property
    @override
    def device(self) -> torch.device:
        return self._keys.device

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
        keys, values = (states.narrow(2, 0, columns.tokens) for states in (self._keys, self._values))
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
        self._check(key_states, value_states)
        new = key_states.shape[2]
        written, columns = places_behind(self._lengths, new, self.device)
        self._keys, self._values = (_with_room(states, columns.tokens) for states in (self._keys, self._values))
        for held, states in ((self._keys, key_states), (self._values, value_states)):
            held.scatter_(2, written.expand(states.shape), states)
        # Last, so that an interrupted update has not happened.
        self._lengths = columns.lengths
        return self._states(columns)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        self.check_new(keys)
        check_followed(keys, values)
        for states, held in ((keys, self._keys), (values, self._values)):
            if states.shape[1::2] != held.shape[1::2] or states.dtype != held.dtype or states.device != held.device:
                raise mismatch(checked_forms(keys, values), checked_forms(self._keys, self._values), self.length)

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
    def row(self, index: int) -> LayerOperations:
        row, own = DynamicLayer(), self._lengths[index]
        with torch.no_grad():
            row.update(self._keys[index : index + 1, :, :own], self._values[index : index + 1, :, :own])
        return row

    @override
    def select(self, indices: Tensor) -> None:
        chosen, held = indices.tolist(), self.batch_size
        rows = len(chosen)
        self._lengths = tuple([self._lengths[index] for index in chosen])
        # Usually a few rows go, and others from the end take their places: only these are moved.
        if held < 2 * rows <= 2 * held and all(own in (place, *range(rows, held)) for place, own in enumerate(chosen)):
            for states in (self._keys, self._values):
                for place, own in enumerate(chosen):
                    if own != place:
                        states[place].copy_(states[own])
            self._keys, self._values = self._keys[:rows], self._values[:rows]
            return
        # The rows that go may be the longest.
        columns = min(self._keys.shape[2], capacity_for(self.length))
        kept = (states[:, :, :columns] for states in (self._keys, self._values))
        self._keys, self._values = (states.index_select(0, indices.to(self.device)) for states in kept)

    @override
    def reset(self) -> None:
        self._lengths = (0,) * self.batch_size

    @override
    def fork(self) -> Self:
        twin = self._twin()
        twin._keys, twin._values = self._keys.clone(), self._values.clone()
        return twin

    @override
    def trim(self) -> None:
        self._keys, self._values = (
            states[:, :, : self.length].clone() if states.shape[2] > self.length else states
            for states in (self._keys, self._values)
        )


def _side_by_side(states: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """The first tokens of rows `[1, kv_heads, any, head_dim]` in one tensor, with room for more."""
    _, kv_heads, _, head_dim = states[0].shape
    capacity = capacity_for(max(lengths))
    with torch.inference_mode(False), torch.no_grad():
        whole = states[0].new_zeros((len(states), kv_heads, capacity, head_dim))
        for row, (own, length) in enumerate(zip(states, lengths, strict=True)):
            whole[row, :, :length] = own[0, :, :length]
    return whole


def capacity_for(tokens: int) -> int:
    """Tokens for which rows of so many have room."""
    return tokens + max(tokens // GROWTH_DIVISOR, MINIMUM_GROWTH)


def _with_room(states: Tensor, tokens: int) -> Tensor:
    """The states, or a copy of them with room for more tokens if these do not fit."""
    if states.shape[2] >= tokens:
        return states
    with torch.inference_mode(False), torch.no_grad():
        return torch.nn.functional.pad(states, (0, 0, 0, capacity_for(tokens) - states.shape[2]))
