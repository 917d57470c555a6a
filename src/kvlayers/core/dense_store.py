"""Tokens in full precision: in segments that other stores hold too, and in a tail behind them, which grows."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import (
    check_dense_state,
    check_one_batch,
    checked_forms,
    checked_hint,
    promoted_forms,
)
from kvlayers.core.buffer import StateForm, TokenBuffer, forms_of_batch
from kvlayers.core.returned_states import ReturnedStates
from kvlayers.core.sharing import CopyOnWrite, SharedSegment, at_most, gathered, selected, tokens_of
from kvlayers.core.token_store import BufferSwap, Fidelity, KVPair, TokenStore, keeps_updates_of, register_store
from kvlayers.errors import InterruptedPassError
from kvlayers.kernels.attention.gqa import first_grouped_length, marked_for_one_query, marked_for_sdpa
from kvlayers.kernels.attention.packed_tensor import PackedStates, as_dense
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.upstream import compat

_first_fork = threading.Lock()

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


@dataclass(frozen=True, slots=True)
class ValidStates:
    """New states that were valid.

    Attributes:
        facts: shapes, dtypes and devices of keys and values.
        forms: forms of the held keys and values, the very object.
        first_grouped_length: tokens from which such keys are marked for SDPA, if there is one new token.
    """

    facts: tuple[object, ...]
    forms: tuple[StateForm, StateForm] | None
    first_grouped_length: int


@register_store
class DenseStore(TokenStore):
    """Full-precision states in a tail, which is memory that grows, behind segments, which are read and never written.

    The tail is the tokens from `_start` to `_end` of two buffers, one for keys and one for values. New tokens are
    written after `_end`, and dropped ones are skipped by moving `_start`, so an update costs only the new tokens. At
    the end of the buffers `_make_room` decides what to do.

    A store that is not forked has no segments. A fork holds the same tail. When it cannot write behind the tail in
    place, its tokens there become a segment, and a new tail begins. Attention reads segments and tail in one call.

    If autograd follows the states, or `torch.export` traces the code, states are concatenated instead, and the
    resulting buffers have no spare room: no write changes a tensor that a backward pass still needs, or an input of an
    exported program.

    Args:
        length_hint: the most tokens that are expected, if known. Growth stops there while the hint holds, so that the
            last growth is not too large. It is not a limit: more tokens still fit.
        growth_divisor: a full buffer grows by its size divided by this.
        minimum_growth: fewest tokens by which it grows. A tail that others hold too becomes a segment from as many
            tokens on: a copy of a shorter one takes no more memory than the spare room of a new tail.
        maximum_segments: if there are more, the smallest neighbours are merged.

    Attributes:
        can_share: whether the store may hold memory that other stores hold too. A reservation may not.
    """

    hints: ClassVar[tuple[str, ...]] = ("length_hint", "growth_divisor", "minimum_growth", "maximum_segments")
    holds_tokens_apart = True
    can_share: ClassVar[bool] = True
    forms: tuple[StateForm, StateForm] | None = None
    fidelity: Fidelity = "exact"

    _appends_one = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._appends_one = keeps_updates_of(cls, DenseStore)

    def __init__(
        self,
        length_hint: int | None = None,
        growth_divisor: int = GROWTH_DIVISOR,
        minimum_growth: int = MINIMUM_GROWTH,
        maximum_segments: int = MAXIMUM_SEGMENTS,
    ) -> None:
        self.length_hint = checked_hint(length_hint)
        self.growth_divisor = growth_divisor
        self.minimum_growth = minimum_growth
        self.maximum_segments = maximum_segments
        self._keys: TokenBuffer | None = None
        self._values: TokenBuffer | None = None
        self._start = 0
        self._end = 0
        self._capacity = 0
        self._tracks_gradients = False
        self._copy_on_write: CopyOnWrite | None = None
        self._segments: tuple[SharedSegment, ...] = ()
        self._shared_tokens = 0
        self._is_forked = False
        """Whether others may hold the tail, or there are segments."""
        self._length = 0
        """Tokens of segments and tail, counted while the store is forked."""
        self._views: tuple[tuple[TokenBuffer | None, int, int], KVPair] | None = None
        self._returned = ReturnedStates()
        self._is_invalid = False
        self._validated: tuple[StateForm, StateForm] | None = None
        self._last_valid: ValidStates | None = None

    @property
    @override
    def length(self) -> int:
        return self._length if self._is_forked else self._end - self._start

    @property
    def _tail_length(self) -> int:
        """Tokens in the buffers."""
        return self._end - self._start

    @property
    @override
    def sized_for(self) -> int | None:  # type: ignore[override]
        return self.length_hint

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
    def attention_paths(self) -> Mapping[str, int]:  # type: ignore[override]
        return self._returned.paths.counts

    # Taking in states

    @override
    def take_in(self, keys: Tensor, values: Tensor) -> KVPair:
        if torch.compiler.is_compiling() or not self.append_one(keys, values):
            self.validate(keys, values)
            return self.extend(keys, values)
        start, tokens = self._start, self._end - self._start
        held_keys = self._keys.view(start, tokens)  # type: ignore[union-attr]
        held_values = self._values.view(start, tokens)  # type: ignore[union-attr]
        if tokens >= self._last_valid.first_grouped_length:  # type: ignore[union-attr]
            return marked_for_one_query(held_keys, held_values)
        return held_keys, held_values

    def append_one(self, keys: Tensor, values: Tensor) -> bool:
        """Append states if they are one token like the one before, it has room, and nobody else is concerned.

        For code that is not being compiled. It takes less time than `validate` and `extend`.

        Returns:
            Whether the token was appended; if not, nothing has changed.
        """
        last = self._last_valid
        # As in `validate`, which would be a call more.
        if last is None or last.forms is not self.forms:
            return False
        try:
            facts = (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device)
        except AttributeError:
            # They are no tensors, as `validate` says.
            return False
        if facts != last.facts or keys.shape[2] != 1 or not self._appends_one:
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

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        self._validated = None
        if torch.compiler.is_compiling():
            return self._validate(keys, values)
        last = self._last_valid
        try:
            facts = (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device)
        except AttributeError:
            # They are no tensors, as this says.
            return self._validate(keys, values)
        if last is None or facts != last.facts or last.forms is not self.forms:
            self._validate(keys, values)
            valid = ValidStates(facts, self.forms, first_grouped_length(keys))
            self._last_valid = None if self._validated else valid
        return keys.shape[2]

    def _validate(self, keys: Tensor, values: Tensor) -> int:
        forms = checked_forms(keys, values)
        if forms == self.forms:
            return keys.shape[2]
        if self._is_invalid:
            raise InterruptedPassError(
                "The held tokens are lost, because an error or Ctrl-C interrupted a move of them: reset() the cache, "
                "and pass all tokens again."
            )
        if self.length:
            return self._validate_other_form(keys, forms)
        check_one_batch(*forms)
        self._validated = forms
        return keys.shape[2]

    def _validate_other_form(self, keys: Tensor, forms: tuple[StateForm, StateForm]) -> int:
        """As `_validate`, for forms that differ from those of the held tokens."""
        held = self._known_forms()
        promoted = promoted_forms(forms, held, self.length)
        # What is written to a buffer takes on its dtype.
        self._validated = None if promoted == held else promoted
        return keys.shape[2]

    def _apply_form(self, tokens: int) -> None:
        """Take on the form that was validated, if `tokens` of that form fit."""
        if self._validated is not None:
            self.check_room(tokens)
            forms, self._validated = self._validated, None
            self.promote(*forms)

    def promote(self, key_form: StateForm, value_form: StateForm) -> None:
        """Hold all tokens in the dtypes of these forms, which hold them without rounding."""
        if not self.length:
            self.reserve_form(key_form, value_form)
            return
        forms, length = (key_form, value_form), self.length
        if self._tracks_gradients:
            # Copies, as states of a segment are those of others too.
            keys, values = self._plain(length)
            self._adopt(keys.to(key_form.dtype, copy=True), values.to(value_form.dtype, copy=True), (), forms)
        else:
            self._hold((), *self._gathered(length, forms), length, forms)
        self._returned.invalidate()

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        self._release((key_form, value_form))

    def check_room(self, tokens: int) -> None:
        """Raise `CapacityError` if `tokens` more do not fit. A store that grows never raises it."""

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        tokens = keys.shape[2]
        if self._validated is not None:
            self._apply_form(tokens)
        tracked = self._tracks_gradients or keys.requires_grad or values.requires_grad
        if tracked and (torch.is_grad_enabled() or compat.is_exporting()):
            self.check_room(tokens)
            self._concatenate(keys, values)
            return
        if self._end + tokens > self._capacity:
            self.check_room(tokens)
            if compat.is_exporting():
                self._concatenate(keys, values)
                return
            keys, values = self._copied_if_aliased(keys), self._copied_if_aliased(values)
            self._make_room(tokens)
        elif not tokens:
            return
        elif self._copy_on_write is not None and not self._may_write(self._end, self._end + tokens):
            self._leave_buffers(tokens, self._capacity_of_copy(tokens))
        key_buffer, value_buffer = self._buffers()
        end = self._end
        key_buffer.write(end, keys)
        value_buffer.write(end, values)
        self.hold(tokens)

    @override
    def extend(self, keys: Tensor, values: Tensor, past: int | None = None) -> KVPair:
        tokens = keys.shape[2]
        self.append(keys, values)
        attended = self.newest(self.length if past is None else past + tokens)
        return attended if type(attended[0]) is PackedStates else marked_for_sdpa(*attended, tokens)

    @override
    def extend_and_evict(self, keys: Tensor, values: Tensor, past: int, kept: int) -> KVPair:
        tokens = keys.shape[2]
        # Some of the tokens to keep may be older than those to attend to.
        held = max(past, kept - tokens)
        if held:
            held_keys, held_values = self._plain(held)
            keys, values = torch.cat([held_keys, keys], dim=2), torch.cat([held_values, values], dim=2)
        start = held + tokens - kept
        self._replace(keys.narrow(2, start, kept), values.narrow(2, start, kept))
        attended = past + tokens
        keys, values = keys.narrow(2, held - past, attended), values.narrow(2, held - past, attended)
        return marked_for_sdpa(keys, values, tokens)

    @override
    def overwrite(self, count: int, keys: Tensor, values: Tensor) -> bool:
        start = self._end - count
        # An exported program must not write to its inputs, nor any code to what a backward pass needs.
        exporting = torch.compiler.is_compiling() and compat.is_exporting()
        if exporting or self._tracks_gradients or keys.requires_grad or values.requires_grad or start < self._start:
            return False
        if self._copy_on_write is not None and not self._may_write(start, start + keys.shape[2]):
            self._leave_buffers(0, self._capacity_of_copy(0))
            start = self._end - count
            if start < self._start:
                return False
        if self._is_forked:
            self._returned.invalidate()
        key_buffer, value_buffer = self._buffers()
        key_buffer.write(start, keys)
        value_buffer.write(start, values)
        return True

    def _concatenate(self, keys: Tensor, values: Tensor) -> None:
        if self._start == self._end:
            keys, values = keys.clone(), values.clone()
        else:
            held = self.newest(self._tail_length)
            keys, values = torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)
        self._adopt(keys, values, self._segments)

    def _adopt(
        self,
        keys: Tensor,
        values: Tensor,
        segments: Sequence[SharedSegment] = (),
        forms: tuple[StateForm, StateForm] | None = None,
    ) -> None:
        """Hold segments, and behind them these tensors themselves as full buffers."""
        self._hold(segments, TokenBuffer(keys), TokenBuffer(values), keys.shape[2], forms)
        # Tensors of a traced program must not be written to, just like tensors that autograd follows.
        self._tracks_gradients = keys.requires_grad or values.requires_grad or compat.is_exporting()

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        """Hold a copy of validated states in place of all held tokens."""
        self._apply_form(keys.shape[2])
        tracked = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        if tracked or compat.is_exporting():
            self._adopt(keys.clone(), values.clone())
            self._returned.invalidate()
            return
        held = self.length
        try:
            self.clear()
            self.append(keys, values)
        except BaseException:
            if held:
                self._invalidate()
            raise

    # Reading

    @override
    def newest(self, count: int) -> KVPair:
        end = self._end
        if self._is_forked and count > end - self._start:
            return self._returned.newest(count, self._attended, self._known_forms(), self._length)
        keys, values = self._keys, self._values
        if keys is None or values is None:
            keys, values = self._buffers()
        if keys.tracks_gradients or values.tracks_gradients or torch.compiler.is_compiling():
            return keys.read(end - count, count), values.read(end - count, count)
        return keys.view(end - count, count), values.view(end - count, count)

    def _attended(self, count: int) -> KVPair:
        """Keys and values of the newest `count` tokens, which reach into segments."""
        segments = KVSegments(self.pieces(count))
        return self._returned.attended(self, segments, self._known_forms(), self._length, segments.tokens)

    def pieces(self, count: int) -> tuple[DenseSegment, ...]:
        """The newest `count` tokens as attention reads them: a piece for each segment, and one for the tail.

        Nothing is copied, and a whole segment is the same object each time.
        """
        in_tail = min(count, self._end - self._start)
        tail = (DenseSegment(*self.newest(in_tail)),) if in_tail else ()
        in_segments = count - in_tail
        if not in_segments:
            return tail
        segments = tokens_of(self._segments, self._shared_tokens - in_segments, in_segments)
        return (*(segment.dense() for segment in segments), *tail)

    def tail_segment(self) -> DenseSegment:
        """The tokens in the buffers as attention reads them: for a store with tokens, in code that is not compiled."""
        keys: Any = self._keys
        values: Any = self._values
        return DenseSegment(keys.tensor, values.tensor, None, (self._start, self._end - self._start))

    def _plain(self, count: int) -> KVPair:
        """Keys and values of the newest `count` tokens, as plain tensors."""
        keys, values = self.newest(count)
        return as_dense(keys), as_dense(values)

    @override
    def caller_views(self) -> KVPair:
        # Compiled code reads at once. Of sequences that share segments each would get a copy: packed states cannot be
        # written to, and know when they are stale.
        if torch.compiler.is_compiling() or any(segment.rows is not None for segment in self._segments):
            return self.newest(self.length)
        if self._segments:
            self.compact()
        # States that autograd follows are never written to. Models with cross-attention read the same tokens at every
        # step.
        recorded = self._copy_on_write is not None and self._copy_on_write.covers_view(self._start, self._end)
        if not recorded and not self._tracks_gradients and self._start != self._end:
            if self._copy_on_write is not None and not self._copy_on_write.has_one_holder:
                self._allocate(self._capacity_of_copy(0))
            self._sharing().record_view(self._start, self._end)
        return self._cached_views()

    def _cached_views(self) -> KVPair:
        """All tokens, as the same two tensors until the tokens change or move."""
        region = self._keys, self._start, self._end
        if self._views is None or self._views[0] != region:
            self._views = region, self.newest(self.length)
        return self._views[1]

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
        in_tail = length - self._shared_tokens
        if in_tail < 0:
            self._hold(tokens_of(self._segments, 0, length))
            return
        self._set_end(self._start + in_tail)
        if self._tracks_gradients:
            # No spare room, so that the next tokens are concatenated or moved rather than written over these.
            self._adopt(*self.newest(in_tail), self._segments)

    @override
    def clear(self) -> None:
        self._returned.invalidate()
        if self._segments or self._tracks_gradients:
            self._hold(())
        self._is_forked = self._is_invalid = False
        self._start = 0
        self._set_end(0)

    @override
    def select(self, indices: Tensor) -> None:
        if self.forms is None:
            return
        length, forms = self._tail_length, forms_of_batch(self.forms, indices.shape[0])
        if self._tracks_gradients and (torch.is_grad_enabled() or compat.is_exporting()):
            chosen = [states.index_select(0, indices.to(states.device)) for states in self._plain(self.length)]
            self._adopt(chosen[0], chosen[1], forms=forms)
        else:
            segments, keys, values = selected(self._segments, indices), self._keys, self._values
            if keys is not None and values is not None:
                capacity = min(max(self._capacity, length), self._grown_capacity(length))
                keys = keys.selected(indices, self._start, length, capacity)
                values = values.selected(indices, self._start, length, capacity)
            self._hold(segments, keys, values, length, forms)
        self._returned.invalidate()

    def selected(self, indices: Tensor) -> Self:
        """A store of the selected sequences; this one does not change."""
        twin = self.snapshot()
        twin.select(indices)
        return twin

    @override
    def expand(self, repeats: int) -> None:
        if self._copy_on_write is not None and self._copy_on_write.is_viewed:
            # A caller may write to these buffers, and the copies of a sequence must not change together.
            self._allocate(self._tail_length)
        if self.length and self._may_freeze():
            self._hold(self._as_segments(self.length))
        super().expand(repeats)

    @override
    def rewritten(self, keys: Tensor, values: Tensor) -> Self:
        fresh = self.snapshot()
        fresh._release()
        fresh.validate(keys, values)
        fresh.append(keys, values)
        return fresh

    # State

    @override
    def state(self) -> dict[str, Tensor]:
        if self.forms is None:
            return {}
        if not self._segments or self._tracks_gradients:
            held = self.newest(self.length)
            return {"keys": held[0].clone(), "values": held[1].clone()}
        keys, values = self._gathered(self.length)
        return {"keys": keys.tensor, "values": values.tensor}

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        return check_dense_state(tensors)

    @override
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.clear()
        if tensors:
            keys, values = tensors["keys"], tensors["values"]
            # A state includes tokens that were recorded for a rollback, which may not fit the reservation.
            self.reserve(self.validate(keys, values))
            self.append(keys, values)

    def __getstate__(self) -> dict[str, Any]:
        # Copies of the live tokens alone: spare room and dropped tokens are not part of the state.
        live = {**self.__dict__, "_copy_on_write": None, "_views": None, "_returned": ReturnedStates()}
        start, length = self._start, self._tail_length
        if self._keys is not None and self._values is not None:
            if self._tracks_gradients and not torch.is_inference_mode_enabled():
                keys, values = (TokenBuffer(states.clone()) for states in self.newest(length))
            else:
                # Not clones: a clone made in inference mode could never be written to outside of it.
                keys, values = (buffer.reallocated(start, length, length) for buffer in (self._keys, self._values))
            live["_keys"], live["_values"] = keys, values
            live["_tracks_gradients"] = keys.tracks_gradients or values.tracks_gradients
        live["_start"], live["_end"], live["_capacity"] = 0, length, length
        return live

    # Sharing

    @override
    def fork(self) -> Self:
        if self._can_share():
            self._length, self._is_forked = self.length, True
            self._sharing()
            return self.snapshot()
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__getstate__())
        return twin

    @override
    def snapshot(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__, _returned=ReturnedStates())
        if self._copy_on_write is not None:
            self._copy_on_write.join(twin)
        return twin

    @override
    def share_prefix(self, other: TokenStore, tokens: int) -> None:
        if not isinstance(other, DenseStore) or not 0 < tokens <= min(self.length, other.length):
            return
        if self.forms != other.forms or not (self._may_freeze() and other._may_freeze()):
            return
        # A fork of the other store, which therefore knows that it is forked.
        held, shared = self._as_segments(tokens), other.fork()._as_segments(tokens)
        if len(held) == len(shared) and all(map(SharedSegment.holds_the_same_as, held, shared)):
            return
        own = self.length - tokens
        keys, values = self._gathered(own) if own else (None, None)
        self._hold(shared, keys, values, own)
        self._returned.invalidate()

    def _can_share(self) -> bool:
        """Whether a fork may hold the same buffers.

        It may not if they are offloaded, if autograd follows them, or if a caller has a view to write to.
        """
        plain = type(self._keys) is TokenBuffer and type(self._values) is TokenBuffer
        viewed = self._copy_on_write is not None and self._copy_on_write.is_viewed
        return self.can_share and plain and not self._tracks_gradients and not viewed

    def _may_freeze(self) -> bool:
        """Whether the tail may become a segment."""
        return not self._tail_length or self._can_share()

    def _sharing(self) -> CopyOnWrite:
        """The record of who shares these buffers, which is made when it is first needed."""
        # Threads may fork one store at the same time: all forks must know of each other.
        with _first_fork:
            if self._copy_on_write is None:
                sharing = CopyOnWrite(*self._buffers())
                sharing.join(self)
                self._copy_on_write = sharing
            return self._copy_on_write

    def _may_write(self, start: int, end: int) -> bool:
        """Whether no other store and no caller uses the slots from `start` to `end`. No other store may from now on."""
        sharing = self._copy_on_write
        if sharing is None or sharing.is_over:
            self._copy_on_write = None
            return True
        return sharing.claim(self, start, end)

    def retire(self) -> None:
        """Stop holding tokens. Nobody writes where they are, as states that were returned may still read them."""
        if self._copy_on_write is not None:
            self._copy_on_write.leave(self)

    def reads(self, start: int, end: int) -> bool:
        """Whether any held token is in the slots from `start` to `end`."""
        return start < self._end and self._start < end

    def _as_segments(self, tokens: int) -> list[SharedSegment]:
        """The oldest `tokens` tokens, those of the tail included, as segments."""
        segments = tokens_of(self._segments, 0, tokens)
        in_tail = tokens - self._shared_tokens
        if in_tail > 0:
            segments.append(SharedSegment(self._sharing(), self._start, self._start + in_tail))
        return segments

    def _leave_buffers(self, tokens: int, capacity: int) -> None:
        """Go on in buffers of its own: behind the old tail, which becomes a segment, or in a copy of `capacity` tokens.

        Args:
            tokens: new tokens for which a new tail has room.
            capacity: tokens of a copy, held and new ones.
        """
        # A copy of a short tail takes no more memory than the spare room of a new one.
        if (
            self._copy_on_write is not None
            and not self._copy_on_write.has_one_holder
            and self._tail_length > max(self.length // GROWTH_DIVISOR, self.minimum_growth - 1)
            and self._can_share()
        ):
            self._hold(self._as_segments(self.length))
            capacity = self._grown_capacity(tokens)
        self._allocate(capacity)

    # Memory

    def _make_room(self, tokens: int) -> None:
        """Change the buffers so that `tokens` more fit after `_end`."""
        length = self._tail_length
        needed = length + tokens
        # A move to the front must win enough room to pay for itself, or a window would be copied at every token.
        pays = needed <= self._capacity and self._start * GROWTH_DIVISOR >= length
        if pays and not self._tracks_gradients and self._copy_on_write is None:
            self._shift_to_front()
        else:
            self._leave_buffers(tokens, self._grown_capacity(needed))

    def _copied_if_aliased(self, states: Tensor) -> Tensor:
        """States that making room cannot move: a copy if they are a view of the buffers."""
        if self._keys is None or self._values is None:
            return states
        if torch.compiler.is_compiling():
            # Compiled code cannot ask for addresses, and asking would break the graph in each layer.
            return states.clone()
        storage = states.untyped_storage().data_ptr()
        buffers = (self._keys, self._values)
        # All tensors without memory, such as meta tensors, are at address 0.
        if storage and any(buffer.tensor.untyped_storage().data_ptr() == storage for buffer in buffers):
            return states.clone()
        return states

    @override
    def reserve(self, tokens: int) -> None:
        self._apply_form(tokens)
        # To new buffers, never within these: the next states may be a view of them. States that autograd follows are
        # concatenated when the next ones arrive, not moved.
        tokens -= self._shared_tokens
        if self._start + tokens > self._capacity and not self._tracks_gradients:
            self._leave_buffers(tokens - self._tail_length, self._grown_capacity(tokens))

    @override
    def shrink(self, tokens: int) -> None:
        capacity = max(tokens - self._shared_tokens, self._tail_length)
        if self._capacity > capacity and not self._tracks_gradients:
            self._allocate(capacity)

    @override
    def trim(self) -> None:
        spare = self._capacity - self._tail_length
        divisor = TAIL_TRIM_DIVISOR if self._shared_tokens else GROWTH_DIVISOR
        if spare * divisor > self._capacity and self._can_share():
            is_own = self._may_write(0, self._capacity)
            others = [] if is_own else self._sharing().segments_beside(self)
            # A short tail is copied even if others hold it: they may let go of it soon, or go on in its spare room.
            if is_own or (self._tail_length * 2 <= self._shared_tokens and not any(others)):
                self._allocate(self._tail_length)
            elif all(others):
                # Memory that is read by segments alone can be given back in part.
                self._hold(self._as_segments(self.length))
        for segment in self._segments:
            segment.sharing.trim(SEGMENT_TRIM_DIVISOR)

    @override
    def compact(self) -> None:
        if self._shared_tokens:
            self.promote(*self._known_forms())
        elif self._copy_on_write is not None and not self._copy_on_write.has_one_holder:
            self._allocate(self._tail_length)

    def _grown_capacity(self, needed: int) -> int:
        """Tokens to allocate for a tail when `needed` tokens must fit."""
        shared, hint = self._shared_tokens, self.length_hint
        if not shared:
            return self.capacity_for(needed, hint)
        growth = max(needed // self.growth_divisor, min(self.minimum_growth, TAIL_MINIMUM_GROWTH))
        return _grown(needed, None if hint is None else hint - shared, growth)

    def capacity_for(self, needed: int, length_hint: int | None) -> int:
        """Tokens to allocate when `needed` tokens must fit, in a store with this length hint."""
        # The first buffer at most doubles what comes: many caches are kept with a few tokens. A prompt gets no room by
        # its length, which most answers would not fill.
        first = min(self.minimum_growth, needed)
        growth = max(needed // self.growth_divisor, self.minimum_growth) if self._capacity else first
        return _grown(needed, length_hint, growth)

    def _capacity_of_copy(self, tokens: int) -> int:
        """Tokens to allocate for a copy with room for `tokens` more tokens, for which these buffers have room."""
        return min(self._capacity - self._start, self._grown_capacity(self._tail_length + tokens))

    def _buffers(self) -> tuple[TokenBuffer, TokenBuffer]:
        if self._keys is None or self._values is None:
            self._allocate(0)
        return self._keys, self._values  # type: ignore[return-value]

    def _allocate(self, capacity: int) -> None:
        """Move the held tokens to new buffers for `capacity` tokens."""
        forms, length, was_forked = self._known_forms(), self._tail_length, self._is_forked
        if self._keys is not None and self._values is not None:
            # Both are made before either is assigned: if there is no memory for the second, nothing has changed.
            keys = self._keys.reallocated(self._start, length, capacity)
            values = self._values.reallocated(self._start, length, capacity)
        else:
            keys = TokenBuffer.allocate(forms[0], capacity)
            values = TokenBuffer.allocate(forms[1], capacity)
        self._hold(self._segments, keys, values, length)
        # Compiled code that calls the layer by an operator goes on doing so.
        self._is_forked = was_forked

    def _hold(
        self,
        segments: Sequence[SharedSegment],
        keys: TokenBuffer | None = None,
        values: TokenBuffer | None = None,
        tail: int = 0,
        forms: tuple[StateForm, StateForm] | None = None,
        start: int = 0,
    ) -> None:
        """Hold segments, and a tail of `tail` tokens from slot `start` of buffers of its own.

        Args:
            segments: the segments.
            keys: the buffer of the keys of the tail, `None` for no tail.
            values: the buffer of the values.
            tail: tokens of the tail.
            forms: forms of all states, `None` for those of the states that are held.
            start: slot of the first token of the tail.
        """
        segments = tuple(at_most(self.maximum_segments, segments))
        shared, capacity = sum([segment.tokens for segment in segments]), 0 if keys is None else keys.capacity
        # No call in between, so that an interrupt finds all of it done, or nothing.
        sharing, self._copy_on_write, self._keys, self._values = self._copy_on_write, None, keys, values
        self._views = None
        self._start, self._end, self._capacity = start, start + tail, capacity
        self.forms = forms or self.forms
        self._tracks_gradients = False
        self._segments, self._shared_tokens, self._length = segments, shared, shared + tail
        self._is_forked = bool(segments)
        if sharing is not None:
            sharing.leave(self)

    def _gathered(
        self, count: int, forms: tuple[StateForm, StateForm] | None = None
    ) -> tuple[TokenBuffer, TokenBuffer]:
        """New buffers, which the newest `count` tokens fill."""
        return gathered(self.pieces(count), forms or self._known_forms())

    def _shift_to_front(self) -> None:
        self._returned.invalidate()
        key_buffer, value_buffer = self._buffers()
        length = self._tail_length
        try:
            key_buffer.shift_to_front(self._start, length)
            value_buffer.shift_to_front(self._start, length)
        except BaseException:
            self._invalidate()
            raise
        self._start, self._end = 0, length

    def _invalidate(self) -> None:
        """Hold nothing and refuse to go on, because keys and values no longer belong to the same tokens."""
        self._release()
        self.forms, self._is_invalid = None, True

    def _set_end(self, end: int) -> None:
        self._end, self._length = end, self._shared_tokens + end - self._start

    def _release(self, forms: tuple[StateForm, StateForm] | None = None) -> None:
        """Hold no tokens, and no memory for any."""
        self._returned.invalidate()
        self._hold((), forms=forms)

    @override
    def swap_buffers(self, swap: BufferSwap) -> None:
        # Memory that is offloaded moves as a whole.
        if self._shared_tokens:
            self.compact()
        if self._keys is not None and self._values is not None:
            start, end = self._start, self._end
            keys, values = swap(self._keys, start, end), swap(self._values, start, end)
            if keys is not self._keys or values is not self._values:
                self._hold((), keys, values, end - start, start=start)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from (buffer.tensor for buffer in (self._keys, self._values) if buffer is not None)
        for segment in self._segments:
            yield from segment.held_tensors()

    # Slots ahead of the held tokens: they are written first and held later, at once

    def prepare_slots(self, tokens: int) -> None:
        """Make sure that nobody reads or writes the next `tokens` slots. Held tokens move to new memory or not at all.

        The form of the store must be known.
        """
        self.reserve(self.length + tokens)
        if self._copy_on_write is not None and not self._may_write(self._end, self._end + tokens):
            self._leave_buffers(tokens, self._capacity_of_copy(tokens))

    def slots_ahead(self, skipped: int, tokens: int) -> KVPair:
        """Prepared slots to write to: `tokens` of them, after the first `skipped`."""
        keys, values = self._buffers()
        start = self._end + skipped
        return keys.slots(start, tokens), values.slots(start, tokens)

    def hold(self, tokens: int) -> None:
        """Hold the tokens that were written to the slots behind the held ones."""
        self._end += tokens
        if self._is_forked:
            self._length += tokens


def _grown(needed: int, hint: int | None, growth: int) -> int:
    """Room for `needed` tokens and `growth` more, or for no more than the hint says while it holds."""
    return needed + growth if hint is None or needed > hint else min(needed + growth, hint)


def may_share(store: object) -> TypeGuard[DenseStore]:
    """Whether a store holds its tokens in full precision, in memory that other stores may hold too."""
    return isinstance(store, DenseStore) and store.can_share


def without_spare_room(keys: Tensor, values: Tensor, growth_divisor: int = 1, minimum_growth: int = 0) -> DenseStore:
    """A store of a copy of states, without spare room until further tokens are appended; see `filled`."""
    store = filled(DenseStore(keys.shape[2], growth_divisor, minimum_growth), keys, values)
    # From now on it grows in its own steps.
    store.length_hint = None
    return store


def filled(store: DenseStore, keys: Tensor, values: Tensor) -> DenseStore:
    """An empty store, which takes in a copy of states `[batch, kv_heads, tokens, head_dim]`."""
    store.validate(keys, values)
    with torch.no_grad():
        store.append(keys.detach(), values.detach())
    return store
