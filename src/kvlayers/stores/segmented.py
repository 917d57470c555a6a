"""Tokens in segments that other stores hold too, and in a tail behind them."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.attention.segments import DenseSegment
from kvlayers.errors import StateMismatchError
from kvlayers.stores.buffer import StateForm, TokenBuffer
from kvlayers.stores.contiguous import ContiguousStore
from kvlayers.stores.contract import BufferSwap, KVPair, TokenStore
from kvlayers.stores.shared_segment import SharedSegment, SharedSegments, at_most, selected, write_segment

COPIED_TAIL_DIVISOR = 8
"""A tail of at most an eighth of all tokens is copied, as a growing buffer is, so that segments stay few."""

MAXIMUM_SEGMENTS = 8
"""Segments that attention reads one after the other at little cost."""

TRIM_DIVISOR = 8
"""Memory is given back if more than an eighth of it is not used, which is the spare room of a growing buffer."""

TAIL_TRIM_DIVISOR = 20
"""The same for a tail behind segments, which is short, so that moving it costs little."""


class SegmentedStore(ContiguousStore):
    """Tokens in a tail, which is memory that grows, behind segments, which are read and never written.

    A store that is not forked has no segments. A fork holds the same tail. When it cannot write behind the tail in
    place, its tokens there become a segment, and a new tail begins. Attention reads segments and tail in one call.

    Args:
        prefix_room: see `BufferPair`.
        maximum_segments: if there are more, the smallest neighbours are merged.
    """

    def __init__(self, prefix_room: int, maximum_segments: int) -> None:
        super().__init__(prefix_room=prefix_room)
        self.maximum_segments = maximum_segments
        self._shared: SharedSegments | None = None

    @abstractmethod
    def grown_capacity(self, needed: int) -> int:
        """Tokens to allocate for a tail when `needed` tokens must fit."""

    @property
    @abstractmethod
    def shortest_segment(self) -> int:
        """Tokens from which a tail that others hold too becomes a segment. A shorter one is copied."""

    @property
    @override
    def length(self) -> int:
        return self._end - self._start if self._shared is None else self._shared.length

    @property
    def _shared_tokens(self) -> int:
        return 0 if self._shared is None else self._shared.tokens

    @property
    def is_opaque(self) -> bool:  # type: ignore[override]
        """Whether compiled code calls the layer by an operator: after a fork, which may make a segment of the tail."""
        return self._shared is not None

    @property
    def is_shared(self) -> bool:
        """Whether other stores, or several sequences, may read the same memory."""
        sharing = self._copy_on_write
        return self._shared_tokens > 0 or (sharing is not None and not sharing.has_one_holder)

    @override
    def count(self, tokens: int) -> None:
        if self._shared is not None:
            self._shared.length += tokens

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:
        return {} if self._shared is None else self._shared.paths.counts

    # Reading

    @override
    def newest_keys(self, count: int) -> Tensor:
        return self.newest(count)[0]

    @override
    def newest_values(self, count: int) -> Tensor:
        return self.newest(count)[1]

    @override
    def newest(self, count: int) -> KVPair:
        if self._shared is None or count <= self._end - self._start:
            return super().newest(count)
        return self._shared.states(self.pieces(count), *self._forms())

    def pieces(self, count: int) -> tuple[DenseSegment, ...]:
        """The newest `count` tokens as attention reads them: a piece for each segment, and one for the tail.

        Nothing is copied, and a whole segment is the same object each time.
        """
        in_tail = min(count, self.tail_length)
        tail = (DenseSegment(*super().newest(in_tail)),) if in_tail else ()
        segments = [] if self._shared is None else self._shared.newest(count - in_tail)
        return (*(segment.dense() for segment in segments), *tail)

    def _forms(self) -> tuple[StateForm, StateForm]:
        if self._key_form is None or self._value_form is None:
            raise StateMismatchError("The store is empty, so it has no states to read: update the layer first.")
        return self._key_form, self._value_form

    @override
    def _newest_after_prefix(self, prefix: KVPair, count: int) -> KVPair:
        slots = self._start - prefix[0].shape[2], self._start
        if count == self.tail_length and self.is_shared and self._keeps_tail() and not self._may_write(*slots):
            self._begin_tail(0)
        if self._shared is None or count <= self.tail_length:
            return super()._newest_after_prefix(prefix, count)
        return self._shared.attended((DenseSegment(*prefix), *self.pieces(count)), *self._forms())

    @override
    def caller_views(self) -> KVPair:
        if self._shared is not None and self._shared.segments and not torch.compiler.is_compiling():
            if any(segment.rows is not None for segment in self._shared.segments):
                # Each sequence would get a copy. Packed states cannot be written to, and know when they are stale.
                return self.newest(self.length)
            self.compact()
        return super().caller_views()

    @override
    def state(self) -> dict[str, Tensor]:
        if self._shared is None or self._tracks_gradients:
            return super().state()
        keys, values = self._gathered(self.length, self.length)
        return {"keys": keys.tensor, "values": values.tensor}

    # Memory

    @override
    def _advance(self, tokens: int) -> None:
        self._end += tokens
        if self._shared is not None:
            self._shared.length += tokens

    def _recount(self) -> None:
        if self._shared is not None:
            self._shared.length = self._shared.tokens + self.tail_length

    @override
    def _adopt(self, keys: Tensor, values: Tensor) -> None:
        super()._adopt(keys, values)
        self._recount()

    @override
    def _release(self) -> None:
        self._forget_segments()
        super()._release()

    def _forget_segments(self) -> None:
        self._invalidate_states()
        self._shared = None

    def _invalidate_states(self) -> None:
        """Make all packed states that were returned so far stale."""
        if self._shared is not None:
            self._shared.invalidate()

    @override
    def _shift_to_front(self) -> None:
        self._invalidate_states()
        super()._shift_to_front()

    @override
    def _leave_buffers(self, tokens: int) -> None:
        if self._keeps_tail():
            self._begin_tail(tokens)
        else:
            super()._leave_buffers(tokens)

    def _keeps_tail(self) -> bool:
        """Whether the tail becomes a segment rather than being copied: others hold it, and it is long."""
        tail = self.tail_length
        short = max(self.length // COPIED_TAIL_DIVISOR, self.shortest_segment - 1)
        shared = self._copy_on_write is not None and not self._copy_on_write.has_one_holder
        return shared and tail > short and self._can_share()

    def _begin_tail(self, tokens: int) -> None:
        """Begin a new tail for `tokens` tokens, behind the old one, which becomes a segment."""
        self._hold_segments(self._all_segments())
        self._allocate(self.grown_capacity(tokens))

    def _all_segments(self, tokens: int | None = None) -> list[SharedSegment]:
        """The oldest `tokens` tokens, those of the tail included, as segments; all tokens if it is not given."""
        tokens = self.length if tokens is None else tokens
        segments = [] if self._shared is None else self._shared.oldest(tokens)
        in_tail = tokens - self._shared_tokens
        if in_tail > 0:
            segments.append(SharedSegment(self._sharing(), self._start, self._start + in_tail))
        return segments

    def _hold_segments(
        self, segments: list[SharedSegment], keys: TokenBuffer | None = None, values: TokenBuffer | None = None
    ) -> None:
        """Hold segments, and a tail that fills buffers of its own."""
        segments = at_most(self.maximum_segments, segments)
        shared = SharedSegments() if self._shared is None else self._shared
        # No call that can fail in between, so that an interrupt finds all of it done, or nothing.
        self._set_buffers(keys, values)
        self._start, self._end = 0, 0 if keys is None else keys.capacity
        self._capacity = self._end
        self._tracks_gradients = False
        self._shared = shared
        shared.hold(segments)
        self._recount()

    def _gathered(self, count: int, capacity: int, free: int = 0) -> tuple[TokenBuffer, TokenBuffer]:
        """New buffers for `capacity` tokens, with the newest `count` tokens after `free` empty slots."""
        keys, values = (TokenBuffer.allocate(form, capacity) for form in self._forms())
        for piece in self.pieces(count):
            write_segment(piece, keys, values, free)
            free += piece.tokens
        return keys, values

    @override
    def swap_buffers(self, swap: BufferSwap) -> None:
        # Memory that is offloaded moves as a whole.
        if self._shared_tokens:
            self.compact()
        super().swap_buffers(swap)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from super().held_tensors()
        if self._shared is not None:
            yield from self._shared.held_tensors()

    # Dropping, cropping and the batch

    @override
    def drop_oldest(self, count: int) -> None:
        shared = self._shared
        if shared is None:
            self._start += count
            return
        dropped = min(count, shared.tokens)
        shared.hold(shared.newest(shared.tokens - dropped))
        self._start += count - dropped
        self._recount()

    @override
    def truncate(self, length: int) -> None:
        shared = self._shared
        if shared is None:
            super().truncate(length)
            return
        if not length:
            self.clear()
        elif length < shared.tokens:
            self._hold_segments(shared.oldest(length))
        else:
            super().truncate(length - shared.tokens)
        shared.invalidate()
        self._recount()

    @override
    def clear(self) -> None:
        self._forget_segments()
        super().clear()

    @override
    def replace(self, keys: Tensor, values: Tensor) -> None:
        super().replace(keys, values)
        self._forget_segments()

    @override
    def select(self, indices: Tensor) -> None:
        if self._key_form is None or self._value_form is None:
            return
        shared = self._shared
        if self._tracks_gradients or (shared is None and self._keys is None):
            super().select(indices)
            return
        segments = [] if shared is None else selected(shared.segments, indices)
        batch, length, free = indices.shape[0], self.tail_length, self.prefix_room
        capacity = min(max(self._capacity, free + length), free + self.grown_capacity(length))
        if self._keys is not None and self._values is not None:
            keys = self._keys.selected(indices, self._start, length, capacity, free)
            values = self._values.selected(indices, self._start, length, capacity, free)
            self._set_buffers(keys, values)
            self._start, self._end, self._capacity = free, free + length, capacity
        self._key_form, self._value_form = self._key_form.of_batch(batch), self._value_form.of_batch(batch)
        if shared is not None:
            shared.invalidate()
            shared.hold(segments)

    @override
    def expand(self, repeats: int) -> None:
        if self._copy_on_write is not None and self._copy_on_write.is_viewed:
            # A caller may write to these buffers, and the copies of a sequence must not change together.
            self._allocate(self.tail_length)
        if self.length and self._may_freeze():
            self._hold_segments(self._all_segments())
        super().expand(repeats)

    # Sharing

    def _copied_segments(self) -> SharedSegments | None:
        return None if self._shared is None else self._shared.copy()

    @override
    def fork(self) -> Self:
        twin = super().fork()
        if self._shared is None and self._copy_on_write is not None:
            self._shared = SharedSegments(length=self.length)
        twin._shared = self._copied_segments()
        return twin

    @override
    def snapshot(self) -> Self:
        twin = super().snapshot()
        twin._shared = self._copied_segments()
        return twin

    @override
    def share_prefix(self, other: TokenStore, tokens: int) -> None:
        if not isinstance(other, SegmentedStore) or not 0 < tokens <= min(self.length, other.length):
            return
        forms = self._key_form, self._value_form
        if forms != (other._key_form, other._value_form) or not (self._may_freeze() and other._may_freeze()):
            return
        held, shared = self._all_segments(tokens), other._all_segments(tokens)
        if len(held) == len(shared) and all(map(SharedSegment.holds_the_same_as, held, shared)):
            return
        own = self.length - tokens
        self._hold_segments(shared, *(self._gathered(own, own) if own else ()))
        self._invalidate_states()

    def _may_freeze(self) -> bool:
        """Whether the tail may become a segment."""
        return not self.tail_length or self._can_share()

    @override
    def trim(self) -> None:
        spare = self._capacity - self.prefix_room - self.tail_length
        divisor = TAIL_TRIM_DIVISOR if self._shared_tokens else TRIM_DIVISOR
        if spare * divisor > self._capacity and self._can_share():
            # A short tail is copied even if others hold it: they may let go of it soon, or go on in its spare room.
            is_short = self.tail_length * 2 <= self._shared_tokens
            if is_short or self._may_write(0, self._capacity):
                self._allocate(self.tail_length)
        for segment in () if self._shared is None else self._shared.segments:
            segment.sharing.trim(TRIM_DIVISOR)

    @override
    def compact(self) -> None:
        length, free = self.length, self.prefix_room
        if self._shared_tokens:
            if self._tracks_gradients:
                self.replace(*self._plain(length))
                return
            keys, values = self._gathered(length, free + length, free)
            self._forget_segments()
            self._set_buffers(keys, values)
            self._start, self._end, self._capacity = free, free + length, free + length
        elif self._copy_on_write is not None and not self._copy_on_write.has_one_holder:
            self._allocate(self._capacity_of_copy(0))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_shared": self._copied_segments()}
