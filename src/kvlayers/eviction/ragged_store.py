"""Tokens of which each sequence and KV head holds its own number, and further tokens behind them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import checked_forms, mismatch
from kvlayers.core.buffer import StateForm
from kvlayers.core.cache_layer import forwarded
from kvlayers.core.dense_store import DenseStore, dense_in_small_steps
from kvlayers.core.description import DescriptionContext, Fact, Facts
from kvlayers.core.returned_states import ReturnedStates
from kvlayers.core.token_store import BufferSwap, KVPair, TokenStore, register_store
from kvlayers.errors import RollbackError, StateMismatchError, UnsupportedLayerError
from kvlayers.eviction.flat_tokens import FlatTokens
from kvlayers.eviction.ragged_state import RaggedColumns, check_ragged_state, flat_tokens_of, is_ragged, tail_state
from kvlayers.kernels.attention.packed_ops import packed_like
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import UNEVEN_HEADS, KVSegments
from kvlayers.kernels.codes.smoothing import KeySmoothing
from kvlayers.quantized.checks import in_one_dtype
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.quantized.smoothing_runs import SmoothingRuns

UNREAD_DIVISOR = 8
"""`trim` copies the flat part if more than this part of it is no longer read."""


@register_store
class RaggedStore(TokenStore):
    """A flat part, of which each KV head of each sequence holds its own tokens, and an ordinary store behind it.

    The flat part never changes. It begins to exist when heads keep different numbers of tokens (`evicted` makes it);
    until then the store is its tail. Forks share the flat part, and `select` and `expand` only change which pieces of
    it each sequence reads.

    Columns are right-aligned: `length` counts the columns that a mask has, which are the most tokens of any head in the
    flat part and the tokens of the tail. A head with fewer tokens has them in the last columns of the flat part.

    Args:
        tail: the store behind the flat part, a `DenseStore` or a `QuantizedStore`, without tokens; a `DenseStore` that
            grows in small steps if it is not given.
    """

    is_opaque = True

    def __init__(self, tail: TokenStore | None = None) -> None:
        self._tail = dense_in_small_steps() if tail is None else tail
        self._flat: FlatTokens | None = None
        self._columns = RaggedColumns()
        self._returned = ReturnedStates()
        self._length = self._tail.length

    @classmethod
    def of(cls, tail: TokenStore, flat: FlatTokens, sinks: int = 0, own: int = 0) -> Self:
        """A store with a flat part.

        Args:
            tail: the store behind the flat part. Its form is known.
            flat: the tokens of which each head holds its own number.
            sinks: how many of the oldest tokens of the tail are older than those in the flat part.
            own: how many of the oldest tokens of the tail may be other tokens of the text for each head. The tail is
                not truncated below them.
        """
        store = cls(tail)
        store._hold(flat, RaggedColumns(flat.width, sinks, own))
        return store

    @property
    def tail(self) -> TokenStore:
        """The tokens that every head holds, behind the flat part."""
        return self._tail

    @property
    def flat(self) -> FlatTokens | None:
        """The tokens of which each head holds its own number, `None` if there are none."""
        return self._flat

    @property
    def first_common(self) -> int:
        """Column from which on all heads hold the same tokens of the text. The store is not truncated below it."""
        return 0 if self._flat is None else self._columns.first_common(0)

    @property
    def smoothing(self) -> KeySmoothing | None:
        """How the packed keys of the flat part were smoothed: as the first run of the tail, which holds the vectors."""
        runs = self._tail.parts.runs.in_order if isinstance(self._tail, QuantizedStore) else ()
        return runs[0] if runs else None

    @property
    def sinks(self) -> int:
        """How many of the oldest tokens of the tail are older than those in the flat part."""
        return self._columns.sinks

    def _hold(self, flat: FlatTokens | None, columns: RaggedColumns) -> None:
        self._flat, self._columns, self._length = flat, columns, columns.width + self._tail.length

    def _note_tail(self) -> None:
        """Count the tokens after the tail has changed."""
        self._length = self._columns.width + self._tail.length

    @property
    @override
    def length(self) -> int:
        return self._length

    @override
    def count(self, tokens: int) -> None:
        self._length += tokens

    @property
    def holds_tokens_apart(self) -> bool:  # type: ignore[override]
        """Whether `state()` is `keys` and `values` alone."""
        return self._flat is None and self._tail.holds_tokens_apart

    # What the tail answers

    sized_for = forwarded("_tail")
    fidelity = forwarded("_tail")
    bits = forwarded("_tail")
    key_form = forwarded("_tail")
    value_form = forwarded("_tail")
    packing_paths = forwarded("_tail")
    planned_bits = forwarded("_tail")
    reserve_form = forwarded("_tail")
    check_batch = forwarded("_tail")

    @property
    @override
    def exact_from(self) -> int | None:
        in_tail = self._tail.exact_from
        return in_tail if self._flat is None or in_tail is None else self._columns.first_common(in_tail)

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:
        return {**self._tail.attention_paths, **self._returned.paths.counts}

    # Taking in states

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        if self._flat is not None and torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise UnsupportedLayerError(UNEVEN_HEADS)
        # An empty tail takes any form, and any tail promotes its dtype. The flat part can do neither.
        if self._flat is not None and (not self._tail.length or self._changes_dtype(keys, values)):
            forms, held = checked_forms(keys, values), self._forms()
            if self._tail.bits is not None:
                forms = in_one_dtype(*forms)
            if forms != held:
                raise mismatch(forms, held, self.length)
        return self._tail.validate(keys, values)

    def _changes_dtype(self, keys: Tensor, values: Tensor) -> bool:
        return any(states.dtype != form.dtype for states, form in zip((keys, values), self._forms(), strict=True))

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        self._tail.append(keys, values)
        self._note_tail()

    @override
    def extend(self, keys: Tensor, values: Tensor, past: int | None = None) -> KVPair:
        past = self.length if past is None else past
        flat = self._flat if past == self.length else None
        if flat is None:
            self._check_common(past)
            attended = self._tail.extend(keys, values, past)
        else:
            attended = self._tail.extend(keys, values)
        self._note_tail()
        return attended if flat is None else self._with_flat(flat, attended)

    def _with_flat(self, flat: FlatTokens, tail: KVPair) -> KVPair:
        """Keys and values of the flat part, and of the tail, which the tail has returned."""
        keys, values = tail
        gathered = flat.gathered(self.smoothing)
        if not isinstance(keys, PackedStates):
            segments = KVSegments((gathered, DenseSegment(keys.as_subclass(Tensor), values)))
            return self._returned.attended(self, segments, self._forms(), self.length, segments.tokens)
        # The tail knows when the states become stale, because the flat part never changes.
        snapshot = keys.snapshot
        segments = KVSegments((gathered, *snapshot.segments.in_order))
        whole = replace(snapshot, segments=segments, length=self.length, paths=self._returned.paths)
        return packed_like(keys, values, whole)

    def _forms(self) -> tuple[StateForm, StateForm]:
        key_form, value_form = self._tail.key_form, self._tail.value_form
        if key_form is None or value_form is None:
            raise StateMismatchError("The store is empty, so it has no states to read: update the layer first.")
        return key_form, value_form

    @override
    def extend_and_evict(self, keys: Tensor, values: Tensor, past: int, kept: int) -> KVPair:
        if self._flat is not None:
            self._refuse("evict the oldest tokens")
        attended = self._tail.extend_and_evict(keys, values, past, kept)
        self._note_tail()
        return attended

    # Reading

    @override
    def newest(self, count: int) -> KVPair:
        self._check_common(count)
        return self._tail.newest(count)

    @override
    def caller_views(self) -> KVPair:
        self._check_common(self.length)
        return self._tail.caller_views()

    def attended_states(self) -> KVPair:
        """Keys and values of all tokens, for attention alone: heads that hold different tokens cannot be read."""
        tail = self._tail.newest(self._tail.length)
        return tail if self._flat is None else self._with_flat(self._flat, tail)

    def _check_common(self, count: int) -> None:
        """Raise `UnsupportedLayerError` if heads hold different tokens among the newest `count`."""
        if self._flat is not None and count > self._tail.length - self._columns.own:
            self._refuse(f"read the newest {count} tokens as one tensor")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedLayerError(
            f"It is impossible to {what}, because heads hold different tokens since tokens were evicted per head: "
            f"read at most the newest {self._tail.length - self._columns.own} tokens, or evict with per_head=False."
        )

    # Dropping, cropping and the batch

    @override
    def drop_oldest(self, count: int) -> None:
        if self._flat is not None and count:
            self._refuse("drop the oldest tokens")
        self._tail.drop_oldest(count)
        self._note_tail()

    @override
    def truncate(self, length: int) -> None:
        if length < self.first_common:
            raise RollbackError(
                f"`length` must be at least {self.first_common}, from where on every head holds the same "
                f"tokens, got {length}: reset the cache, or keep a fork of it."
            )
        self._returned.invalidate()
        self._tail.truncate(length - self._columns.width)
        self._note_tail()

    @override
    def reserve(self, tokens: int) -> None:
        self._tail.reserve(max(tokens - self._columns.width, 0))

    @override
    def shrink(self, tokens: int) -> None:
        self._tail.shrink(max(tokens - self._columns.width, 0))

    @override
    def select(self, indices: Tensor) -> None:
        flat = None if self._flat is None else self._flat.selected(indices)
        self._tail.select(indices)
        self._flat = flat
        self._returned.invalidate()

    @override
    def expand(self, repeats: int) -> None:
        flat = None if self._flat is None else self._flat.expanded(repeats)
        self._tail.expand(repeats)
        self._flat = flat
        self._returned.invalidate()

    @override
    def clear(self) -> None:
        self._tail.clear()
        self._returned.invalidate()
        self._hold(None, RaggedColumns())

    # Sharing

    def _twin(self, tail: TokenStore, flat: FlatTokens | None) -> Self:
        twin = self.__class__(tail)
        twin._hold(flat, self._columns)
        return twin

    @override
    def fork(self) -> Self:
        return self._twin(self._tail.fork(), None if self._flat is None else self._flat.fork())

    @override
    def snapshot(self) -> Self:
        return self._twin(self._tail.snapshot(), None if self._flat is None else self._flat.snapshot())

    @override
    def share_prefix(self, other: TokenStore, tokens: int) -> None:
        if isinstance(other, RaggedStore) and self._flat is None and other._flat is None:
            self._tail.share_prefix(other._tail, tokens)

    @override
    def trim(self) -> None:
        self._tail.trim()
        if self._flat is not None and not self._flat.is_shared:
            read = self._flat.places_read()
            if (self._flat.places - read) * UNREAD_DIVISOR > self._flat.places:
                self._flat = self._flat.without_unread()

    @override
    def compact(self) -> None:
        self._tail.compact()
        if self._flat is not None and (self._flat.is_shared or self._flat.places_read() < self._flat.places):
            self._flat = self._flat.without_unread()

    @override
    def swap_buffers(self, swap: BufferSwap) -> None:
        if self._flat is not None:
            self._flat.swap_buffers(swap)
        self._tail.swap_buffers(swap)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        if self._flat is not None:
            yield from self._flat.held_tensors()
        yield from self._tail.held_tensors()

    # State

    @override
    def describe(self) -> dict[str, Fact]:
        return {**self._tail.describe(), "store": self.kind, "tail": self._tail.kind}

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        if facts["tail"] == DenseStore.__name__:
            return cls()
        return cls(context.store({**facts, "store": facts["tail"]}, context.length_hint))

    @override
    def state(self) -> dict[str, Tensor]:
        tensors = self._tail.state()
        if self._flat is None:
            return tensors
        device = tensors["keys"].device
        return {**tensors, **self._flat.state(), **self._flat.tables.state(device), **self._columns.state(device)}

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        tokens = self._tail.check_state(tail_state(tensors))
        return check_ragged_state(tensors, self._tail, tokens) if is_ragged(tensors) else tokens

    @override
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.clear()
        flat = flat_tokens_of(tensors, self._tail) if is_ragged(tensors) else None
        self._tail.load_state(tail_state(tensors))
        if flat is not None and isinstance(self._tail, QuantizedStore):
            self._tail.parts.runs = SmoothingRuns.of_state(tensors, len(self._tail.parts.blocks or ()))
            self._tail.parts.follows_packed = True
        self._hold(flat, RaggedColumns.of_state(tensors) if flat is not None else RaggedColumns())
