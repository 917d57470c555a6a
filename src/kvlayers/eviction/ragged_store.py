"""Tokens of which each sequence and KV head holds its own number, and further tokens behind them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import checked_forms, mismatch
from kvlayers.core.cache_layer import forwarded
from kvlayers.core.returned_states import ReturnedStates
from kvlayers.core.token_store import BufferSwap, KVPair, TokenStore
from kvlayers.errors import RollbackError, UnsupportedLayerError
from kvlayers.eviction.flat_tokens import FlatTokens, check_flat_state, split_state
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


class RaggedStore(TokenStore):
    """A flat part, of which each KV head of each sequence holds its own tokens, and an ordinary store behind it.

    The flat part never changes. It begins to exist when heads keep different numbers of tokens (`evicted` makes it);
    until then the store is its tail. Forks share the flat part, and `select` and `expand` only change which pieces of
    it each sequence reads.

    No file names it, so it is not registered: a layer that evicts is described by the store that it begins with.

    Columns are right-aligned: `length` counts the columns that a mask has, which are the most tokens of any head in the
    flat part and the tokens of the tail. A head with fewer tokens has them in the last columns of the flat part.

    Args:
        tail: the tokens that every head holds, behind the flat part: a `DenseStore` or a `QuantizedStore`.
        flat: the tokens of which each head holds its own number, `None` if there are none.
    """

    is_opaque = True

    def __init__(self, tail: TokenStore, flat: FlatTokens | None = None) -> None:
        self.tail, self.flat = tail, flat
        self._returned = ReturnedStates()

    @property
    def first_common(self) -> int:
        """Column from which on all heads hold the same tokens of the text. The store is not truncated below it."""
        return 0 if self.flat is None else self.flat.width + self.flat.own

    @property
    def smoothing(self) -> KeySmoothing | None:
        """How the packed keys of the flat part were smoothed: as the first run of the tail, which holds the vectors."""
        runs = self.tail.runs.in_order if isinstance(self.tail, QuantizedStore) else ()
        return runs[0] if runs else None

    @property
    def _width(self) -> int:
        """Columns of the flat part."""
        return 0 if self.flat is None else self.flat.width

    @property
    @override
    def length(self) -> int:
        return self._width + self.tail.length

    @property
    @override
    def forms(self) -> Any:
        # They are known as soon as there is a flat part.
        return self.tail.forms

    # What the tail answers

    fidelity = forwarded("tail")
    bits = forwarded("tail")
    packing_paths = forwarded("tail")
    planned_bits = forwarded("tail")
    reserve_form = forwarded("tail")
    append = forwarded("tail")

    @property
    @override
    def exact_from(self) -> int | None:
        in_tail = self.tail.exact_from
        return None if in_tail is None else max(self._width + in_tail, self.first_common)

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:  # type: ignore[override]
        return {**self.tail.attention_paths, **self._returned.paths.counts}

    # Taking in states

    def _check_flat(self, keys: Tensor, values: Tensor) -> None:
        """Raise an error if states cannot follow the flat part, whatever the tail says."""
        if self.flat is None:
            return
        are_tensors, held = isinstance(keys, Tensor) and isinstance(values, Tensor), self.forms
        if are_tensors and torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise UnsupportedLayerError(UNEVEN_HEADS)
        # An empty tail takes any form, and any tail promotes its dtype. The flat part can do neither.
        if not (are_tensors and self.tail.length) or (keys.dtype, values.dtype) != (held[0].dtype, held[1].dtype):
            forms = checked_forms(keys, values)
            forms = forms if self.tail.bits is None else in_one_dtype(*forms)
            if forms != held:
                raise mismatch(forms, held, self.length)

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        self._check_flat(keys, values)
        return self.tail.validate(keys, values)

    @override
    def take_in(self, keys: Tensor, values: Tensor) -> KVPair:
        self._check_flat(keys, values)
        return self._with_flat(self.tail.take_in(keys, values))

    @override
    def extend(self, keys: Tensor, values: Tensor, past: int | None = None) -> KVPair:
        if past is None or past == self.length:
            return self._with_flat(self.tail.extend(keys, values))
        self._check_common(past)
        return self.tail.extend(keys, values, past)

    def _with_flat(self, tail: KVPair) -> KVPair:
        """Keys and values of the flat part, and of the tail, which the tail has returned."""
        if self.flat is None:
            return tail
        keys, values = tail
        gathered = self.flat.gathered(self.smoothing or DenseSegment.smoothing)
        if not isinstance(keys, PackedStates):
            segments = KVSegments((gathered, DenseSegment(keys.as_subclass(Tensor), values)))
            return self._returned.attended(self, segments, self.forms, self.length, segments.tokens)
        # The tail knows when the states become stale, because the flat part never changes.
        snapshot = keys.snapshot
        segments = KVSegments((gathered, *snapshot.segments.in_order))
        whole = replace(snapshot, segments=segments, length=self.length, paths=self._returned.paths)
        return packed_like(keys, values, whole)

    @override
    def extend_and_evict(self, keys: Tensor, values: Tensor, past: int, kept: int) -> KVPair:
        self._refuse("evict the oldest tokens")

    # Reading

    @override
    def newest(self, count: int) -> KVPair:
        self._check_common(count)
        return self.tail.newest(count)

    def attended_states(self) -> KVPair:
        """Keys and values of all tokens, for attention alone: heads that hold different tokens cannot be read."""
        return self._with_flat(self.tail.newest(self.tail.length))

    def _check_common(self, count: int) -> None:
        """Raise `UnsupportedLayerError` if heads hold different tokens among the newest `count`."""
        if self.flat is not None and count > self.length - self.first_common:
            self._refuse(f"read the newest {count} tokens as one tensor")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedLayerError(
            f"It is impossible to {what}, because heads hold different tokens since tokens were evicted per head: "
            f"read at most the newest {self.length - self.first_common} tokens, or evict with per_head=False."
        )

    # Dropping, cropping and the batch

    @override
    def drop_oldest(self, count: int) -> None:
        self._refuse("drop the oldest tokens")

    @override
    def truncate(self, length: int) -> None:
        if length < self.first_common:
            raise RollbackError(
                f"`length` must be at least {self.first_common}, from where on every head holds the same "
                f"tokens, got {length}: reset the cache, or keep a fork of it."
            )
        self._returned.invalidate()
        self.tail.truncate(length - self._width)

    @override
    def reserve(self, tokens: int) -> None:
        self.tail.reserve(max(tokens - self._width, 0))

    @override
    def shrink(self, tokens: int) -> None:
        self.tail.shrink(max(tokens - self._width, 0))

    @override
    def select(self, indices: Tensor) -> None:
        self._with_tables(
            lambda table: table.index_select(0, indices.to(table.device)), lambda: self.tail.select(indices)
        )

    @override
    def expand(self, repeats: int) -> None:
        self._with_tables(lambda table: table.repeat_interleave(repeats, 0), lambda: self.tail.expand(repeats))

    def _with_tables(self, change: Callable[[Tensor], Tensor], change_tail: Callable[[], None]) -> None:
        """Move the sequences of both parts. If there is no memory, nothing has changed."""
        flat = None if self.flat is None else self.flat.with_tables(change)
        change_tail()
        self.flat = flat
        self._returned.invalidate()

    @override
    def clear(self) -> None:
        self.tail.clear()
        self._returned.invalidate()
        self.flat = None

    # Sharing

    @override
    def fork(self) -> Self:
        flat = self.flat
        return self.__class__(self.tail.fork(), None if flat is None else replace(flat, part=flat.part.fork()))

    @override
    def snapshot(self) -> Self:
        flat = self.flat
        return self.__class__(self.tail.snapshot(), None if flat is None else replace(flat, part=flat.part.snapshot()))

    @override
    def trim(self) -> None:
        self.tail.trim()
        if self.flat is not None and not self.flat.part.is_shared:
            self.flat = self.flat.without_unread(self.flat.places // UNREAD_DIVISOR)

    @override
    def compact(self) -> None:
        self.tail.compact()
        if self.flat is not None:
            self.flat = self.flat.without_unread(-1 if self.flat.part.is_shared else 0)

    @override
    def swap_buffers(self, swap: BufferSwap) -> None:
        if self.flat is not None:
            self.flat.swap_buffers(swap)
        self.tail.swap_buffers(swap)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        if self.flat is not None:
            yield from self.flat.held_tensors()
        yield from self.tail.held_tensors()

    # State

    @override
    def state(self) -> dict[str, Tensor]:
        tensors = self.tail.state()
        if self.flat is None:
            return tensors
        return {**tensors, **self.flat.state(tensors)}

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        of_tail, flat = split_state(tensors)
        tokens = self.tail.check_state(of_tail)
        return tokens + (check_flat_state(flat, of_tail, self.tail, tokens) if flat else 0)

    @override
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        of_tail, flat = split_state(tensors)
        self.clear()
        self.tail.load_state(of_tail)
        if not flat:
            return
        self.flat = FlatTokens.of_state(flat, self.tail)
        if isinstance(self.tail, QuantizedStore):
            self.tail.runs = SmoothingRuns.of_state(tensors, len(self.tail.blocks or ()))
            self.tail.follows_packed = True
