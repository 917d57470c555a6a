"""Tokens in full precision: in segments that other stores hold too, and in a tail behind them, which grows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import promoted_forms
from kvlayers.core.buffer import StateForm, TokenBuffer
from kvlayers.core.contiguous_store import ContiguousStore
from kvlayers.core.returned_states import ReturnedStates
from kvlayers.core.sharing import SharedSegment, at_most, selected, tokens_of, write_segment
from kvlayers.core.token_store import BufferSwap, Fidelity, KVPair, TokenStore, register_store
from kvlayers.kernels.attention.gqa import marked_for_one_query
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import KVSegments

GROWTH_DIVISOR = 8
"""A full buffer grows by an eighth: at most an eighth is spare, and a token is moved 8 times on average. So a tail of
at most an eighth of all tokens is copied rather than made a segment, and memory is given back if more is spare."""

MAXIMUM_SEGMENTS = 8
"""Segments that attention reads one after the other at little cost."""

TAIL_TRIM_DIVISOR = 20
"""A tail behind segments is short, so that moving it costs little. It is moved if more than this part is spare."""

SEGMENT_TRIM_DIVISOR = 64
"""Segments do not grow, so that their memory is moved once for tokens that are gone, and then has no spare room."""

MINIMUM_GROWTH = 128
"""Fewest tokens by which a buffer grows, so that short sequences are not moved every few tokens."""

TAIL_MINIMUM_GROWTH = 16
"""The same for a tail behind segments: there may be many sequences, and their tails are short."""

SMALL_STEP_DIVISOR = 40
"""What a store grows by if it must have next to no spare room, since evicted tokens are to leave memory. A token is
then copied 40 times on average, which costs less than attention reading it at every step."""

SMALL_STEP = 16
"""Fewest tokens by which such a store grows."""


@register_store
class DenseStore(ContiguousStore):
    """Full-precision states in a tail, which is memory that grows, behind segments, which are read and never written.

    A store that is not forked has no segments. A fork holds the same tail. When it cannot write behind the tail in
    place, its tokens there become a segment, and a new tail begins. Attention reads segments and tail in one call.

    Args:
        length_hint: the most tokens that are expected, if known. Growth stops there while the hint holds, so that the
            last growth is not too large. It is not a limit: more tokens still fit.
        growth_divisor: a full buffer grows by its size divided by this.
        minimum_growth: fewest tokens by which it grows. A tail that others hold too becomes a segment from as many
            tokens on: a copy of a shorter one takes no more memory than the spare room of a new tail.
        prefix_room: slots left free before the tokens; see `ContiguousStore`.
        maximum_segments: if there are more, the smallest neighbours are merged.
    """

    hints = ("length_hint", "growth_divisor", "minimum_growth", "prefix_room", "maximum_segments")

    _appends_one = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._appends_one = cls.keeps_updates_of(DenseStore)

    def __init__(
        self,
        length_hint: int | None = None,
        growth_divisor: int = GROWTH_DIVISOR,
        minimum_growth: int = MINIMUM_GROWTH,
        prefix_room: int = 0,
        maximum_segments: int = MAXIMUM_SEGMENTS,
    ) -> None:
        super().__init__(prefix_room=prefix_room)
        self.length_hint = length_hint
        self.growth_divisor = growth_divisor
        self.minimum_growth = minimum_growth
        self.maximum_segments = maximum_segments
        self._segments: tuple[SharedSegment, ...] = ()
        self._shared_tokens = 0
        self._is_forked = False
        """Whether others may hold the tail, or there are segments."""
        self._length = 0
        """Tokens of segments and tail, counted while the store is forked."""
        self._returned = ReturnedStates()

    @property
    @override
    def length(self) -> int:
        return self._length if self._is_forked else self._end - self._start

    @property
    def is_opaque(self) -> bool:  # type: ignore[override]
        """Whether compiled code calls the layer by an operator: after a fork, which may make a segment of the tail."""
        return self._is_forked

    @property
    def has_segments(self) -> bool:
        """Whether any token is in a segment."""
        return self._shared_tokens > 0

    @property
    def is_shared(self) -> bool:
        """Whether other stores, or several sequences, read the same memory."""
        if self._copy_on_write is not None and not self._copy_on_write.has_one_holder:
            return True
        return any(segment.rows is not None or not segment.sharing.has_one_holder for segment in self._segments)

    @override
    def count(self, tokens: int) -> None:
        self._length += tokens

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:
        return self._returned.paths.counts

    # Taking in states

    @override
    def take_in(self, keys: Tensor, values: Tensor) -> KVPair:
        last = self._last_valid
        if last is None or torch.compiler.is_compiling() or not self.append_one(keys, values):
            return super().take_in(keys, values)
        key_buffer, value_buffer = self._buffers()
        start, tokens = self._start, self._end - self._start
        held_keys, held_values = key_buffer.view(start, tokens), value_buffer.view(start, tokens)
        if tokens >= last.first_grouped_length:
            return marked_for_one_query(held_keys, held_values)
        return held_keys, held_values

    def append_one(self, keys: Tensor, values: Tensor) -> bool:
        """Append states if they are one token like the one before, it has room, and nobody else is concerned.

        For code that is not being compiled. It takes less time than `validate` and `extend`.

        Returns:
            Whether the token was appended; if not, nothing has changed.
        """
        if not self._appends_one or not self._is_as_before(keys, values) or keys.shape[2] != 1:
            return False
        if keys.requires_grad or values.requires_grad:
            return False
        end = self._end
        if self._is_forked or self._copy_on_write is not None or end >= self._capacity or self._tracks_gradients:
            return False
        key_buffer, value_buffer = self._keys, self._values
        # Buffers of other kinds note what is written.
        if type(key_buffer) is not TokenBuffer or type(value_buffer) is not TokenBuffer:
            return False
        key_buffer.view(end, 1).copy_(keys)
        value_buffer.view(end, 1).copy_(values)
        self._end = end + 1
        return True

    # Reading

    def tail_segment(self) -> DenseSegment:
        """The tokens in the buffers as attention reads them. Only for code that is not being compiled."""
        keys, values = self._buffers()
        return DenseSegment(keys.tensor, values.tensor, None, (self._start, self._end - self._start))

    @override
    def newest_keys(self, count: int) -> Tensor:
        return self.newest(count)[0]

    @override
    def newest_values(self, count: int) -> Tensor:
        return self.newest(count)[1]

    @override
    def newest(self, count: int) -> KVPair:
        if not self._is_forked or count <= self._end - self._start:
            return super().newest(count)
        return self._returned.newest(count, self._attended, self._forms(), self._length)

    def _attended(self, count: int, *prefix: DenseSegment) -> KVPair:
        """Keys and values of a prefix, if there is one, and of the newest `count` tokens, which reach into segments."""
        segments = KVSegments((*prefix, *self.pieces(count)))
        return self._returned.attended(self, segments, self._forms(), self._length, segments.tokens)

    def pieces(self, count: int) -> tuple[DenseSegment, ...]:
        """The newest `count` tokens as attention reads them: a piece for each segment, and one for the tail.

        Nothing is copied, and a whole segment is the same object each time.
        """
        in_tail = min(count, self._end - self._start)
        tail = (DenseSegment(*super().newest(in_tail)),) if in_tail else ()
        in_segments = count - in_tail
        if not in_segments:
            return tail
        segments = tokens_of(self._segments, self._shared_tokens - in_segments, in_segments)
        return (*(segment.dense() for segment in segments), *tail)

    @override
    def _newest_after_prefix(self, prefix: KVPair, count: int) -> KVPair:
        if self._is_forked and count > self.tail_length:
            return self._attended(count, DenseSegment(*prefix))
        return super()._newest_after_prefix(prefix, count)

    @override
    def caller_views(self) -> KVPair:
        if self._segments and not torch.compiler.is_compiling():
            if any(segment.rows is not None for segment in self._segments):
                # Each sequence would get a copy. Packed states cannot be written to, and know when they are stale.
                return self.newest(self.length)
            self.compact()
        return super().caller_views()

    @override
    def state(self) -> dict[str, Tensor]:
        if not self._segments or self._tracks_gradients:
            return super().state()
        keys, values = self._gathered(self.length)
        return {"keys": keys.tensor, "values": values.tensor}

    # Memory

    @override
    def _advance(self, tokens: int) -> None:
        self._end += tokens
        if self._is_forked:
            self._length += tokens

    @override
    def _set_end(self, end: int) -> None:
        self._end, self._length = end, self._shared_tokens + end - self._start

    @override
    def _release(self) -> None:
        self._forget_segments()
        super()._release()

    def _forget_segments(self) -> None:
        self._returned.invalidate()
        self._segments, self._shared_tokens, self._is_forked = (), 0, False

    @override
    def _shift_to_front(self) -> None:
        self._returned.invalidate()
        super()._shift_to_front()

    @override
    def _leave_buffers(self, tokens: int) -> None:
        if self._keeps_tail():
            self._begin_tail(tokens)
        else:
            super()._leave_buffers(tokens)

    def _keeps_tail(self) -> bool:
        """Whether the tail becomes a segment rather than being copied: others hold it, and it is long."""
        if self._copy_on_write is None or self._copy_on_write.has_one_holder:
            return False
        short = max(self.length // GROWTH_DIVISOR, self.minimum_growth - 1)
        return self.tail_length > short and self._can_share()

    def _begin_tail(self, tokens: int) -> None:
        """Begin a new tail for `tokens` tokens, behind the old one, which becomes a segment."""
        self._hold(self._as_segments(self.length))
        self._allocate(self.grown_capacity(tokens))

    def _as_segments(self, tokens: int) -> list[SharedSegment]:
        """The oldest `tokens` tokens, those of the tail included, as segments."""
        segments = tokens_of(self._segments, 0, tokens)
        in_tail = tokens - self._shared_tokens
        if in_tail > 0:
            segments.append(SharedSegment(self._sharing(), self._start, self._start + in_tail))
        return segments

    def _hold(
        self,
        segments: Sequence[SharedSegment],
        keys: TokenBuffer | None = None,
        values: TokenBuffer | None = None,
        free: int = 0,
        tail: int = 0,
        batch_size: int | None = None,
        forms: tuple[StateForm, StateForm] | None = None,
    ) -> None:
        """Hold segments, and a tail of `tail` tokens behind `free` empty slots of buffers of its own."""
        segments = tuple(at_most(self.maximum_segments, segments))
        shared, capacity = sum(segment.tokens for segment in segments), 0 if keys is None else keys.capacity
        key_form, value_form = forms or self._forms()
        if batch_size is not None:
            key_form, value_form = key_form.of_batch(batch_size), value_form.of_batch(batch_size)
        # No call in between, so that an interrupt finds all of it done, or nothing.
        sharing, self._copy_on_write, self._keys, self._values = self._copy_on_write, None, keys, values
        self._views = None
        self._start, self._end, self._capacity = free, free + tail, capacity
        self._key_form, self._value_form = key_form, value_form
        self._tracks_gradients = False
        self._segments, self._shared_tokens, self._length = segments, shared, shared + tail
        self._is_forked = bool(segments)
        if sharing is not None:
            sharing.leave(self)

    def _gathered(
        self, count: int, free: int = 0, forms: tuple[StateForm, StateForm] | None = None
    ) -> tuple[TokenBuffer, TokenBuffer]:
        """New buffers, which the newest `count` tokens fill behind `free` empty slots."""
        keys, values = (TokenBuffer.allocate(form, free + count) for form in forms or self._forms())
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
        for segment in self._segments:
            yield from segment.held_tensors()

    # Dropping, cropping and the batch

    @override
    def drop_oldest(self, count: int) -> None:
        if not self._is_forked:
            self._start += count
            return
        dropped = min(count, self._shared_tokens)
        self._segments = tuple(tokens_of(self._segments, dropped, self._shared_tokens - dropped))
        self._shared_tokens -= dropped
        self._start += count - dropped
        self._length -= count
        # The next tokens may make as many as there were before.
        self._returned.forget()

    @override
    def truncate(self, length: int) -> None:
        self._returned.invalidate()
        shared = self._shared_tokens
        if length < shared:
            self._hold(tokens_of(self._segments, 0, length))
        else:
            super().truncate(length - shared)

    @override
    def clear(self) -> None:
        self._returned.invalidate()
        if self._segments:
            self._hold(())
        self._is_forked = False
        super().clear()

    @override
    def replace(self, keys: Tensor, values: Tensor) -> None:
        super().replace(keys, values)
        self._forget_segments()

    @override
    def select(self, indices: Tensor) -> None:
        if self._key_form is None or self._value_form is None:
            return
        if self._tracks_gradients or (not self._segments and self._keys is None):
            super().select(indices)
            return
        segments = selected(self._segments, indices)
        keys, values, length, free = self._keys, self._values, self.tail_length, self.prefix_room
        if keys is None or values is None:
            free = 0
        else:
            capacity = min(max(self._capacity, free + length), free + self.grown_capacity(length))
            keys = keys.selected(indices, self._start, length, capacity, free)
            values = values.selected(indices, self._start, length, capacity, free)
        self._hold(segments, keys, values, free, length, indices.shape[0])
        self._returned.invalidate()

    @override
    def expand(self, repeats: int) -> None:
        if self._copy_on_write is not None and self._copy_on_write.is_viewed:
            # A caller may write to these buffers, and the copies of a sequence must not change together.
            self._allocate(self.tail_length)
        if self.length and self._may_freeze():
            self._hold(self._as_segments(self.length))
        super().expand(repeats)

    # Sharing

    @override
    def fork(self) -> Self:
        if self._can_share():
            self._length, self._is_forked = self.length, True
        twin = super().fork()
        twin._returned = ReturnedStates()
        return twin

    @override
    def snapshot(self) -> Self:
        twin = super().snapshot()
        twin._returned = ReturnedStates()
        return twin

    @override
    def share_prefix(self, other: TokenStore, tokens: int) -> None:
        if not isinstance(other, DenseStore) or not 0 < tokens <= min(self.length, other.length):
            return
        forms = self._key_form, self._value_form
        if forms != (other._key_form, other._value_form) or not (self._may_freeze() and other._may_freeze()):
            return
        # A fork of the other store, which therefore knows that it is forked.
        held, shared = self._as_segments(tokens), other.fork()._as_segments(tokens)
        if len(held) == len(shared) and all(map(SharedSegment.holds_the_same_as, held, shared)):
            return
        own = self.length - tokens
        keys, values = self._gathered(own) if own else (None, None)
        self._hold(shared, keys, values, tail=own)
        self._returned.invalidate()

    def _may_freeze(self) -> bool:
        """Whether the tail may become a segment."""
        return not self.tail_length or self._can_share()

    @override
    def trim(self) -> None:
        spare = self._capacity - self.prefix_room - self.tail_length
        divisor = TAIL_TRIM_DIVISOR if self._shared_tokens else GROWTH_DIVISOR
        if spare * divisor > self._capacity and self._can_share():
            is_own = self._may_write(0, self._capacity)
            others = [] if is_own else self._sharing().segments_beside(self)
            # A short tail is copied even if others hold it: they may let go of it soon, or go on in its spare room.
            if is_own or (self.tail_length * 2 <= self._shared_tokens and not any(others)):
                self._allocate(self.tail_length)
            elif all(others):
                # Memory that is read by segments alone can be given back in part.
                self._hold(self._as_segments(self.length))
        for segment in self._segments:
            segment.sharing.trim(SEGMENT_TRIM_DIVISOR)

    @override
    def compact(self) -> None:
        length, free = self.length, self.prefix_room
        if self._shared_tokens:
            if self._tracks_gradients:
                self.replace(*self._plain(length))
                return
            self._hold((), *self._gathered(length, free), free, length)
            self._returned.invalidate()
        elif self._copy_on_write is not None and not self._copy_on_write.has_one_holder:
            self._allocate(self.tail_length)

    # Growth

    def grown_capacity(self, needed: int) -> int:
        """Tokens to allocate for a tail when `needed` tokens must fit."""
        shared = self._shared_tokens
        if not shared:
            return self.capacity_for(needed, self.length_hint)
        hint = None if self.length_hint is None else self.length_hint - shared
        return self._grown(needed, hint, min(self.minimum_growth, TAIL_MINIMUM_GROWTH))

    def capacity_for(self, needed: int, length_hint: int | None) -> int:
        """Tokens to allocate when `needed` tokens must fit, in a store with this length hint."""
        return self._grown(needed, length_hint, self.minimum_growth)

    def _grown(self, needed: int, length_hint: int | None, minimum_growth: int) -> int:
        if not self._capacity and not self._shared_tokens:
            # The first buffer at most doubles what comes: many caches are kept with a few tokens.
            minimum_growth = min(minimum_growth, needed)
        capacity = needed + max(needed // self.growth_divisor, minimum_growth)
        if length_hint is not None and needed <= length_hint:
            return min(capacity, length_hint)
        return capacity

    @property
    @override
    def sized_for(self) -> int | None:
        return self.length_hint

    @property
    @override
    def fidelity(self) -> Fidelity:
        return "exact"

    # States of another dtype

    @override
    def _validate_other_form(self, keys: Tensor, forms: tuple[StateForm, StateForm]) -> int:
        held = self._forms()
        promoted = promoted_forms(forms, held)
        if promoted is None:
            return super()._validate_other_form(keys, forms)
        # What is written to a buffer takes on its dtype.
        self._validated = None if promoted == held else promoted
        return keys.shape[2]

    @override
    def _take_on(self, key_form: StateForm, value_form: StateForm) -> None:
        self.promote(key_form, value_form)

    def promote(self, key_form: StateForm, value_form: StateForm) -> None:
        """Hold all tokens in the dtypes of these forms, which hold them without rounding."""
        if not self.length:
            self.reserve_form(key_form, value_form)
            return
        if self._tracks_gradients:
            keys, values = self._plain(self.length)
            keys, values = keys.to(key_form.dtype), values.to(value_form.dtype)
            self._release()
            self._key_form, self._value_form = key_form, value_form
            self._adopt(keys, values)
            return
        forms, length, free = (key_form, value_form), self.length, self.prefix_room
        self._hold((), *self._gathered(length, free, forms), free, length, forms=forms)
        self._returned.invalidate()

    # Memory

    @override
    def _make_room(self, tokens: int) -> None:
        length = self.tail_length
        needed = length + tokens
        # A move to the front must win enough room to pay for itself, or a window would be copied at every token.
        dropped = self._start - self.prefix_room
        fits = needed + self.prefix_room <= self._capacity
        if fits and dropped * GROWTH_DIVISOR >= length and not self._tracks_gradients and self._copy_on_write is None:
            self._shift_to_front()
        elif self._keeps_tail():
            self._begin_tail(tokens)
        else:
            self._allocate(self.grown_capacity(needed))

    @override
    def _capacity_of_copy(self, tokens: int) -> int:
        return min(self._capacity - self._start, self.grown_capacity(self.tail_length + tokens))

    @override
    def reserve(self, tokens: int) -> None:
        self._apply_form(tokens)
        # To new buffers, never within these: the next states may be a view of them. States that autograd follows are
        # concatenated when the next ones arrive, not moved.
        tokens -= self._shared_tokens
        if self._start + tokens > self._capacity and not self._tracks_gradients:
            if self._keeps_tail():
                self._begin_tail(tokens - self.tail_length)
            else:
                self._allocate(self.grown_capacity(tokens))

    @override
    def shrink(self, tokens: int) -> None:
        capacity = self.grown_capacity(max(tokens - self._shared_tokens, self.tail_length))
        if self._capacity - self.prefix_room > capacity and not self._tracks_gradients:
            self._allocate(capacity)

    def selected(self, indices: Tensor) -> Self:
        """A store of the selected sequences; this one does not change."""
        if self._tracks_gradients:
            twin = self.fork()
        else:
            twin = self.__class__.__new__(self.__class__)
            twin.__dict__.update(self.__dict__, _copy_on_write=None, _returned=ReturnedStates())
        twin.select(indices)
        return twin

    @override
    def rewritten(self, keys: Tensor, values: Tensor) -> Self:
        fresh = self.snapshot()
        fresh._release()
        fresh.validate(keys, values)
        fresh.append(keys, values)
        return fresh

    # Slots ahead of the held tokens: they are written first and held later, at once

    def prepare_slots(self, tokens: int) -> None:
        """Make sure that nobody reads or writes the next `tokens` slots. Held tokens move to new memory or not at all.

        The form of the store must be known.
        """
        self.reserve(self.length + tokens)
        if self._copy_on_write is not None and not self._may_write(self._end, self._end + tokens):
            self._leave_buffers(tokens)

    def slots_ahead(self, skipped: int, tokens: int) -> KVPair:
        """Prepared slots to write to: `tokens` of them, after the first `skipped`."""
        keys, values = self._buffers()
        start = self._end + skipped
        return keys.slots(start, tokens), values.slots(start, tokens)

    def hold(self, tokens: int) -> None:
        """Hold the tokens that were written to prepared slots."""
        self._advance(tokens)


def store_of(keys: Tensor, values: Tensor, growth_divisor: int, minimum_growth: int) -> DenseStore:
    """A store of a copy of states `[batch, kv_heads, tokens, head_dim]`, with spare room for the next tokens.

    Args:
        keys: the keys.
        values: the values.
        growth_divisor: the spare room is the size of the store divided by this.
        minimum_growth: fewest tokens for which there is spare room.
    """
    return _filled(DenseStore(None, growth_divisor, minimum_growth), keys, values)


def without_spare_room(keys: Tensor, values: Tensor, growth_divisor: int = 1, minimum_growth: int = 0) -> DenseStore:
    """As `store_of`, without spare room until further tokens are appended."""
    store = _filled(DenseStore(keys.shape[2], growth_divisor, minimum_growth), keys, values)
    # From now on it grows in its own steps.
    store.length_hint = None
    return store


def _filled(store: DenseStore, keys: Tensor, values: Tensor) -> DenseStore:
    store.validate(keys, values)
    with torch.no_grad():
        store.append(keys.detach(), values.detach())
    return store


def dense_in_small_steps() -> DenseStore:
    """An empty `DenseStore` with next to no spare room."""
    return DenseStore(growth_divisor=SMALL_STEP_DIVISOR, minimum_growth=SMALL_STEP)
