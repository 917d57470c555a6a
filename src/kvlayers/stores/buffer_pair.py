"""A pair of buffers, one for keys and one for values, that forks and callers may share."""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.errors import StateMismatchError
from kvlayers.stores.buffer import StateForm, TokenBuffer
from kvlayers.stores.contract import BufferSwap, KVPair, TokenStore
from kvlayers.stores.copy_on_write import CopyOnWrite

_first_fork = threading.Lock()


class BufferPair(TokenStore):
    """The memory of a store: tokens from `_start` to `_end` of two buffers.

    Args:
        prefix_room: slots left free before the tokens whenever they are moved, for states that are attended to in
            front of them.
    """

    def __init__(self, prefix_room: int = 0) -> None:
        self.prefix_room = prefix_room
        self._keys: TokenBuffer | None = None
        self._values: TokenBuffer | None = None
        self._key_form: StateForm | None = None
        self._value_form: StateForm | None = None
        self._start = 0
        self._end = 0
        self._capacity = 0
        self._tracks_gradients = False
        self._copy_on_write: CopyOnWrite | None = None
        self._views: tuple[tuple[TokenBuffer | None, int, int], KVPair] | None = None
        self._is_invalid = False

    # Reading

    @property
    @override
    def length(self) -> int:
        return self._end - self._start

    @property
    def tail_length(self) -> int:
        """Tokens in the buffers."""
        return self._end - self._start

    @property
    def fixed_slots(self) -> tuple[int, int] | None:
        """See `BufferHolder`."""
        return None

    def note_move(self) -> None:
        """See `BufferHolder`."""

    @property
    @override
    def key_form(self) -> StateForm | None:
        return self._key_form

    @property
    @override
    def value_form(self) -> StateForm | None:
        return self._value_form

    def _forms(self) -> tuple[StateForm, StateForm]:
        if self._key_form is None or self._value_form is None:
            raise StateMismatchError("The store is empty, so it has no states to read: update the layer first.")
        return self._key_form, self._value_form

    @override
    def newest_keys(self, count: int) -> Tensor:
        return self._buffers()[0].read(self._end - count, count)

    @override
    def newest_values(self, count: int) -> Tensor:
        return self._buffers()[1].read(self._end - count, count)

    @override
    def newest(self, count: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys, self._values
        if keys is None or values is None:
            keys, values = self._buffers()
        start = self._end - count
        if keys.tracks_gradients or values.tracks_gradients or torch.compiler.is_compiling():
            return keys.read(start, count), values.read(start, count)
        return keys.view(start, count), values.view(start, count)

    @override
    def caller_views(self) -> KVPair:
        # Compiled code reads at once.
        if torch.compiler.is_compiling():
            return self.newest(self.length)
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

    # Memory

    def _buffers(self) -> tuple[TokenBuffer, TokenBuffer]:
        if self._keys is None or self._values is None:
            self._allocate(0)
        return self._keys, self._values  # type: ignore[return-value]

    def _allocate(self, capacity: int) -> None:
        """Move the held tokens to new buffers for `capacity` tokens, behind the room for a prefix."""
        key_form, value_form = self._forms()
        length, free = self.tail_length, self.prefix_room
        capacity += free
        if self._keys is not None and self._values is not None:
            # Both are made before either is assigned: if there is no memory for the second, nothing has changed.
            keys = self._keys.reallocated(self._start, length, capacity, free)
            values = self._values.reallocated(self._start, length, capacity, free)
        else:
            keys = TokenBuffer.allocate(key_form, capacity)
            values = TokenBuffer.allocate(value_form, capacity)
        # No call in between, so that an interrupt finds all of it done, or nothing.
        sharing, self._copy_on_write, self._keys, self._values = self._copy_on_write, None, keys, values
        self._views = None
        self._start, self._end, self._capacity = free, free + length, capacity
        self._tracks_gradients = False
        if sharing is not None:
            sharing.leave(self)

    def _set_buffers(self, keys: TokenBuffer | None, values: TokenBuffer | None) -> None:
        """Hold buffers that no other store holds."""
        if self._copy_on_write is not None:
            self._copy_on_write.leave(self)
            self._copy_on_write = None
        self._keys, self._values, self._views = keys, values, None

    def _shift_to_front(self) -> None:
        key_buffer, value_buffer = self._buffers()
        length, free = self.tail_length, self.prefix_room
        try:
            key_buffer.shift_to_front(self._start, length, free)
            value_buffer.shift_to_front(self._start, length, free)
        except BaseException:
            self._invalidate()
            raise
        self._start, self._end = free, free + length

    def _invalidate(self) -> None:
        """Hold nothing and refuse to go on, because keys and values no longer belong to the same tokens."""
        self._release()
        self._key_form = self._value_form = None
        self._is_invalid = True

    def _set_end(self, end: int) -> None:
        self._end = end

    def _release(self) -> None:
        self._set_buffers(None, None)
        self._start = self._capacity = 0
        self._set_end(0)
        self._tracks_gradients = False

    @override
    def swap_buffers(self, swap: BufferSwap) -> None:
        if self._keys is not None and self._values is not None:
            start, end = self._start, self._end
            keys, values = swap(self._keys, start, end), swap(self._values, start, end)
            if keys is not self._keys or values is not self._values:
                self._set_buffers(keys, values)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from (buffer.tensor for buffer in (self._keys, self._values) if buffer is not None)

    # Sharing

    def retire(self) -> None:
        """Stop holding tokens. Nobody writes where they are, as states that were returned may still read them."""
        if self._copy_on_write is not None:
            self._copy_on_write.leave(self)

    def reads(self, start: int, end: int) -> bool:
        """Whether any held token is in the slots from `start` to `end`."""
        return start < self._end and self._start < end

    def _may_write(self, start: int, end: int) -> bool:
        """Whether no other store and no caller uses the slots from `start` to `end`. No other store may from now on."""
        sharing = self._copy_on_write
        if sharing is None or sharing.is_over:
            self._copy_on_write = None
            return True
        return sharing.claim(self, start, end)

    def _leave_buffers(self, tokens: int) -> None:
        """Go on in buffers of its own, with room for `tokens` more tokens."""
        self._allocate(self._capacity_of_copy(tokens))

    def _capacity_of_copy(self, tokens: int) -> int:
        """Tokens to allocate for a copy with room for `tokens` more tokens, for which these buffers have room."""
        return self._capacity - self._start

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
    def snapshot(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        if self._copy_on_write is not None:
            self._copy_on_write.join(twin)
        return twin

    @override
    def fork(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        if self._can_share():
            sharing = self._sharing()
            twin.__dict__.update(self.__dict__)
            sharing.join(twin)
        else:
            twin.__dict__.update(self.__getstate__())
        return twin

    def _can_share(self) -> bool:
        """Whether a fork may hold the same buffers.

        It may not if they are offloaded, if autograd follows them, or if a caller has a view to write to.
        """
        plain = type(self._keys) is TokenBuffer and type(self._values) is TokenBuffer
        viewed = self._copy_on_write is not None and self._copy_on_write.is_viewed
        return plain and not self._tracks_gradients and not viewed

    def _sharing(self) -> CopyOnWrite:
        """The record of who shares these buffers, which is made when it is first needed."""
        # Threads may fork one store at the same time: all forks must know of each other.
        with _first_fork:
            if self._copy_on_write is None:
                sharing = CopyOnWrite(*self._buffers())
                sharing.join(self)
                self._copy_on_write = sharing
            return self._copy_on_write

    def __getstate__(self) -> dict[str, Any]:
        # Copies of the live tokens alone: spare room and dropped tokens are not part of the state.
        live = {**self.__dict__, "_copy_on_write": None, "_views": None}
        if self._keys is not None and self._values is not None:
            start, length = self._start, self.tail_length
            if self._tracks_gradients and not torch.is_inference_mode_enabled():
                keys, values = (TokenBuffer(states.clone()) for states in self.newest(length))
            else:
                # Not clones: a clone made in inference mode could never be written to outside of it.
                keys, values = (buffer.reallocated(start, length, length) for buffer in (self._keys, self._values))
            live["_keys"], live["_values"] = keys, values
            live["_tracks_gradients"] = keys.tracks_gradients or values.tracks_gradients
        live["_start"], live["_end"] = 0, self.tail_length
        live["_capacity"] = self.tail_length
        return live
