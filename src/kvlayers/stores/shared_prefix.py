"""Tokens that several sequences have in common, held once, and behind them those that each has of its own."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.attention.packed_ops import handles
from kvlayers.attention.packed_tensor import Snapshot, Version, as_dense
from kvlayers.attention.path_counter import PathCounter
from kvlayers.attention.segments import DenseSegment, KVSegments
from kvlayers.attention.shared_prefix import SharedPrefixSegments
from kvlayers.errors import StateMismatchError
from kvlayers.stores.buffer import StateForm
from kvlayers.stores.contract import Fidelity, Mover, StatePair, TokenStore
from kvlayers.stores.dense import DenseStore
from kvlayers.stores.description import Fact
from kvlayers.stores.validation import checked_forms, mismatch

MINIMUM_GROWTH = 16
"""Tokens by which each sequence's own part grows at least: there are many sequences, and they are short."""


class SharedStore(TokenStore):
    """A prefix that is held once for all sequences that begin with it, and a store of what comes behind it.

    Attention reads the prefix once for all of them. Where the prefix itself must change (a window that drops its oldest
    tokens), each sequence gets a copy of it.

    Args:
        prefix: tokens of a few sequences. It is not written to.
        repeats: sequences that go on from each of them, side by side.

    Raises:
        StateMismatchError: there is no token to share.
    """

    holds_tokens_apart = True

    def __init__(self, prefix: DenseStore, repeats: int) -> None:
        key_form, value_form = prefix.key_form, prefix.value_form
        if key_form is None or value_form is None or not prefix.length:
            raise StateMismatchError("expected a prefix with tokens to share, but saw none: update the layer first.")
        self._prefix: DenseStore | None = prefix
        self._prefix_of = tuple(row for row in range(key_form[0]) for _ in range(repeats))
        self._own = DenseStore(minimum_growth=MINIMUM_GROWTH)
        self._own.reserve_form(_of_batch(key_form, repeats), _of_batch(value_form, repeats))
        self._edition = Version()
        self._prefix_history: KVSegments | None = None
        self._held: Snapshot | None = None
        self.ways = PathCounter()

    @property
    @override
    def fidelity(self) -> Fidelity:
        return "exact"

    @property
    def _shared_tokens(self) -> int:
        return 0 if self._prefix is None else self._prefix.length

    @property
    @override
    def length(self) -> int:
        return self._shared_tokens + self._own.length

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:
        return self.ways.counts

    @property
    @override
    def key_form(self) -> StateForm | None:
        return self._own.key_form

    @property
    @override
    def value_form(self) -> StateForm | None:
        return self._own.value_form

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        forms = checked_forms(keys, values)
        if self._prefix is not None and forms != (self.key_form, self.value_form):
            raise mismatch(forms, (self.key_form, self.value_form), self.length)
        return self._own.validate(keys, values)

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        self.clear()
        self._own.reserve_form(key_form, value_form)

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        self._own.append(keys, values)

    @override
    def extend(
        self, keys: Tensor, values: Tensor, past: int | None = None, front: StatePair | None = None
    ) -> StatePair:
        if self._prefix is None:
            return self._own.extend(keys, values, past, front)
        self.append(keys, values)
        attended = self.newest(self.length if past is None else past + keys.shape[2])
        return attended if front is None else _behind(front, attended)

    @override
    def extend_and_evict(
        self, keys: Tensor, values: Tensor, past: int, kept: int, front: StatePair | None = None
    ) -> StatePair:
        self._take_apart()
        return self._own.extend_and_evict(keys, values, past, kept, front)

    @override
    def newest_keys(self, count: int) -> Tensor:
        return self.newest(count)[0]

    @override
    def newest_values(self, count: int) -> Tensor:
        return self.newest(count)[1]

    @override
    def newest(self, count: int) -> StatePair:
        if count <= self._own.length or self._prefix is None:
            return self._own.newest(count)
        if count < self.length or torch.compiler.is_compiling():
            keys, values = (self._history().dense(side, form[3]) for side, form in self._sides())
            return keys[:, :, keys.shape[2] - count :], values[:, :, values.shape[2] - count :]
        # Keys and values that are asked for one after the other must be handles of one history.
        if self._held is None or self._held.length != self.length:
            form = self._sides()[0][1]
            self._held = Snapshot(
                self._history(), form[3], form[4], self._edition, self._edition.number, self.length, self.ways
            )
        (_, key_form), (_, value_form) = self._sides()
        return handles(self._held, key_form[1], (key_form[2], value_form[2]))

    @override
    def hand_out(self) -> StatePair:
        # Handles cannot be written to, and know when they have become untrue.
        return self._own.hand_out() if self._prefix is None else self.newest(self.length)

    def _sides(self) -> tuple[tuple[Any, StateForm], tuple[Any, StateForm]]:
        return ("keys", self.key_form), ("values", self.value_form)  # type: ignore[return-value]

    def _history(self) -> SharedPrefixSegments:
        if self._prefix is None:
            raise StateMismatchError("expected a prefix, but it has been taken apart.")
        if self._prefix_history is None:
            self._prefix_history = KVSegments((DenseSegment(*self._prefix.newest(self._prefix.length)),), None, ())
        own = None
        if self._own.length:
            own = KVSegments((DenseSegment(*self._own.newest(self._own.length)),), None, ())
        return SharedPrefixSegments(self._prefix_history, own, self._prefix_of)

    def _take_apart(self) -> None:
        """Give each sequence a copy of its prefix."""
        if self._prefix is None:
            return
        whole = self._prefix.selected(torch.tensor(self._prefix_of))
        if self._own.length:
            own = self._own.newest(self._own.length)
            whole.validate(*own)
            whole.append(*own)
        self._own = whole
        self._forget_prefix()

    def _forget_prefix(self) -> None:
        self._prefix = None
        self._changed()

    def _changed(self) -> None:
        """What was returned so far is no longer true."""
        self._edition.advance()
        self._prefix_history = self._held = None

    @override
    def drop_oldest(self, count: int) -> None:
        self._take_apart()
        self._own.drop_oldest(count)

    @override
    def truncate(self, length: int) -> None:
        if self._prefix is None or length >= self._shared_tokens:
            self._own.truncate(length - self._shared_tokens)
        elif length:
            prefix = self._prefix.fork()
            prefix.truncate(length)
            self._prefix = prefix
            self._own.clear()
        else:
            self.clear()
        self._changed()

    @override
    def reserve(self, tokens: int) -> None:
        self._own.reserve(max(tokens - self._shared_tokens, 0))

    @override
    def shrink(self, tokens: int) -> None:
        self._own.shrink(max(tokens - self._shared_tokens, 0))

    @override
    def select(self, indices: Tensor) -> None:
        prefix, prefix_of = self._prefix, self._prefix_of
        if prefix is not None:
            prefix_of = tuple(prefix_of[row] for row in indices.tolist())
            used = sorted(set(prefix_of))
            if len(used) < max(self._prefix_of) + 1:
                prefix = prefix.selected(torch.tensor(used))
                prefix_of = tuple(map(used.index, prefix_of))
        self._own.select(indices)
        self._prefix, self._prefix_of = prefix, prefix_of
        self._changed()

    @override
    def clear(self) -> None:
        self._own.clear()
        self._forget_prefix()

    @override
    def describe(self) -> dict[str, Fact]:
        # Each sequence is saved with a copy of what it shares.
        return self._own.describe()

    @override
    def state(self) -> dict[str, Tensor]:
        if self._prefix is None:
            return self._own.state()
        keys, values = (as_dense(states) for states in self.newest(self.length))
        return {"keys": keys, "values": values}

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        return self._own.check_state(tensors)

    @override
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.clear()
        self._own.load_state(tensors)

    def _twin(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__getstate__())
        twin._edition, twin.ways = Version(), PathCounter()
        return twin

    @override
    def fork(self) -> Self:
        twin = self._twin()
        twin._own = self._own.fork()
        return twin

    @override
    def snapshot(self) -> Self:
        twin = self._twin()
        twin._own = self._own.snapshot()
        return twin

    @override
    def swap_buffers(self, move: Mover) -> None:
        if self._prefix is not None:
            # Others may hold the prefix as well.
            self._prefix = self._prefix.snapshot()
            self._prefix.swap_buffers(move)
        self._own.swap_buffers(move)
        self._prefix_history = self._held = None

    def __getstate__(self) -> dict[str, Any]:
        # Histories are views, and would travel as copies of what is in the stores.
        return {**self.__dict__, "_prefix_history": None, "_held": None}

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from self._own.held_tensors()
        if self._prefix is not None:
            yield from self._prefix.held_tensors()


def _of_batch(form: StateForm, repeats: int) -> StateForm:
    return (form[0] * repeats, *form[1:])


def _behind(front: StatePair, attended: StatePair) -> StatePair:
    keys, values = (torch.cat([own, as_dense(rest)], dim=2) for own, rest in zip(front, attended, strict=True))
    return keys, values
