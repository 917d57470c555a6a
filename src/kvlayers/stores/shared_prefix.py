"""A prefix that several sequences share, held once, followed by the tokens of each sequence."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.attention.dispatch import PathCounter
from kvlayers.attention.packed_ops import packed_pair
from kvlayers.attention.packed_tensor import Snapshot, Version, as_dense
from kvlayers.attention.segment_rows import SegmentRows, of_repeats
from kvlayers.attention.segments import DenseSegment, KVSegments
from kvlayers.attention.shared_prefix import SharedPrefixSegments
from kvlayers.errors import StateMismatchError
from kvlayers.stores.buffer import StateForm
from kvlayers.stores.contract import BufferSwap, Fidelity, KVPair, TokenStore
from kvlayers.stores.dense import DenseStore
from kvlayers.stores.description import Fact
from kvlayers.stores.validation import checked_forms, mismatch

MINIMUM_GROWTH = 16
"""Fewest tokens by which the part of each sequence grows: there are many sequences, and they are short."""


class SharedStore(TokenStore):
    """A prefix, held once for all sequences that begin with it, and a store of the tokens after it.

    Attention reads the prefix once for all these sequences. If the prefix itself must change (because a window drops
    its oldest tokens), each sequence gets a copy of it.

    Args:
        prefix: the prefixes; each is one sequence of its batch. It is not written to.
        repeats: sequences that begin with each prefix, next to each other in the batch.

    Raises:
        StateMismatchError: the prefix has no tokens.
    """

    holds_tokens_apart = True

    @property
    def is_opaque(self) -> bool:  # type: ignore[override]
        """Whether compiled code calls the layer by an operator: while the prefix is shared."""
        return self._prefix is not None

    def __init__(self, prefix: DenseStore, repeats: int) -> None:
        key_form, value_form = prefix.key_form, prefix.value_form
        if key_form is None or value_form is None or not prefix.length:
            raise StateMismatchError("The prefix must have at least one token to share: update the layer first.")
        self._prefix: DenseStore | None = prefix
        self._numbers = SegmentRows(key_form.batch_size, of_repeats(key_form.batch_size, repeats))
        self._own = DenseStore(minimum_growth=MINIMUM_GROWTH)
        self._own.reserve_form(_of_batch(key_form, repeats), _of_batch(value_form, repeats))
        self._version = Version()
        self._prefix_segments: KVSegments | None = None
        self._snapshot: Snapshot | None = None
        self.paths = PathCounter()
        self._length = prefix.length

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
        return self._length

    @override
    def count(self, tokens: int) -> None:
        self._length = self._length + tokens

    def _recount(self) -> None:
        self._length = self._shared_tokens + self._own.length

    @property
    @override
    def key_form(self) -> StateForm | None:
        return self._own.key_form

    @property
    @override
    def value_form(self) -> StateForm | None:
        return self._own.value_form

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:
        return self.paths.counts

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
        self._recount()

    @override
    def extend(
        self, keys: Tensor, values: Tensor, past: int | None = None, prefix_states: KVPair | None = None
    ) -> KVPair:
        if self._prefix is None:
            attended = self._own.extend(keys, values, past, prefix_states)
            self._recount()
            return attended
        self.append(keys, values)
        attended = self.newest(self.length if past is None else past + keys.shape[2])
        return attended if prefix_states is None else _behind(prefix_states, attended)

    @override
    def extend_and_evict(
        self, keys: Tensor, values: Tensor, past: int, kept: int, prefix_states: KVPair | None = None
    ) -> KVPair:
        self._materialize()
        attended = self._own.extend_and_evict(keys, values, past, kept, prefix_states)
        self._recount()
        return attended

    @override
    def newest_keys(self, count: int) -> Tensor:
        return self.newest(count)[0]

    @override
    def newest_values(self, count: int) -> Tensor:
        return self.newest(count)[1]

    @override
    def newest(self, count: int) -> KVPair:
        if count <= self._own.length or self._prefix is None:
            return self._own.newest(count)
        if count < self.length or torch.compiler.is_compiling():
            keys, values = (self._segments().dense(side, form.dtype) for side, form in self._sides())
            return keys[:, :, keys.shape[2] - count :], values[:, :, values.shape[2] - count :]
        # Keys and values that are read one after the other must be of one snapshot.
        if self._snapshot is None or self._snapshot.length != self.length:
            form = self._sides()[0][1]
            self._snapshot = Snapshot(
                self._segments(), form.dtype, form.device, self._version, self._version.number, self.length, self.paths
            )
        (_, key_form), (_, value_form) = self._sides()
        return packed_pair(self._snapshot, key_form.kv_heads, (key_form.head_dim, value_form.head_dim))

    @override
    def caller_views(self) -> KVPair:
        # Packed states cannot be written to, and know when they have become stale.
        return self._own.caller_views() if self._prefix is None else self.newest(self.length)

    def _sides(self) -> tuple[tuple[Any, StateForm], tuple[Any, StateForm]]:
        return ("keys", self.key_form), ("values", self.value_form)  # type: ignore[return-value]

    def _segments(self) -> SharedPrefixSegments:
        if self._prefix is None:
            raise StateMismatchError("The prefix is no longer shared: each sequence has a copy of it.")
        if self._prefix_segments is None:
            self._prefix_segments = KVSegments((DenseSegment(*self._prefix.newest(self._prefix.length)),))
        own = None
        if self._own.length:
            own = KVSegments((DenseSegment(*self._own.newest(self._own.length)),))
        return SharedPrefixSegments(self._prefix_segments, own, self._numbers)

    def _materialize(self) -> None:
        """Give each sequence a copy of its prefix."""
        if self._prefix is None:
            return
        (_, key_form), _ = self._sides()
        whole = self._prefix.selected(self._numbers.on(key_form.device)[0])
        if self._own.length:
            own = self._own.newest(self._own.length)
            whole.validate(*own)
            whole.append(*own)
        self._own = whole
        self._forget_prefix()

    def _forget_prefix(self) -> None:
        self._prefix = None
        self._invalidate_snapshots()

    def _invalidate_snapshots(self) -> None:
        """Make all states that were returned so far stale."""
        self._version.advance()
        self._prefix_segments = self._snapshot = None

    @override
    def drop_oldest(self, count: int) -> None:
        self._materialize()
        self._own.drop_oldest(count)
        self._recount()

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
        self._recount()
        self._invalidate_snapshots()

    @override
    def reserve(self, tokens: int) -> None:
        self._own.reserve(max(tokens - self._shared_tokens, 0))

    @override
    def shrink(self, tokens: int) -> None:
        self._own.shrink(max(tokens - self._shared_tokens, 0))

    @override
    def select(self, indices: Tensor) -> None:
        prefix, numbers = self._prefix, self._numbers
        if prefix is not None:
            numbers = numbers.selected(indices)
            used = sorted(set(numbers.known or range(numbers.sequences)))
            if len(used) < numbers.sequences:
                prefix = prefix.selected(torch.tensor(used))
                numbers = SegmentRows(len(used), tuple(map(used.index, numbers.known or ())))
        self._own.select(indices)
        self._prefix, self._numbers = prefix, numbers
        self._invalidate_snapshots()

    @override
    def clear(self) -> None:
        self._own.clear()
        self._forget_prefix()
        self._recount()

    @override
    def describe(self) -> dict[str, Fact]:
        # Each sequence is saved with a copy of its prefix.
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
        self._recount()

    def _twin(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__getstate__())
        twin._version, twin.paths = Version(), PathCounter()
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
    def swap_buffers(self, swap: BufferSwap) -> None:
        if self._prefix is not None:
            # Other stores may hold the prefix as well.
            self._prefix = self._prefix.snapshot()
            self._prefix.swap_buffers(swap)
        self._own.swap_buffers(swap)
        self._prefix_segments = self._snapshot = None

    def __getstate__(self) -> dict[str, Any]:
        # Segments are views; a copy of the store would contain copies of states that are in its parts already.
        return {**self.__dict__, "_prefix_segments": None, "_snapshot": None}

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from self._own.held_tensors()
        if self._prefix is not None:
            yield from self._prefix.held_tensors()
        yield from self._numbers.held_tensors()


def _of_batch(form: StateForm, repeats: int) -> StateForm:
    return form.of_batch(form.batch_size * repeats)


def _behind(prefix_states: KVPair, attended: KVPair) -> KVPair:
    keys, values = (torch.cat([own, as_dense(rest)], dim=2) for own, rest in zip(prefix_states, attended, strict=True))
    return keys, values
