"""Rows of a layer with recurrent states."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.cache_layer import CacheLayer, LayerTraits, forwarded, rows_of
from kvlayers.errors import InterruptedPassError
from kvlayers.recurrent.linear_layer import LinearAttentionLayer
from kvlayers.recurrent.states import FAMILIES, LinearStates
from kvlayers.rows.rows_layer import HeldRows, check_followed, keeps_in_place, unsaved


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
        self._memory: dict[tuple[str, int], Tensor | None] = dict.fromkeys(
            itertools.product(FAMILIES, range(self.number_of_states))
        )
        self._join()

    def _join(self, places: int = 0) -> None:
        """Let the rows hold views of new tensors, with so many places if these are more than the rows."""
        self._places = max(places, len(self.rows))
        for key in self._memory:
            self._hold(*key, None, 0)

    # Allocated in inference mode, a tensor could never be written to outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _hold(self, name: str, index: int, memory: Tensor | None, known: int) -> None:
        """Hold a state of all rows in one tensor, and let each row hold its part of it as a view.

        Args:
            name: family of the state.
            index: its index within the layer.
            memory: has the states of the first rows, and places behind them; `None` for new memory.
            known: how many rows these are.
        """
        filled = [vars(row._states) for row in self.rows]
        states = [own[name][index] for own in filled]
        if any(one is None for one in states):
            whole = memory = None
        else:
            if memory is None:
                memory = states[0].new_empty(self._places, *states[0].shape[1:])
            whole = memory[: len(states)]
            for place, view in enumerate(torch.split(whole, 1)):
                if place >= known:
                    view.copy_(states[place])
                filled[place][name][index] = view
        self._memory[name, index], vars(self._states)[name][index] = memory, whole
        # A row that was rolled back to nothing has zeros, as it had before its first token.
        vars(self._states)[f"has_{name}"][index] = any(own[f"has_{name}"][index] for own in filled)

    @override
    def side_by_side(self, layers: Sequence[CacheLayer]) -> CacheLayer:
        """The rows of this layer, which comes first and whose memory is shared, and those of others.

        If there are no places behind its rows, this layer takes more memory first: if another layer of the cache
        refuses the rows, it goes on.
        """
        self.check_whole()
        others = rows_of(layers[1:])
        rows = len(self.rows) + len(others)
        if rows > self._places:
            # Half as many more, as a row that joins later is followed by others.
            self._join(rows + rows // 2)
        joined = self._twin()
        joined._states, joined._memory = LinearStates(self.number_of_states), dict(self._memory)
        joined.rows = [*self.rows, *others]
        for key, memory in self._memory.items():
            joined._hold(*key, memory, len(self.rows))
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
        check_followed(conv_states)
        self.check_whole()
        full = []
        for row, columns in zip(self.rows, torch.split(conv_states, 1), strict=True):
            full.append(row.update_conv_state(columns, state_idx, conv_kernel_size))
            self._is_torn = True
        # A row without tokens has no columns before its first ones: to its convolution, they are zeros.
        widest = max(columns.shape[-1] for columns in full)
        full = [torch.nn.functional.pad(columns, (widest - columns.shape[-1], 0)) for columns in full]
        self._note_update("conv", state_idx)
        return torch.cat(full)

    @override
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0) -> Tensor:
        check_followed(recurrent_states)
        self.check_whole()
        for row, states in zip(self.rows, torch.split(recurrent_states, 1), strict=True):
            row.update_recurrent_state(states, state_idx)
            self._is_torn = True
        self._note_update("recurrent", state_idx)
        held = self._states.recurrent[state_idx]
        return recurrent_states if held is None else held

    @property
    @override
    def is_interrupted(self) -> bool:  # type: ignore[override]
        return self._is_torn or any(row.is_interrupted for row in self.rows)

    @override
    def check_whole(self) -> None:
        """Raise `InterruptedPassError` if an update has reached some rows alone: their states are one token ahead."""
        if self._is_torn:
            raise InterruptedPassError(
                "All rows must have seen the tokens of the last forward pass, but it was interrupted between two rows: "
                "reset() the cache, and pass all tokens again."
            )

    def _note_update(self, name: str, state_idx: int) -> None:
        """Hold what the rows hold: their states are filled now, and the first ones may be tensors of their own."""
        whole = vars(self._states)[name][state_idx]
        views = [vars(row._states)[name][state_idx] for row in self.rows]
        if whole is None or any(
            view.data_ptr() != part.data_ptr() for view, part in zip(views, torch.split(whole, 1), strict=True)
        ):
            self._join()
        for states in (self._states, *(row._states for row in self.rows)):
            vars(states)[f"has_{name}"][state_idx] = True
            # Models write a recurrent state in place, from its second token on.
            states.has_recurrent[state_idx] |= self._states.has_recurrent[state_idx]
        self._is_torn = False

    # Rolling back

    def truncate_rows(self, lengths: Sequence[int]) -> None:
        """Roll each row back to its length, `[batch]`, which was checked."""
        self._is_torn = self._is_torn and any(map(operator.eq, lengths, self.row_lengths))
        for row, length in zip(self.rows, lengths, strict=True):
            if length != row.length:
                row.truncate(length)
        self._join()

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
        chosen = indices.tolist()
        filled = [memory for memory in self._memory.values() if memory is not None]
        is_in_place = keeps_in_place(filled, chosen, len(self.rows))
        self._keep(chosen)
        if is_in_place:
            for key, memory in self._memory.items():
                self._hold(*key, memory, len(chosen))
        else:
            self._join()

    @override
    def trim(self) -> None:
        if self._places > len(self.rows):
            self._join()

    @override
    def reset(self) -> None:
        for row in self.rows:
            row.reset()
        self._is_torn = False
        self._join()

    @override
    def fork(self) -> Self:
        twin = type(self)([row.fork() for row in self.rows])
        twin._is_torn = self._is_torn
        return twin

    state = load_state = unsaved
