"""Tokens side by side in a pair of buffers: what dense and fixed stores share."""

import copy
import threading
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.attention.gqa import attended_by_one_query
from kvlayers.errors import InterruptedPassError, StateMismatchError
from kvlayers.stores.buffer import StateForm, TokenBuffer
from kvlayers.stores.contract import Mover, StatePair, TokenStore
from kvlayers.stores.copy_on_write import CopyOnWrite
from kvlayers.stores.validation import check_dense_state, check_one_batch, checked_forms, mismatch, no_room_for_tokens
from kvlayers.upstream import compat

_first_fork = threading.Lock()


class ContiguousStore(TokenStore):
    """Tokens from `_start` to `_end` of two buffers, one for keys and one for values.

    New tokens are written behind `_end` and dropped ones are stepped over by moving `_start`, so both cost nothing but
    the new tokens. When the end of the buffers is reached, `_make_room` decides what to do: that is the one question
    in which the stores differ.

    `limit` is the most tokens that the store may hold, `None` for no limit. `front_room` slots are left free before the
    tokens wherever they are moved, for those that are attended to in front of them.

    If autograd follows the states, or `torch.export` traces the code, they are concatenated instead, and the buffers
    that result have no spare room: no write ever changes a tensor that a backward pass still needs, nor an input of a
    program.
    """

    holds_tokens_apart = True

    def __init__(self, limit: int | None = None, front_room: int = 0) -> None:
        self.limit = limit
        self.front_room = front_room
        self._keys: TokenBuffer | None = None
        self._values: TokenBuffer | None = None
        self._key_form: StateForm | None = None
        self._value_form: StateForm | None = None
        self._start = 0
        self._end = 0
        self._capacity = 0
        self._tracks_gradients = False
        self._admitted: tuple[StateForm, StateForm] | None = None
        self._sharing: CopyOnWrite | None = None
        self._handed_out: tuple[tuple[TokenBuffer | None, int, int], StatePair] | None = None
        self._is_lost = False

    @abstractmethod
    def _make_room(self, tokens: int) -> None:
        """Change the buffers so that `tokens` more, which are within the limit, fit behind `_end`."""

    @property
    @override
    def length(self) -> int:
        return self._end - self._start

    @property
    @override
    def key_form(self) -> StateForm | None:
        return self._key_form

    @property
    @override
    def value_form(self) -> StateForm | None:
        return self._value_form

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        key_form, value_form = checked_forms(keys, values)
        self._admitted = None
        if key_form != self._key_form or value_form != self._value_form:
            if self._is_lost:
                raise InterruptedPassError(
                    "expected the tokens that were held, but saw them lost, as moving them was interrupted: reset() "
                    "the cache, and pass all tokens again."
                )
            if self._start != self._end:
                raise mismatch((key_form, value_form), (self._key_form, self._value_form), self.length)
            check_one_batch(key_form, value_form)
            self._admitted = key_form, value_form
        return keys.shape[2]

    def _take_form(self, tokens: int) -> None:
        """Be the store of states of the form that was admitted, if `tokens` of them fit."""
        if self._admitted is not None:
            self.check_room(tokens)
            self.reserve_form(*self._admitted)
            self._admitted = None

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        self._release()
        self._key_form, self._value_form = key_form, value_form

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        tokens = keys.shape[2]
        if self._admitted is not None:
            self._take_form(tokens)
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
            keys, values = self._apart(keys), self._apart(values)
            self._make_room(tokens)
        elif not tokens:
            return
        elif self._sharing is not None:
            self._part_unless_writable(self._end, self._end + tokens)
        end = self._end
        self._keys.write(end, keys)  # type: ignore[union-attr]
        self._values.write(end, values)  # type: ignore[union-attr]
        self._advance(tokens)

    def _advance(self, tokens: int) -> None:
        """Count `tokens` that were written behind `_end`."""
        self._end += tokens

    @override
    def extend(
        self, keys: Tensor, values: Tensor, past: int | None = None, front: StatePair | None = None
    ) -> StatePair:
        tokens = keys.shape[2]
        self.append(keys, values)
        count = self.length if past is None else past + tokens
        attended = self.newest(count) if front is None else self._newest_behind(front, count)
        return (attended_by_one_query(attended[0]), attended[1]) if tokens == 1 else attended

    def _newest_behind(self, front: StatePair, count: int) -> StatePair:
        """Other tokens and the newest `count`: in one piece of memory, where nothing is held between the two."""
        width = front[0].shape[2]
        if count < self.length or self._tracks_gradients or front[0].requires_grad or front[1].requires_grad:
            keys, values = self.newest(count)
            return torch.cat([front[0], keys], dim=2), torch.cat([front[1], values], dim=2)
        if self._start < width:
            self._allocate(self._capacity - self._start)
        elif self._sharing is not None:
            self._part_unless_writable(self._start - width, self._start)
        key_buffer, value_buffer = self._buffers()
        start = self._start - width
        key_buffer.write(start, front[0])
        value_buffer.write(start, front[1])
        return key_buffer.read(start, width + count), value_buffer.read(start, width + count)

    @override
    def extend_and_evict(
        self, keys: Tensor, values: Tensor, past: int, kept: int, front: StatePair | None = None
    ) -> StatePair:
        held = [*([] if front is None else [front]), *([self.newest(past)] if past else [])]
        if held:
            keys = torch.cat([*(states[0] for states in held), keys], dim=2)
            values = torch.cat([*(states[1] for states in held), values], dim=2)
        start = keys.shape[2] - kept
        self.replace(keys.narrow(2, start, kept), values.narrow(2, start, kept))
        return keys, values

    @override
    def hand_out(self) -> StatePair:
        # Compiled code reads at once.
        if torch.compiler.is_compiling():
            return self.newest(self.length)
        # What autograd follows is never written to. Models with cross-attention read the same tokens at every step.
        shown = self._sharing is not None and self._sharing.shows(self._start, self._end)
        if not shown and not self._tracks_gradients and self._start != self._end:
            if self._sharing is not None and not self._sharing.has_one_holder:
                self._allocate(self._room_alone(0))
            self._shared().hand_out(self._start, self._end)
        return self._views()

    def _views(self) -> StatePair:
        """All tokens, in the same tensors until they are others or elsewhere."""
        place = self._keys, self._start, self._end
        if self._handed_out is None or self._handed_out[0] != place:
            self._handed_out = place, self.newest(self.length)
        return self._handed_out[1]

    def reads(self, start: int, end: int) -> bool:
        """Whether any token that is held is in the slots from `start` to `end`."""
        return start < self._end and self._start < end

    def _part_unless_writable(self, start: int, end: int) -> None:
        """Go on in buffers of its own where other stores have a say in some slots."""
        if self._sharing is None or (self._sharing.has_one_holder and not self._sharing.is_handed_out):
            self._sharing = None
        elif not self._sharing.may_write(self, start, end):
            self._allocate(self._room_alone(max(end - self._end, 0)))

    def _room_alone(self, tokens: int) -> int:
        """Tokens to allocate for those that are held and `tokens` more, where these buffers have room for them."""
        return self._capacity - self._start

    def _apart(self, states: Tensor) -> Tensor:
        """States that making room cannot move: a copy, where they are a view of what was returned before."""
        if self._keys is None or self._values is None:
            return states
        if torch.compiler.is_compiling():
            # No address can be asked for there, and asking would break the graph in each layer.
            return states.clone()
        storage = states.untyped_storage().data_ptr()
        buffers = (self._keys, self._values)
        if any(buffer.tensor.untyped_storage().data_ptr() == storage for buffer in buffers):
            return states.clone()
        return states

    def check_room(self, tokens: int) -> None:
        """Raise `CapacityError` where `tokens` more are beyond the limit."""
        if self.limit is not None and self.length + tokens > self.limit:
            raise no_room_for_tokens(self.limit, self.length, tokens)

    def _concatenate(self, keys: Tensor, values: Tensor) -> None:
        if self._start == self._end:
            self._adopt(keys.clone(), values.clone())
        else:
            held = self.newest(self.length)
            self._adopt(torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2))

    def _adopt(self, keys: Tensor, values: Tensor) -> None:
        self._hold_alone(TokenBuffer(keys), TokenBuffer(values))
        self._start, self._end = 0, keys.shape[2]
        self._capacity = self._end
        # What is traced for a program is as little to be written to as what autograd follows.
        self._tracks_gradients = keys.requires_grad or values.requires_grad or compat.is_exporting()

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Hold a copy of admitted states in place of everything held so far."""
        if self._admitted is not None:
            self._take_form(keys.shape[2])
        tracked = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        if tracked or compat.is_exporting():
            self._adopt(keys.clone(), values.clone())
            return
        held = self.length
        try:
            self.clear()
            self.append(keys, values)
        except BaseException:
            if held:
                self._lose()
            raise

    @override
    def newest_keys(self, count: int) -> Tensor:
        return self._buffers()[0].read(self._end - count, count)

    @override
    def newest_values(self, count: int) -> Tensor:
        return self._buffers()[1].read(self._end - count, count)

    @override
    def newest(self, count: int) -> tuple[Tensor, Tensor]:
        keys, values = self._buffers()
        start = self._end - count
        return keys.read(start, count), values.read(start, count)

    @override
    def drop_oldest(self, count: int) -> None:
        self._start += count

    @override
    def truncate(self, length: int) -> None:
        self._end = self._start + length
        if self._tracks_gradients:
            # No spare room, so that the next tokens are concatenated or moved rather than written over these.
            self._adopt(*self.newest(length))

    @override
    def clear(self) -> None:
        self._start = self._end = min(self.front_room, self._capacity)
        self._is_lost = False
        if self._tracks_gradients:
            self._release()

    @override
    def select(self, indices: Tensor) -> None:
        if self._key_form is None or self._value_form is None:
            return
        batch = indices.shape[0]
        key_form, value_form = (batch, *self._key_form[1:]), (batch, *self._value_form[1:])
        if not self.length:
            if key_form != self._key_form:
                self.reserve_form(key_form, value_form)
            return
        keys, values = self.newest(self.length)
        indices = indices.to(keys.device)
        keys, values = keys.index_select(0, indices), values.index_select(0, indices.to(values.device))
        if key_form == self._key_form:
            self.replace(keys, values)
            return
        # Another store first: where there is no memory for it, this one is still what it was.
        other = copy.copy(self)
        other.reserve_form(key_form, value_form)
        other.replace(keys, values)
        self._hold_alone(None, None)
        self.__dict__.update(other.__dict__)

    @override
    def swap_buffers(self, move: Mover) -> None:
        if self._keys is not None and self._values is not None:
            start, end = self._start, self._end
            keys, values = move(self._keys, start, end), move(self._values, start, end)
            if keys is not self._keys or values is not self._values:
                self._hold_alone(keys, values)

    @override
    def snapshot(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        if self._sharing is not None:
            self._sharing.join(twin)
        return twin

    @override
    def state(self) -> dict[str, Tensor]:
        if self._key_form is None:
            return {}
        keys, values = self.newest(self.length)
        return {"keys": keys.clone(), "values": values.clone()}

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        return check_dense_state(tensors)

    @override
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.clear()
        if tensors:
            keys, values = tensors["keys"], tensors["values"]
            # What was recorded for a rollback is part of a state, and may be more than a reservation has room for.
            self.reserve(self.validate(keys, values))
            self.append(keys, values)

    @override
    def fork(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        if self._can_share():
            sharing = self._shared()
            twin.__dict__.update(self.__dict__)
            sharing.join(twin)
        else:
            twin.__dict__.update(self.__getstate__())
        return twin

    def _can_share(self) -> bool:
        """Whether a fork may hold the same buffers.

        It may not if they are at home elsewhere, if autograd follows them, or if the caller has a view to write to.
        """
        plain = type(self._keys) is TokenBuffer and type(self._values) is TokenBuffer
        handed_out = self._sharing is not None and self._sharing.is_handed_out
        return plain and not self._tracks_gradients and not handed_out

    def _shared(self) -> CopyOnWrite:
        """What the holders of these buffers have in common."""
        # Threads may fork one store at the same time: all of the forks must be told of each other.
        with _first_fork:
            if self._sharing is None:
                sharing = CopyOnWrite()
                sharing.join(self)
                self._sharing = sharing
            return self._sharing

    def __getstate__(self) -> dict[str, Any]:
        # Only live tokens travel, in copies: spare room and dropped tokens are no part of what a store means.
        live = {**self.__dict__, "_sharing": None, "_handed_out": None}
        if self._keys is not None and self._values is not None:
            start, length = self._start, self.length
            if self._tracks_gradients and not torch.is_inference_mode_enabled():
                keys, values = (TokenBuffer(states.clone()) for states in self.newest(length))
            else:
                # Not clones: one that is made in inference mode could never be written to outside of it.
                keys, values = (buffer.moved(start, length, length) for buffer in (self._keys, self._values))
            live["_keys"], live["_values"] = keys, values
            live["_tracks_gradients"] = keys.tracks_gradients or values.tracks_gradients
        live["_start"], live["_end"] = 0, self.length
        live["_capacity"] = self.length
        return live

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from (buffer.tensor for buffer in (self._keys, self._values) if buffer is not None)

    def _buffers(self) -> tuple[TokenBuffer, TokenBuffer]:
        if self._keys is None or self._values is None:
            self._allocate(0)
        return self._keys, self._values  # type: ignore[return-value]

    def _allocate(self, capacity: int) -> None:
        """Take new buffers for `capacity` tokens, and bring what is held to their front, behind the room there."""
        if self._key_form is None or self._value_form is None:
            raise StateMismatchError("expected admitted states before any are read: update the layer first.")
        length, free = self.length, self.front_room
        capacity += free
        if self._keys is not None and self._values is not None:
            # Both before either is put in place: where there is no memory for the second, nothing has changed.
            keys = self._keys.moved(self._start, length, capacity, free)
            values = self._values.moved(self._start, length, capacity, free)
        else:
            keys = TokenBuffer.allocate(self._key_form, capacity)
            values = TokenBuffer.allocate(self._value_form, capacity)
        # Without a call between: an interrupt finds all of it done, or nothing.
        sharing, self._sharing, self._keys, self._values = self._sharing, None, keys, values
        self._handed_out = None
        self._start, self._end, self._capacity = free, free + length, capacity
        self._tracks_gradients = False
        if sharing is not None:
            sharing.leave(self)

    def _hold_alone(self, keys: TokenBuffer | None, values: TokenBuffer | None) -> None:
        """Hold buffers that no other store holds."""
        if self._sharing is not None:
            self._sharing.leave(self)
            self._sharing = None
        self._keys, self._values, self._handed_out = keys, values, None

    def _shift_to_front(self) -> None:
        key_buffer, value_buffer = self._buffers()
        length, free = self.length, self.front_room
        try:
            key_buffer.shift_to_front(self._start, length, free)
            value_buffer.shift_to_front(self._start, length, free)
        except BaseException:
            self._lose()
            raise
        self._start, self._end = free, free + length

    def _lose(self) -> None:
        """Hold nothing and refuse to go on, as keys and values are no longer of the same tokens."""
        self._release()
        self._key_form = self._value_form = None
        self._is_lost = True

    def _release(self) -> None:
        self._hold_alone(None, None)
        self._start = self._end = self._capacity = 0
        self._tracks_gradients = False
