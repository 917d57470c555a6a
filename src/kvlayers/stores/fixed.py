"""Tokens in full precision, in buffers that are reserved once and stay where they are."""

from typing_extensions import override

from .buffer import StateForm
from .contiguous import ContiguousStore


class FixedStore(ContiguousStore):
    """Full-precision states in buffers of `capacity` tokens, reserved when the first states come.

    Args:
        capacity: tokens to reserve.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(limit=capacity)
        self.capacity = capacity

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        super().reserve_form(key_form, value_form)
        self._allocate(self.capacity)

    @override
    def _make_room(self, tokens: int) -> None:
        # What autograd follows may be the caller's own, and is moved out of rather than within.
        if self._capacity < self.capacity or self._tracks_gradients:
            self._allocate(self.capacity)
        else:
            self._shift_to_front()

    @override
    def reserve(self, tokens: int) -> None:
        """Make sure that `tokens` tokens fit. A reservation that is too small is given up for a larger one."""
        if tokens > self.capacity:
            self._resize(tokens + tokens // 4)
        self._take_form(tokens)

    @override
    def shrink(self, tokens: int) -> None:
        if tokens < self.capacity:
            self._resize(tokens)

    def _resize(self, tokens: int) -> None:
        self.capacity = self.limit = tokens
        if self._keys is not None and not self._tracks_gradients:
            self._allocate(tokens)
