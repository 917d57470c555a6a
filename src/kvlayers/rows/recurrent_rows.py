"""Rows of a layer with recurrent states."""

import itertools
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.cache_layer import CacheLayer, LayerTraits, forwarded, rows_of
from kvlayers.errors import InterruptedPassError
from kvlayers.recurrent.linear_layer import LinearAttentionLayer
from kvlayers.recurrent.states import FAMILIES, LinearStates
from kvlayers.rows.rows_layer import HeldRows, check_followed, stay_in_place, unsaved


class RecurrentRows(HeldRows, LinearAttentionLayer):
    """Rows of a `LinearAttentionLayer`, each with its own count of tokens and its own checkpoints.

    The states of all rows are one tensor, as models read and write it, and each row holds its part of it as a view.
    Behind the rows there may be places for more.

    Args:
        rows: layers of one sequence. They are handed over.
    """

    traits = LayerTraits(attends=False, is_recurrent=True, counts_columns=True, counts_rows=True)

    def __init__(self, rows: Sequence[CacheLayer]) -> None:
        first: Any = rows[0]
        super().__init__(first.number_of_states, first.checkpoints, first.tokens_at_once, first.scans)
        self.rows: list[Any] = list(rows)
        self._is_torn = False
        self._join()

    # Allocated in inference mode, a tensor could never be written to outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _join(self, memory: Mapping[tuple[str, int], Tensor] = MappingProxyType({}), places: int = 0) -> None:
        """Hold each state of all rows in one tensor, and let each row hold its part of it as a view.

        Args:
            memory: tensors with a place for each row. A state that stands in its place is not copied. States that have
                no such tensor get a new one.
            places: how many places new tensors have, if these are more than the rows.
        """
        filled = [vars(row._states) for row in self.rows]
        held, tensors = LinearStates(self.number_of_states), dict[tuple[str, int], Tensor]()
        for name, index in itertools.product(FAMILIES, range(self.number_of_states)):
            states = [own[name][index] for own in filled]
            # A row that was rolled back to nothing has zeros, as it had before its first token.
            vars(held)[f"has_{name}"][index] = any(own[f"has_{name}"][index] for own in filled)
            if all(state is not None for state in states):
                whole = memory.get((name, index))
                if whole is None:
                    whole = states[0].new_empty(max(places, len(states)), *states[0].shape[1:])
                tensors[name, index] = whole
        # Only now, as memory may run out before.
        self._states, self._memory = held, tensors
        for (name, index), whole in tensors.items():
            rows = vars(held)[name][index] = whole[: len(filled)]
            for own, view in zip(filled, torch.split(rows, 1), strict=True):
                if view.data_ptr() != own[name][index].data_ptr():
                    view.copy_(own[name][index])
                own[name][index] = view

    @override
    def side_by_side(self, layers: Sequence[CacheLayer]) -> CacheLayer:
        """The rows of this layer, which comes first and whose memory is shared, and those of others.

        If there are no places behind its rows, this layer takes more memory first: if another layer of the cache
        refuses the rows, it goes on.
        """
        self.check_whole()
        joined = self._twin()
        joined.rows = [*self.rows, *rows_of(layers[1:])]
        rows = len(joined.rows)
        if any(memory.shape[0] < rows for memory in self._memory.values()):
            # Half as many more, as a row that joins later is followed by others.
            self._join(places=rows + rows // 2)
        joined._join(self._memory)
        return joined

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A copy of each tensor has memory of its own.
        self._join()

    kind = forwarded("first")

    @property
    @override
    def row_lengths(self) -> tuple[int | None, ...]:
        return tuple([row.length for row in self.rows])

    @property
    def length(self) -> int | None:
        """Tokens that the longest row has seen, `None` if that is not known."""
        lengths = self.row_lengths
        return None if None in lengths else max(length for length in lengths if length is not None)

    # Taking in states

    @override
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None) -> Tensor:
        full = self._update("conv", conv_states, state_idx, conv_kernel_size)
        # A row without tokens has no columns before its first ones: to its convolution, they are zeros.
        widest = max(columns.shape[-1] for columns in full)
        return torch.cat([torch.nn.functional.pad(columns, (widest - columns.shape[-1], 0)) for columns in full])

    @override
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0) -> Tensor:
        self._update("recurrent", recurrent_states, state_idx)
        held: Tensor = vars(self._states)["recurrent"][state_idx]
        return held

    def _update(self, name: str, states: Tensor, state_idx: int, *args: int | None) -> list[Tensor]:
        """Let each row take in its part of a new state, and hold what the rows hold then. Returns what they return."""
        check_followed(states)
        self.check_whole()
        updated = []
        for row, own in zip(self.rows, torch.split(states, 1), strict=True):
            updated.append(getattr(row, f"update_{name}_state")(own, state_idx, *args))
            self._is_torn = True
        whole = vars(self._states)[name][state_idx]
        views = [vars(row._states)[name][state_idx] for row in self.rows]
        # The first states are tensors of their own.
        if whole is None or any(
            view.data_ptr() != part.data_ptr() for view, part in zip(views, torch.split(whole, 1), strict=True)
        ):
            self._join()
        vars(self._states)[f"has_{name}"][state_idx] = True
        for row in self.rows:
            # Models write a recurrent state in place, from its second token on.
            row._states.has_recurrent[state_idx] = self._states.has_recurrent[state_idx]
        self._is_torn = False
        return updated

    @property
    @override
    def is_interrupted(self) -> bool:
        return self._is_torn or any(row.is_interrupted for row in self.rows)

    @override
    def check_whole(self) -> None:
        """Raise `InterruptedPassError` if an update has reached some rows alone: their states are one token ahead."""
        if self._is_torn:
            raise InterruptedPassError(
                "All rows must have seen the tokens of the last forward pass, but it was interrupted between two rows: "
                "reset() the cache, and pass all tokens again."
            )

    # Rolling back

    def truncate_rows(self, lengths: Sequence[int]) -> None:
        """Roll each row back to its length, `[batch]`, which was checked."""
        self._is_torn = self._is_torn and any(map(operator.eq, lengths, self.row_lengths))
        for row, length in zip(self.rows, lengths, strict=True):
            if length != row.length:
                row.truncate(length)
        self._join(self._memory)

    def _shortened(self, length: int) -> list[int]:
        removed = (self.length or 0) - length
        return [max((own or 0) - removed, 0) for own in self.row_lengths]

    @override
    def truncate(self, length: int) -> int:
        target = self.nearest_restorable(length)
        lengths = self._shortened(target)
        self.check_truncate_rows(lengths)
        self.truncate_rows(lengths)
        return length - target

    # The batch

    @override
    def select(self, indices: Tensor) -> None:
        self.check_whole()
        stay = stay_in_place(self._memory.values(), indices.tolist(), len(self.rows))
        super().select(indices)
        self._join(self._memory if stay else {})

    @override
    def trim(self) -> None:
        if any(memory.shape[0] > len(self.rows) for memory in self._memory.values()):
            self._join()

    @override
    def reset(self) -> None:
        for row in self.rows:
            row.reset()
        self._is_torn = False
        self._join(self._memory)

    @override
    def fork(self) -> Self:
        twin: Self = super().fork()
        twin._join()
        return twin

    state = load_state = unsaved
