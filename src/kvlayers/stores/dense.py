"""Tokens in full precision, in buffers that grow in place."""

from torch import Tensor
from typing_extensions import Self, override

from kvlayers.stores.buffer import StateForm, nbytes_of
from kvlayers.stores.contiguous import ContiguousStore
from kvlayers.stores.contract import Fidelity
from kvlayers.stores.description import DescriptionContext, Facts
from kvlayers.stores.registry import register_store

GROWTH_DIVISOR = 8
"""A full buffer grows by one part in so many: at most an eighth is spare, and a token is moved 8 times on average."""

MINIMUM_GROWTH = 128
"""Tokens by which a buffer grows at least, so that short sequences are not moved every few tokens."""


@register_store
class DenseStore(ContiguousStore):
    """Full-precision states in buffers that grow geometrically.

    Args:
        length_hint: the most tokens that are expected, where that is known. Growth stops there as long as the hint
            holds, so that the last growth is not too large. It is no limit: more tokens than that still fit.
        growth_divisor: a full buffer grows by one part in so many.
        minimum_growth: tokens by which it grows at least.
        front_room: slots that are left free before the tokens; see `ContiguousStore`.
    """

    shares_prefixes = True

    def __init__(
        self,
        length_hint: int | None = None,
        growth_divisor: int = GROWTH_DIVISOR,
        minimum_growth: int = MINIMUM_GROWTH,
        front_room: int = 0,
    ) -> None:
        super().__init__(front_room=front_room)
        self.length_hint = length_hint
        self.growth_divisor = growth_divisor
        self.minimum_growth = minimum_growth

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        return cls(context.length_hint)

    def grown_capacity(self, needed: int) -> int:
        """Tokens to allocate when `needed` tokens must fit."""
        return self._capacity_for(needed, self.length_hint)

    def _capacity_for(self, needed: int, length_hint: int | None) -> int:
        capacity = needed + max(needed // self.growth_divisor, self.minimum_growth)
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

    @override
    def planned_nbytes(self, key_form: StateForm, value_form: StateForm, tokens: int, sized_for: int | None) -> int:
        capacity = self._capacity_for(tokens, sized_for) + self.front_room if tokens else 0
        return nbytes_of(key_form, capacity) + nbytes_of(value_form, capacity)

    @override
    def _make_room(self, tokens: int) -> None:
        length = self.length
        needed = length + tokens
        # Moving to the front must be paid for by the room that it wins, or a window would be copied at every token.
        dropped = self._start - self.front_room
        fits = needed + self.front_room <= self._capacity
        if fits and dropped * GROWTH_DIVISOR >= length and not self._tracks_gradients and self._sharing is None:
            self._shift_to_front()
        else:
            self._allocate(self.grown_capacity(needed))

    @override
    def _room_alone(self, tokens: int) -> int:
        return min(self._capacity - self._start, self.grown_capacity(self.length + tokens))

    @override
    def select(self, indices: Tensor) -> None:
        if self._keys is None or self._values is None or self._tracks_gradients:
            super().select(indices)
            return
        length, free = self.length, self.front_room
        capacity = min(max(self._capacity, free + length), free + self.grown_capacity(length))
        keys = self._keys.selected(indices, self._start, length, capacity, free)
        values = self._values.selected(indices, self._start, length, capacity, free)
        self._hold_alone(keys, values)
        self._start, self._end, self._capacity = free, free + length, capacity
        self._key_form, self._value_form = keys.form, values.form

    def selected(self, indices: Tensor) -> Self:
        """A store of those sequences, in memory of its own; this one stays what it is."""
        if self._tracks_gradients:
            twin = self.fork()
        else:
            twin = self.__class__.__new__(self.__class__)
            twin.__dict__.update(self.__dict__, _sharing=None)
        twin.select(indices)
        return twin

    @override
    def rewritten(self, keys: Tensor, values: Tensor) -> Self:
        fresh = self.snapshot()
        fresh._release()
        fresh.validate(keys, values)
        fresh.append(keys, values)
        return fresh

    @override
    def reserve(self, tokens: int) -> None:
        self._take_form(tokens)
        # To new buffers, never within these: the states to come may be a view of them. And what autograd follows is
        # concatenated when they come, not moved.
        if self._start + tokens > self._capacity and not self._tracks_gradients:
            self._allocate(self.grown_capacity(tokens))

    @override
    def shrink(self, tokens: int) -> None:
        if self._capacity - self.front_room > self.grown_capacity(tokens) and not self._tracks_gradients:
            self._allocate(self.grown_capacity(tokens))
