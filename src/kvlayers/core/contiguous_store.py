"""Tokens side by side in a pair of buffers, which forks and callers may share: the base of dense and static stores."""

import copy
import threading
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import check_dense_state, check_one_batch, checked_forms, mismatch, no_room_for_tokens
from kvlayers.core.buffer import StateForm, TokenBuffer
from kvlayers.core.sharing import CopyOnWrite
from kvlayers.core.token_store import BufferSwap, KVPair, TokenStore
from kvlayers.errors import InterruptedPassError, StateMismatchError
from kvlayers.kernels.attention.gqa import first_grouped_length, marked_for_sdpa
from kvlayers.kernels.attention.packed_tensor import PackedStates, as_dense
from kvlayers.upstream import compat

_first_fork = threading.Lock()


@dataclass(frozen=True, slots=True)
class ValidStates:
    """New states that were valid.

    Attributes:
        facts: shapes, dtypes and devices of keys and values.
        key_form: form of the held keys, the very object.
        value_form: form of the held values, likewise.
        first_grouped_length: tokens from which such keys are marked for SDPA, if there is one new token.
    """

    facts: tuple[object, ...]
    key_form: StateForm | None
    value_form: StateForm | None
    first_grouped_length: int


def _facts_of(keys: Tensor, values: Tensor) -> tuple[object, ...]:
    return keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device


class ContiguousStore(TokenStore):
    """Tokens from `_start` to `_end` of two buffers, one for keys and one for values.

    New tokens are written after `_end`, and dropped ones are skipped by moving `_start`, so an update costs only the
    new tokens. At the end of the buffers `_make_room` decides what to do; stores differ mainly in that method.

    If autograd follows the states, or `torch.export` traces the code, states are concatenated instead, and the
    resulting buffers have no spare room: no write changes a tensor that a backward pass still needs, or an input of an
    exported program.

    Args:
        limit: the most tokens that the store may hold, `None` for no limit.
        prefix_room: slots left free before the tokens whenever they are moved, for states that are attended to in
            front of them.
    """

    holds_tokens_apart = True

    def __init__(self, limit: int | None = None, prefix_room: int = 0) -> None:
        self.limit = limit
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
        self._validated: tuple[StateForm, StateForm] | None = None
        self._last_valid: ValidStates | None = None

    @abstractmethod
    def _make_room(self, tokens: int) -> None:
        """Change the buffers so that `tokens` more, which are within the limit, fit after `_end`."""

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

    # Taking in states

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        self._validated = None
        if torch.compiler.is_compiling():
            return self._validate(keys, values)
        if not self._is_as_before(keys, values):
            self._validate(keys, values)
            facts = _facts_of(keys, values)
            valid = ValidStates(facts, self._key_form, self._value_form, first_grouped_length(keys))
            self._last_valid = None if self._validated else valid
        return keys.shape[2]

    def _is_as_before(self, keys: Tensor, values: Tensor) -> bool:
        """Whether states have the shapes, dtypes and devices of the last valid states, and may follow them."""
        last = self._last_valid
        if last is None or last.key_form is not self._key_form or last.value_form is not self._value_form:
            return False
        return _facts_of(keys, values) == last.facts

    def _validate(self, keys: Tensor, values: Tensor) -> int:
        key_form, value_form = checked_forms(keys, values)
        if key_form != self._key_form or value_form != self._value_form:
            if self._is_invalid:
                raise InterruptedPassError(
                    "The held tokens are lost, because moving them was interrupted: reset() the cache, and pass all "
                    "tokens again."
                )
            if self.length:
                return self._validate_other_form(keys, (key_form, value_form))
            check_one_batch(key_form, value_form)
            self._validated = key_form, value_form
        return keys.shape[2]

    def _validate_other_form(self, keys: Tensor, forms: tuple[StateForm, StateForm]) -> int:
        """As `_validate`, for forms that differ from those of the held tokens."""
        raise mismatch(forms, (self._key_form, self._value_form), self.length)

    def _apply_form(self, tokens: int) -> None:
        """Take on the form that was validated, if `tokens` of that form fit."""
        if self._validated is not None:
            self.check_room(tokens)
            forms, self._validated = self._validated, None
            self._take_on(*forms)

    def _take_on(self, key_form: StateForm, value_form: StateForm) -> None:
        """Take on forms that were validated."""
        self.reserve_form(key_form, value_form)

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        self._release()
        self._key_form, self._value_form = key_form, value_form

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
            self._leave_buffers(tokens)
        key_buffer, value_buffer = self._buffers()
        key_buffer.write(self._end, keys)
        value_buffer.write(self._end, values)
        self._advance(tokens)

    def _advance(self, tokens: int) -> None:
        """Count `tokens` that were written after `_end`."""
        self._end += tokens

    @override
    def extend(
        self, keys: Tensor, values: Tensor, past: int | None = None, prefix_states: KVPair | None = None
    ) -> KVPair:
        tokens = keys.shape[2]
        self.append(keys, values)
        count = self.length if past is None else past + tokens
        attended = self.newest(count) if prefix_states is None else self._newest_after_prefix(prefix_states, count)
        return attended if type(attended[0]) is PackedStates else marked_for_sdpa(*attended, tokens)

    def _newest_after_prefix(self, prefix: KVPair, count: int) -> KVPair:
        """A prefix and the newest `count` tokens: a view if no other held token is in between."""
        width = prefix[0].shape[2]
        if count < self.length or self._tracks_gradients or prefix[0].requires_grad or prefix[1].requires_grad:
            keys, values = self.newest(count)
            return torch.cat([prefix[0], keys], dim=2), torch.cat([prefix[1], values], dim=2)
        if self._start < width:
            self._allocate(self._capacity - self._start)
        elif self._copy_on_write is not None and not self._may_write(self._start - width, self._start):
            self._leave_buffers(0)
            return self._newest_after_prefix(prefix, count)
        key_buffer, value_buffer = self._buffers()
        start = self._start - width
        key_buffer.write(start, prefix[0])
        value_buffer.write(start, prefix[1])
        return key_buffer.read(start, width + count), value_buffer.read(start, width + count)

    @override
    def extend_and_evict(
        self, keys: Tensor, values: Tensor, past: int, kept: int, prefix_states: KVPair | None = None
    ) -> KVPair:
        tokens = keys.shape[2]
        held = [*([] if prefix_states is None else [prefix_states]), *([self._plain(past)] if past else [])]
        if held:
            keys = torch.cat([*(states[0] for states in held), keys], dim=2)
            values = torch.cat([*(states[1] for states in held), values], dim=2)
        start = keys.shape[2] - kept
        self.replace(keys.narrow(2, start, kept), values.narrow(2, start, kept))
        return marked_for_sdpa(keys, values, tokens)

    def _plain(self, count: int) -> KVPair:
        """Keys and values of the newest `count` tokens, as plain tensors."""
        keys, values = self.newest(count)
        return as_dense(keys), as_dense(values)

    def check_room(self, tokens: int) -> None:
        """Raise `CapacityError` if `tokens` more exceed the limit."""
        if self.limit is not None and self.length + tokens > self.limit:
            raise no_room_for_tokens(self.limit, self.length, tokens)

    def _concatenate(self, keys: Tensor, values: Tensor) -> None:
        if self._start == self._end:
            self._adopt(keys.clone(), values.clone())
        else:
            held = self.newest(self.tail_length)
            self._adopt(torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2))

    def _adopt(self, keys: Tensor, values: Tensor) -> None:
        """Hold these tensors themselves as full buffers."""
        self._set_buffers(TokenBuffer(keys), TokenBuffer(values))
        self._start, self._capacity = 0, keys.shape[2]
        self._set_end(self._capacity)
        # Tensors of a traced program must not be written to, just like tensors that autograd follows.
        self._tracks_gradients = keys.requires_grad or values.requires_grad or compat.is_exporting()

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Hold a copy of validated states in place of all held tokens."""
        if self._validated is not None:
            self._apply_form(keys.shape[2])
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
                self._invalidate()
            raise

    # Dropping, cropping and the batch

    @override
    def drop_oldest(self, count: int) -> None:
        self._start += count

    @override
    def truncate(self, length: int) -> None:
        self._set_end(self._start + length)
        if self._tracks_gradients:
            # No spare room, so that the next tokens are concatenated or moved rather than written over these.
            self._adopt(*self.newest(length))

    @override
    def clear(self) -> None:
        self._start = min(self.prefix_room, self._capacity)
        self._set_end(self._start)
        self._is_invalid = False
        if self._tracks_gradients:
            self._release()

    @override
    def select(self, indices: Tensor) -> None:
        if self._key_form is None or self._value_form is None:
            return
        batch = indices.shape[0]
        key_form, value_form = self._key_form.of_batch(batch), self._value_form.of_batch(batch)
        if not self.length:
            if key_form != self._key_form:
                self.reserve_form(key_form, value_form)
            return
        keys, values = self._plain(self.length)
        indices = indices.to(keys.device)
        keys, values = keys.index_select(0, indices), values.index_select(0, indices.to(values.device))
        if key_form == self._key_form:
            self.replace(keys, values)
            return
        # First in another store: if there is no memory for it, this one has not changed.
        other = copy.copy(self)
        other.reserve_form(key_form, value_form)
        other.replace(keys, values)
        self._set_buffers(None, None)
        self.__dict__.update(other.__dict__)

    # State

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
            # A state includes tokens that were recorded for a rollback, which may not fit the reservation.
            self.reserve(self.validate(keys, values))
            self.append(keys, values)

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
