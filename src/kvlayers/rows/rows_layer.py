"""Layers of a batch of which each row has a length of its own."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from kvlayers.core.arguments import as_batch_indices, check_one_batch, checked_forms, whole_number
from kvlayers.core.buffer import StateForm
from kvlayers.core.cache_layer import CacheLayer, LayerTraits, forwarded
from kvlayers.core.token_store import Fidelity, least_faithful
from kvlayers.errors import InterruptedPassError, RollbackError, StateMismatchError, UnsupportedLayerError
from kvlayers.kernels.attention.row_states import RowStates


def _refuse_to_save(*_: object, **__: object) -> None:
    raise UnsupportedLayerError(
        "`cache` must be a batch whose sequences have one length to be saved, got rows of their own lengths: save "
        "each cache.extract(row), and merge() them after loading."
    )


unsaved: Any = _refuse_to_save
"""For the methods by which a layer is saved, of layers whose rows cannot be saved together."""


class RowsLayer(CacheLayer, CacheLayerMixin):  # type: ignore[misc]
    """A layer that counts the tokens of each row. To the model its rows are a batch that is padded on the left."""

    traits = LayerTraits(counts_rows=True)

    @property
    @abstractmethod
    def row_lengths(self) -> tuple[int, ...]:
        """Tokens that each row has seen, `[batch]`."""

    @abstractmethod
    def check_truncate_rows(self, lengths: Sequence[int]) -> None:
        """Raise `RollbackError` if a row cannot be put back to its length, `[batch]`, exactly."""

    @abstractmethod
    def truncate_rows(self, lengths: Sequence[int]) -> None:
        """Roll each row back to its length, `[batch]`, which was checked."""

    # By the length of the longest row

    @property
    @override
    def length(self) -> int:
        return max(self.row_lengths)

    @property
    @override
    def batch_size(self) -> int:
        return len(self.row_lengths)

    def _shortened(self, length: int) -> list[int]:
        """The length of each row if as many tokens go as lead to a length of the longest row."""
        removed = self.length - whole_number(length, "`length`")
        lengths = [own - removed for own in self.row_lengths]
        if min(lengths) < 0:
            raise RollbackError(
                f"`length` must leave the shortest row, which has {min(self.row_lengths)} tokens, at least none, got "
                f"{length}, which removes {removed}: use crop_rows()."
            )
        return lengths

    @override
    def check_truncate(self, length: int) -> None:
        self.check_truncate_rows(self._shortened(length))

    @override
    def truncate(self, length: int) -> None:
        self.check_truncate(length)
        self.truncate_rows(self._shortened(length))

    def check_new(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise `StateMismatchError` if new states are not of all rows, or keys and values not of the same tokens."""
        are_tensors = isinstance(key_states, Tensor) and isinstance(value_states, Tensor)
        if not are_tensors or key_states.shape[::2] != value_states.shape[::2]:
            check_one_batch(*checked_forms(key_states, value_states))
        if key_states.shape[0] != self.batch_size:
            raise StateMismatchError(
                f"`key_states` must be of the {self.batch_size} rows of the cache, got {key_states.shape[0]}: pass all "
                "rows, or use keep_rows() first."
            )

    from_description: Any = classmethod(unsaved)
    state = check_state = load_state = unsaved

    def __repr__(self) -> str:
        return f"{type(self).__name__}(row_lengths={list(self.row_lengths)})"


def stay_in_place(memory: Iterable[Tensor], chosen: Sequence[int], held: int) -> bool:
    """Whether the rows at `chosen` can stay in their memory. Those from the end then take the places of others.

    They cannot if one of them would be overwritten, or half of the memory would be unused.

    Args:
        memory: tensors that begin with the rows.
        chosen: numbers of rows.
        held: how many rows there are.
    """
    rows = len(chosen)
    is_overwritten = any(own != place and own not in range(rows, held) for place, own in enumerate(chosen))
    return rows <= held and not is_overwritten and all(2 * rows > states.shape[0] for states in memory)


def check_followed(*states: Tensor) -> None:
    """Raise `UnsupportedLayerError` if autograd follows new states, which are written to the memory of all rows."""
    if torch.is_grad_enabled() and any(own.requires_grad for own in states):
        raise UnsupportedLayerError(
            "New states must not be followed by autograd for rows of their own lengths, got states with gradients: use "
            "torch.no_grad()."
        )


def of_each_row(name: str) -> Any:
    """A method of a layer of rows that calls the method of this name of each row."""

    def call(self: Any, *args: Any) -> None:
        for row in self.rows:
            getattr(row, name)(*args)

    return call


class HeldRows:
    """What a layer does in the same way for each of its rows, if it holds a layer for each.

    Attributes:
        rows: a layer for each sequence.
    """

    rows: list[Any]

    @abstractmethod
    def check_whole(self) -> None:
        """Take back, or raise `InterruptedPassError` for, an update that has reached some of the rows alone."""

    @property
    def first(self) -> Any:
        """The first row, which says what all of them have in common."""
        return self.rows[0]

    @property
    def separate_rows(self) -> Sequence[CacheLayer]:
        """The layer of each row."""
        return self.rows

    def held_tensors(self) -> Iterator[Tensor]:
        """The tensors that hold states."""
        for row in self.rows:
            yield from row.held_tensors()

    def check_truncate_rows(self, lengths: Sequence[int]) -> None:
        """Raise `RollbackError` if a row cannot be put back to its length, `[batch]`, exactly."""
        for row, length in zip(self.rows, lengths, strict=True):
            row.check_truncate(length)

    def nearest_restorable(self: Any, length: int) -> int:
        """The most tokens of the longest row, at most `length`, to which every row can be put back."""
        own = zip(self.rows, self._shortened(length), strict=True)
        return length + int(min(row.nearest_restorable(wanted) - wanted for row, wanted in own))

    @property
    def is_recording(self) -> bool:
        """Whether a row records tokens for a rollback."""
        return any(row.is_recording for row in self.rows)

    activate_past_recording = of_each_row("activate_past_recording")
    deactivate_past_recording = of_each_row("deactivate_past_recording")

    def row(self, index: int) -> Any:
        """A layer with one of the rows alone."""
        self.check_whole()
        return self.rows[index].fork()

    def select(self, indices: Tensor) -> None:
        """Hold the rows at `indices`, int64 `[new_batch]`, alone. One that is chosen twice is forked."""
        self.check_whole()
        chosen = as_batch_indices(indices, len(self.rows)).tolist()
        self.rows = [
            self.rows[index].fork() if index in chosen[:place] else self.rows[index]
            for place, index in enumerate(chosen)
        ]

    def fork(self: Any) -> Any:
        """An independent continuation of each row."""
        twin = self._twin()
        twin.rows = [row.fork() for row in self.rows]
        return twin


class SeparateRows(HeldRows, RowsLayer):
    """Rows of any kind of layer that attends, each in a layer of its own, as it would be if it were decoded alone.

    A row counts its own tokens, evicts its own tokens, and packs its own blocks.

    Args:
        rows: a layer for each sequence, all of one kind. They are handed over.
    """

    def __init__(self, rows: Sequence[CacheLayer]) -> None:
        if any(row.traits.is_upstream for row in rows):
            raise UnsupportedLayerError(
                f"`caches` must have layers of kvlayers, got a {type(rows[0].original).__name__}: make the caches by "
                "kvlayers."
            )
        self.rows = list(rows)
        self.traits = replace(rows[0].traits, counts_rows=True, can_be_stacked=False)
        self._before: tuple[int, ...] | None = None

    # What it holds

    kind = forwarded("first")
    describe = forwarded("first")
    # Rows may differ in these facts: each has a capacity of its own.
    reservation_facts = forwarded("first")
    forms = forwarded("first")
    dtype = forwarded("first")
    device = forwarded("first")
    bits = forwarded("first")
    is_sliding = forwarded("first")
    sliding_window = forwarded("first")
    memory_tier = forwarded("first")

    @property
    @override
    def row_lengths(self) -> tuple[int, ...]:
        # An update that has not reached every row has not happened.
        return self._before or tuple([row.length or 0 for row in self.rows])

    @property
    @override
    def capacity(self) -> int | None:
        """The length of the longest row at which one of the rows is full."""
        free = [row.capacity - (row.length or 0) for row in self.rows if row.capacity is not None]
        return self.length + min(free) if free else None

    @property
    @override
    def held_tokens(self) -> int:
        return max(row.held_tokens or 0 for row in self.rows)

    @property
    @override
    def keys(self) -> Tensor:
        """Keys held, `[batch, kv_heads, held, head_dim]`, with zeros in front of rows that hold fewer."""
        return RowStates([row.keys for row in self.rows]).dense()

    @property
    @override
    def values(self) -> Tensor:
        """Values held, as `keys`."""
        return RowStates([row.values for row in self.rows]).dense()

    @property
    @override
    def fidelity(self) -> Fidelity:
        return least_faithful([row.fidelity for row in self.rows])

    @property
    @override
    def exact_from(self) -> int | None:
        first = [row.exact_from for row in self.rows]
        return None if None in first else max(position for position in first if position is not None)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `crop` can put every row back as it was."""
        return all(row.is_croppable for row in self.rows)

    @property
    def attention_paths(self) -> Mapping[str, int]:  # type: ignore[override]
        """How often attention on the states of rows was computed in which way."""
        return sum((Counter(row.attention_paths) for row in self.rows), Counter())

    @property
    def packing_paths(self) -> Mapping[str, int]:  # type: ignore[override]
        """How often an accelerator packed keys, or values, on each path."""
        return sum((Counter(row.packing_paths) for row in self.rows), Counter())

    # Taking in states

    # Compiled code would be compiled anew for each set of rows.
    @override
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.check_new(key_states, value_states)
        self.check_whole()
        new = key_states.shape[2]
        # A row that is full refuses the tokens here, before any row has taken them in.
        attended = [_attended(row, new) for row in self.rows]
        self._before = self.row_lengths
        keys, values = [], []
        # If the states do not fit, the first row refuses them: all rows have one form.
        for row, tokens, own_keys, own_values in zip(
            self.rows, attended, torch.split(key_states, 1), torch.split(value_states, 1), strict=True
        ):
            row_keys, row_values = row.update(own_keys, own_values)
            keys.append(row_keys if row_keys.shape[2] == tokens else row_keys.narrow(2, 0, tokens))
            values.append(row_values if row_values.shape[2] == tokens else row_values.narrow(2, 0, tokens))
        self._before = None
        return RowStates(keys), RowStates(values)

    @override
    def check_whole(self) -> None:
        """Take back what some rows have seen of an update that was interrupted before the others.

        Raises:
            InterruptedPassError: a row cannot be put back.
        """
        before, self._before = self._before, None
        if before in (None, self.row_lengths):
            return
        try:
            self.check_truncate_rows(before)
        except RollbackError as error:
            self._before = before
            raise InterruptedPassError(
                "All rows must have seen the tokens of the last forward pass, but it was interrupted between two rows, "
                f"and not every row can be put back to {list(before)} tokens: crop_rows() the cache to fewer "
                "tokens, or reset() it, and pass the tokens from there on again."
            ) from error
        self.truncate_rows(before)

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.check_whole()
        columns = max(_attended(row, query_length) for row in self.rows)
        return columns, self.length + query_length - columns

    make_room = of_each_row("make_room")

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        for row in self.rows:
            row.reserve_form(key_form._replace(batch_size=1), value_form._replace(batch_size=1))

    # Rolling back

    @override
    def truncate_rows(self, lengths: Sequence[int]) -> None:
        for row, length in zip(self.rows, lengths, strict=True):
            # Windows forget what they have recorded, also if nothing is taken back.
            row.truncate(length)
        self._before = None

    # The batch

    @override
    def reset(self) -> None:
        for row in self.rows:
            row.reset()
        self._before = None

    trim = of_each_row("trim")
    compact = of_each_row("compact")


def _attended(row: CacheLayer, new: int) -> int:
    """Tokens that new tokens attend to."""
    columns, _ = row.mask_sizes(new)
    # Behind them, reserved memory shows free slots, which are no tokens.
    return columns if row.reserved is None else min(columns, (row.held_tokens or 0) + new)
