"""Tokens of which each sequence and KV head holds its own number, and further tokens behind them."""

from collections.abc import Callable, Iterator, Mapping
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
from kvlayers.core.token_store import BufferSwap, KVPair, TokenStore, register_store, store_from_description
from kvlayers.errors import RollbackError, StateMismatchError, UnsupportedLayerError
from kvlayers.eviction.flat_tokens import FlatTokens, check_ragged_state, is_ragged, tail_state
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
        self._returned = ReturnedStates()
        self._hold(None)

    @classmethod
    def of(cls, tail: TokenStore, flat: FlatTokens | None) -> Self:
        """A store with a flat part before a tail whose form is known."""
        store = cls(tail)
        store._hold(flat)
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
        return 0 if self._flat is None else self._flat.width + self._flat.own

    @property
    def smoothing(self) -> KeySmoothing | None:
        """How the packed keys of the flat part were smoothed: as the first run of the tail, which holds the vectors."""
        runs = self._tail.parts.runs.in_order if isinstance(self._tail, QuantizedStore) else ()
        return runs[0] if runs else None

    @property
    def sinks(self) -> int:
        """How many of the oldest tokens of the tail are older than those in the flat part."""
        return 0 if self._flat is None else self._flat.sinks

    def _hold(self, flat: FlatTokens | None) -> None:
        self._flat, self._width = flat, 0 if flat is None else flat.width
        self._note_tail()

    def _note_tail(self) -> None:
        """Count the tokens after the tail has changed."""
        self._length = self._width + self._tail.length

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
        return None if in_tail is None else max(self._width + in_tail, self.first_common)

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
        attended = self._tail.extend(keys, values, min(past, self._tail.length))
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
        if self._flat is not None and count > self.length - self.first_common:
            self._refuse(f"read the newest {count} tokens as one tensor")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedLayerError(
            f"It is impossible to {what}, because heads hold different tokens since tokens were evicted per head: "
            f"read at most the newest {self.length - self.first_common} tokens, or evict with per_head=False."
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
        self._tail.truncate(length - self._width)
        self._note_tail()

    @override
    def reserve(self, tokens: int) -> None:
        self._tail.reserve(max(tokens - self._width, 0))

    @override
    def shrink(self, tokens: int) -> None:
        self._tail.shrink(max(tokens - self._width, 0))

    @override
    def select(self, indices: Tensor) -> None:
        self._with_tables(
            lambda table: table.index_select(0, indices.to(table.device)), lambda: self._tail.select(indices)
        )

    @override
    def expand(self, repeats: int) -> None:
        self._with_tables(lambda table: table.repeat_interleave(repeats, 0), lambda: self._tail.expand(repeats))

    def _with_tables(self, change: Callable[[Tensor], Tensor], change_tail: Callable[[], None]) -> None:
        """Move the sequences of both parts. If there is no memory, nothing has changed."""
        flat = None if self._flat is None else self._flat.with_tables(change)
        change_tail()
        self._flat = flat
        self._returned.invalidate()

    @override
    def clear(self) -> None:
        self._tail.clear()
        self._returned.invalidate()
        self._hold(None)

    # Sharing

    @override
    def fork(self) -> Self:
        flat = self._flat
        return self.of(self._tail.fork(), None if flat is None else flat.with_part(flat.part.fork()))

    @override
    def snapshot(self) -> Self:
        flat = self._flat
        return self.of(self._tail.snapshot(), None if flat is None else flat.with_part(flat.part.snapshot()))

    @override
    def share_prefix(self, other: TokenStore, tokens: int) -> None:
        if isinstance(other, RaggedStore) and self._flat is None and other._flat is None:
            self._tail.share_prefix(other._tail, tokens)

    @override
    def trim(self) -> None:
        self._tail.trim()
        flat = self._flat
        if flat is None or flat.part.is_shared:
            return
        if (flat.places - flat.places_read()) * UNREAD_DIVISOR > flat.places:
            self._flat = flat.without_unread()

    @override
    def compact(self) -> None:
        self._tail.compact()
        flat = self._flat
        if flat is not None and (flat.part.is_shared or flat.places_read() < flat.places):
            self._flat = flat.without_unread()

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
        return cls(store_from_description({**facts, "store": facts["tail"]}, context))

    @override
    def state(self) -> dict[str, Tensor]:
        tensors = self._tail.state()
        if self._flat is None:
            return tensors
        return {**tensors, **self._flat.state(tensors["keys"].device)}

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        tokens = self._tail.check_state(tail_state(tensors))
        return check_ragged_state(tensors, self._tail, tokens) if is_ragged(tensors) else tokens

    @override
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.clear()
        flat = FlatTokens.of_state(tensors, self._tail) if is_ragged(tensors) else None
        self._tail.load_state(tail_state(tensors))
        if flat is not None and isinstance(self._tail, QuantizedStore):
            self._tail.parts.runs = SmoothingRuns.of_state(tensors, len(self._tail.parts.blocks or ()))
            self._tail.parts.follows_packed = True
        self._hold(flat)
