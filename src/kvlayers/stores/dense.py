"""Tokens in full precision, in buffers that grow."""

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.stores.buffer import StateForm
from kvlayers.stores.contract import Fidelity, KVPair
from kvlayers.stores.registry import register_store
from kvlayers.stores.returned_states import ReturnedStates
from kvlayers.stores.segmented import GROWTH_DIVISOR, MAXIMUM_SEGMENTS, SegmentedStore
from kvlayers.stores.validation import promoted_forms

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
class DenseStore(SegmentedStore):
    """Full-precision states in buffers that grow geometrically. What forks have in common is in segments.

    Args:
        length_hint: the most tokens that are expected, if known. Growth stops there while the hint holds, so that the
            last growth is not too large. It is not a limit: more tokens still fit.
        growth_divisor: a full buffer grows by its size divided by this.
        minimum_growth: fewest tokens by which it grows.
        prefix_room: slots left free before the tokens; see `ContiguousStore`.
        maximum_segments: if there are more, the smallest neighbours are merged.
    """

    hints = ("length_hint", "growth_divisor", "minimum_growth", "prefix_room", "maximum_segments")

    def __init__(
        self,
        length_hint: int | None = None,
        growth_divisor: int = GROWTH_DIVISOR,
        minimum_growth: int = MINIMUM_GROWTH,
        prefix_room: int = 0,
        maximum_segments: int = MAXIMUM_SEGMENTS,
    ) -> None:
        super().__init__(prefix_room, maximum_segments, minimum_growth)
        self.length_hint = length_hint
        self.growth_divisor = growth_divisor

    @override
    def grown_capacity(self, needed: int) -> int:
        shared = self._shared_tokens
        if not shared:
            return self.capacity_for(needed, self.length_hint)
        hint = None if self.length_hint is None else self.length_hint - shared
        return self._grown(needed, hint, min(self.minimum_growth, TAIL_MINIMUM_GROWTH))

    def capacity_for(self, needed: int, length_hint: int | None) -> int:
        """Tokens to allocate when `needed` tokens must fit, in a store with this length hint."""
        return self._grown(needed, length_hint, self.minimum_growth)

    def _grown(self, needed: int, length_hint: int | None, minimum_growth: int) -> int:
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
