"""Tokens in full precision, in buffers that are reserved once and stay where they are."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.attention.gqa_compiled import shared_in_graph
from kvlayers.errors import StateMismatchError
from kvlayers.stores.buckets import Buckets, places
from kvlayers.stores.buffer import COUNT_DTYPE, StateForm, TokenBuffer, form_of, nbytes_of
from kvlayers.stores.contiguous import ContiguousStore
from kvlayers.stores.contract import Fidelity, Mover, StatePair
from kvlayers.stores.description import DescriptionContext, Fact, Facts
from kvlayers.stores.masking import MaskExtent
from kvlayers.stores.registry import register_store
from kvlayers.stores.validation import mismatch, no_room_for_batch, no_room_for_tokens
from kvlayers.upstream import compat

SPECIAL_SIZES = 2
"""Sizes below this one TorchDynamo takes for constants, always."""


@register_store
class StaticStore(ContiguousStore):
    """Full-precision states in buffers of `capacity` tokens, reserved when the first states come.

    What a reservation has no room for raises `CapacityError`, or moves to a larger one where `grow` says so.

    Tokens are counted twice. The host's count is what every operation goes by. The device's, a tensor, is what compiled
    code writes and masks by, so that no number becomes part of what is compiled; eager code keeps it up to date.

    Args:
        capacity: tokens to reserve.
        max_batch_size: sequences to reserve for, `None` for as many as come first.
        buckets: how much of the reservation compiled code reads.
        whole_from: tokens from which on compiled code reads all of the reservation, `None` for its end.
        grow: whether to take a larger reservation where this one is too small.
    """

    def __init__(
        self,
        capacity: int,
        max_batch_size: int | None = None,
        buckets: Buckets | None = None,
        whole_from: int | None = None,
        grow: bool = False,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.buckets = Buckets() if buckets is None else buckets
        self.whole_from = whole_from
        self.grow = grow
        self.initial_capacity = capacity
        self.reading = MaskExtent()
        self._lay_out(capacity)
        self._place = self._places.at(0)
        self._unslotted = 0
        self._symbolic_offset = _symbolic_offset(0)
        self._rows = max_batch_size
        self._reserved: tuple[TokenBuffer, TokenBuffer] | None = None
        self._cursor: Tensor | None = None
        self._passed_on_device: Tensor | None = None
        super().__init__(limit=capacity)

    @override
    def describe(self) -> dict[str, Fact]:
        return {
            "store": self.kind,
            "capacity": self.initial_capacity,
            "whole_from": self.whole_from,
            **self.describe_reservation(),
        }

    def describe_reservation(self) -> dict[str, Fact]:
        """What a layer is told of its reservation, but for the tokens: sequences, buckets, and whether it grows."""
        return {"max_batch_size": self.max_batch_size, **self.buckets.facts(), "grow": self.grow}

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        given: Any = facts
        return cls(
            given["capacity"], given["max_batch_size"], Buckets.from_facts(facts), given["whole_from"], given["grow"]
        )

    @classmethod
    @override
    def reserved_by(cls, facts: Facts) -> tuple[int, int]:
        given: Any = facts
        return given["capacity"], given["max_batch_size"] or 0

    def _lay_out(self, capacity: int) -> None:
        self.capacity = self.limit = capacity
        self._sizes = self.buckets.sizes(capacity, self.whole_from)
        self._places = places(self._sizes)

    # Where tokens are. Eager code goes by numbers, compiled code by places and by the device's count.

    @property
    def _end(self) -> int:
        return self._place.length + self._unslotted

    @_end.setter
    def _end(self, slot: int) -> None:
        self._place, self._unslotted = self._places.at(slot), 0

    @property
    def passed(self) -> int:
        """Tokens that were taken in before the one in the first slot."""
        return self._symbolic_offset.shape[0] - SPECIAL_SIZES

    @property
    def total(self) -> int:
        """Tokens taken in and not truncated, with those that are not held any more."""
        return self.passed + self._end

    @total.setter
    def total(self, total: int) -> None:
        passed = total - self._end
        further = passed - self.passed
        if further:
            if self._passed_on_device is not None:
                self._passed_on_device.add_(further)
            self._symbolic_offset = _symbolic_offset(passed)

    def total_on_device(self) -> Tensor:
        """`total` as compiled code knows it: int64, without a dimension, and its own from now on."""
        if self._cursor is None or self._passed_on_device is None:
            return torch.full((), self.total, dtype=torch.int64)
        return self._cursor + self._passed_on_device

    def _stand_at(self, end: int, total: int) -> None:
        self._start = 0
        if end == 0:
            # By itself, as compiled code may hold it for a number that varies.
            self._place, self._unslotted = self._places.first, 0
        elif is_one_number(end):
            self._end = end
        else:
            self._place, self._unslotted = self._places.at(0), end
        self._tell_device()
        self.total = total

    def _tell_device(self) -> None:
        if self._cursor is not None:
            self._cursor.fill_(self._end)

    def is_step(self, tokens: int) -> bool:
        """Whether `tokens` more lead from one place to the next, so that no number needs to be read."""
        return tokens == 1 and self._unslotted == 0

    def lacks_room_for(self, tokens: int) -> bool:
        """Whether fewer than `tokens` slots are left behind those in use."""
        if self.is_step(tokens):
            return self._place.next is None
        return self._end + tokens > self.capacity

    @override
    def _advance(self, tokens: int) -> None:
        if self.is_step(tokens):
            self._place = self._place.next  # type: ignore[assignment]
        elif is_one_number(tokens) and is_one_number(self._end):
            self._end += tokens
        else:
            self._unslotted += tokens

    # What attention reads

    def announce(self, tokens: int) -> int | None:
        """How many slots, from the first one on, the next `extend` of `tokens` returns: a bucket.

        `None` where it returns the tokens that it is asked for. Several tokens at once always read those: there are few
        such updates, and masks of a bucket would cost more than they save.
        """
        self.reading.announce(self._place if self._can_step(tokens) else None)
        return self._bucket_for(tokens)

    def reads_bucket(self, tokens: int) -> bool:
        """Whether `extend` of `tokens` returns the bucket that was announced."""
        return self._bucket_for(tokens) is not None

    def _bucket_for(self, tokens: int) -> int | None:
        if compat.may_be_exporting():
            # What is exported serves any number of tokens, which it is told when it runs.
            return self.capacity
        return self._place.bucket if self._can_step(tokens) and self.reading.is_of_bucket(self._place) else None

    def _can_step(self, tokens: int) -> bool:
        return self.is_step(tokens) and self._place.next is not None

    def make_room(self, tokens: int) -> None:
        """Take a larger reservation ahead of compiled code, which cannot, where so many tokens more do not fit.

        Raises:
            CapacityError: it may not grow.
        """
        self.prepare()
        if self.lacks_room_for(tokens):
            self.check_room(tokens)
            self._take_more(self.length + tokens)

    def prepare(self) -> None:
        """Stand where compiled code goes on from: in the reservation, which what autograd follows is not in."""
        if self._tracks_gradients:
            self._allocate(self.capacity)
        self.settle()

    def settle(self) -> None:
        """Stand at a place again, where compiled code that took in several tokens at once could not name it."""
        if self._unslotted and not torch.compiler.is_compiling():
            self._stand_at(self._end, self.total)

    @override
    def extend(
        self, keys: Tensor, values: Tensor, past: int | None = None, front: StatePair | None = None
    ) -> StatePair:
        bucket = self._bucket_for(keys.shape[2])
        if bucket is None or front is not None:
            return super().extend(keys, values, past, front)
        self.append(keys, values)
        key_buffer, value_buffer = self._buffers()
        return shared_in_graph(key_buffer.tensor[:, :, :bucket], value_buffer.tensor[:, :, :bucket])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that compiled code writes to: `keys`, `values`, and the `position` of the next token."""
        keys, values = self._buffers()
        return {"keys": keys.tensor, "values": values.tensor, "position": self._cursor}  # type: ignore[dict-item]

    # Taking in states

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        if torch.compiler.is_compiling() and self._keys is not None and self._values is not None:
            # What compiled code knows of the buffers' tensors is checked at each call anyway, and the forms are not.
            held = self._keys.tensor, self._values.tensor
            if all(map(_fits, (keys, values), held)) and keys.shape[2] == values.shape[2]:
                self._admitted = None
                return keys.shape[2]
        return super().validate(keys, values)

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        if torch.compiler.is_compiling():
            self._append_at_cursor(keys, values)
        else:
            super().append(keys, values)
            self._tell_device()

    def _append_at_cursor(self, keys: Tensor, values: Tensor) -> None:
        tokens = keys.shape[2]
        exporting = compat.is_exporting()
        self._reserve_in_graph(tokens)
        if not exporting and self.lacks_room_for(tokens):
            self.check_room(tokens)
            self.move_to_front(self.length)
        cursor: Tensor = self._cursor  # type: ignore[assignment]
        slots = cursor + torch.arange(tokens, device=cursor.device)
        for buffer, states in zip(self._buffers(), (keys, values), strict=True):
            buffer.tensor.index_copy_(2, slots, states.detach())
        cursor.add_(tokens)
        if not exporting:
            self._advance(tokens)

    def _reserve_in_graph(self, tokens: int) -> None:
        if self._admitted is not None:
            self._take_form(tokens)
        if self._tracks_gradients or self._cursor is None or self._capacity < self.capacity:
            self._allocate(self.capacity)

    @override
    def extend_and_evict(
        self, keys: Tensor, values: Tensor, past: int, kept: int, front: StatePair | None = None
    ) -> StatePair:
        if not torch.compiler.is_compiling():
            return super().extend_and_evict(keys, values, past, kept, front)
        total = self.total + keys.shape[2]
        self._reserve_in_graph(kept)
        attended = keys.detach(), values.detach()
        if past:
            held = self.newest(past)
            attended = torch.cat([held[0], attended[0]], dim=2), torch.cat([held[1], attended[1]], dim=2)
        if front is not None:
            attended = torch.cat([front[0], attended[0]], dim=2), torch.cat([front[1], attended[1]], dim=2)
        for buffer, states in zip(self._buffers(), attended, strict=True):
            buffer.tensor[:, :, :kept].copy_(states[:, :, states.shape[2] - kept :])
        self._stand_at(kept, total)
        return attended

    def move_to_front(self, kept: int) -> None:
        """Move the newest `kept` tokens to the first slots, and forget those before them."""
        total, start = self.total, self._end - kept
        if torch.compiler.is_compiling():
            for buffer in self._buffers():
                buffer.tensor[:, :, :kept].copy_(buffer.tensor.narrow(2, start, kept).clone())
        else:
            try:
                for buffer in self._buffers():
                    buffer.shift_to_front(start, kept)
            except BaseException:
                self._lose()
                raise
        for buffer in self._buffers():
            buffer.tensor[:, :, kept:].zero_()
        self._stand_at(kept, total)

    @override
    def _shift_to_front(self) -> None:
        self.move_to_front(self.length)

    @override
    def _lose(self) -> None:
        super()._lose()
        # Its free slots would not be zeros.
        self._rows = self.reserved_batch_size
        self._reserved = self._cursor = self._passed_on_device = None

    # The reservation

    @override
    def _take_form(self, tokens: int) -> None:
        if self._admitted is not None:
            key_form, value_form = self._admitted
            self.check_room(tokens)
            self.check_reservation(key_form, value_form)
            # Nothing is reserved yet: what autograd follows is not held in a reservation.
            self._release()
            self._key_form, self._value_form, self._admitted = key_form, value_form, None

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        self.check_reservation(key_form, value_form)
        self._release()
        self._key_form, self._value_form = key_form, value_form
        self._allocate(self.capacity)

    def check_reservation(self, key_form: StateForm, value_form: StateForm) -> None:
        """Check that states of these forms can be held where others were reserved for.

        Raises:
            StateMismatchError: the reservation is for other kv_heads, head_dim or dtype, or on another device.
            CapacityError: it is for fewer sequences, and may not grow.
        """
        if self._reserved is not None:
            reserved = self._reserved[0].form, self._reserved[1].form
            seen = (reserved[0][0], *key_form[1:]), (reserved[1][0], *value_form[1:])
            if seen != reserved:
                raise mismatch(seen, reserved, self.length)
        self.check_batch(key_form[0])

    @override
    def check_batch(self, batch_size: int) -> None:
        reserved = self.reserved_batch_size
        if reserved is not None and batch_size > reserved and not self.grow:
            raise no_room_for_batch(reserved, batch_size)

    @property
    def reserved_batch_size(self) -> int | None:
        """Sequences that there is room for, `None` where that is not settled yet."""
        return self._rows if self._reserved is None else self._reserved[0].form[0]

    def covers(self, other: "StaticStore", batch_size: int | None) -> bool:
        """Whether memory is reserved here for all that `other` would hold of so many sequences, and is read alike."""
        rows = self.reserved_batch_size if self._reserved is not None else None
        return (
            rows is not None
            and rows >= (batch_size or other.max_batch_size or rows)
            and self.capacity >= other.capacity
            and (self.buckets, self.grow, self.max_batch_size) == (other.buckets, other.grow, other.max_batch_size)
        )

    @override
    def check_room(self, tokens: int) -> None:
        # The address that compiled code writes to is settled: only eager code may change it.
        if not self.grow or torch.compiler.is_compiling():
            super().check_room(tokens)

    @override
    def _buffers(self) -> tuple[TokenBuffer, TokenBuffer]:
        if self._keys is None or self._values is None:
            self._allocate(self.capacity)
        return self._keys, self._values  # type: ignore[return-value]

    @override
    def _allocate(self, capacity: int) -> None:
        """Bring what is held to the front of a reservation of `capacity` tokens: a new one, where there is none."""
        if self._key_form is None or self._value_form is None:
            raise StateMismatchError("expected admitted states before any are read: update the layer first.")
        length, total = self.length, self.total
        held = self.newest(length) if length else None
        if held is not None and self._is_reserved(self._key_form[0], capacity):
            held = held[0].clone(), held[1].clone()
        reserved = self._reservation(self._key_form, self._value_form, capacity)
        self._sit_on(reserved, self._key_form, self._value_form, held, 0)
        if capacity != self.capacity:
            self._lay_out(capacity)
        self._stand_at(length, total)

    def _reservation(
        self, key_form: StateForm, value_form: StateForm, capacity: int
    ) -> tuple[TokenBuffer, TokenBuffer]:
        """The reservation that there is, where it is of the size that is wanted, or else a new one of zeros."""
        batch_size = key_form[0]
        if self._reserved is not None and self._is_reserved(batch_size, capacity):
            return self._reserved
        self.check_batch(batch_size)
        rows = max(batch_size, self.reserved_batch_size or 0)
        alike = (self._keys, self._values) if self._reserved is None else self._reserved
        keys, values = (
            TokenBuffer.allocate((rows, *form[1:]), capacity, torch.zeros)
            if buffer is None
            else buffer.another(rows, capacity)
            for buffer, form in zip(alike, (key_form, value_form), strict=True)
        )
        return keys, values

    @property
    @override
    def sized_for(self) -> int | None:
        return self.capacity

    @property
    @override
    def fidelity(self) -> Fidelity:
        return "exact"

    @override
    def planned_nbytes(self, key_form: StateForm, value_form: StateForm, tokens: int, sized_for: int | None) -> int:
        capacity = self.capacity if sized_for is None else sized_for
        if tokens > capacity and not self.grow:
            raise no_room_for_tokens(capacity, 0, tokens)
        while capacity < tokens:
            capacity = self.buckets.after(capacity)
        rows = max(key_form[0], self.max_batch_size or 0)
        reserved = sum(nbytes_of((rows, *form[1:]), capacity) for form in (key_form, value_form))
        # The device's two counts: the cursor, and the tokens that have passed.
        return reserved + 2 * COUNT_DTYPE.itemsize

    def _is_reserved(self, batch_size: int, capacity: int) -> bool:
        reserved = self._reserved
        return reserved is not None and reserved[0].capacity == capacity and reserved[0].form[0] >= batch_size

    def _sit_on(
        self,
        reserved: tuple[TokenBuffer, TokenBuffer],
        key_form: StateForm,
        value_form: StateForm,
        held: StatePair | None,
        start: int,
    ) -> None:
        """Use the first rows of a reservation, with states `held` from slot `start` on."""
        keys, values = (buffer.first_sequences(key_form[0]) for buffer in reserved)
        if held is not None:
            with torch.no_grad():
                keys.write(start, held[0])
                values.write(start, held[1])
        self._reserved, self._keys, self._values, self._capacity = reserved, keys, values, keys.capacity
        self._handed_out = None
        self._key_form, self._value_form, self._tracks_gradients = key_form, value_form, False
        if self._cursor is None or self._passed_on_device is None:
            device = key_form[4]
            self._cursor, self._passed_on_device = _count(self._end, device), _count(self.passed, device)
        if not torch.compiler.is_compiling():
            # What is allocated within a compiled function is a result of it, and has no fixed address.
            for tensor in (keys.tensor, values.tensor, self._cursor, self._passed_on_device):
                torch._dynamo.mark_static_address(tensor)

    @override
    def _make_room(self, tokens: int) -> None:
        needed = self.length + tokens
        # What autograd follows may be the caller's own, and is moved out of rather than within.
        if needed > self.capacity:
            self._take_more(needed)
        elif self._capacity < self.capacity or self._tracks_gradients:
            self._allocate(self.capacity)
        else:
            self._shift_to_front()

    def _take_more(self, needed: int) -> None:
        capacity = self.capacity
        while capacity < needed:
            capacity = self.buckets.after(capacity)
        if self._key_form is None:
            self._resize(capacity)
        else:
            self._allocate(capacity)

    @override
    def reserve(self, tokens: int) -> None:
        """Make sure that `tokens` tokens fit. A reservation that is too small is given up for a larger one."""
        if tokens > self.capacity:
            if torch.compiler.is_compiling():
                raise no_room_for_tokens(self.capacity, self.length, tokens - self.length)
            self._resize(tokens + tokens // 4)
        self._take_form(tokens)

    @override
    def shrink(self, tokens: int) -> None:
        if tokens < self.capacity:
            self._resize(tokens)

    def _resize(self, capacity: int) -> None:
        self.reading.forget()
        if self._keys is not None and not self._tracks_gradients:
            self._allocate(capacity)
        else:
            start, end = self._start, self._end
            self._lay_out(capacity)
            self._start, self._end = start, end

    @override
    def _adopt(self, keys: Tensor, values: Tensor) -> None:
        first = self.passed + self._start
        if keys.shape[2] > self.capacity:
            self._lay_out(keys.shape[2])
        super()._adopt(keys, values)
        self.total = first + self._end

    # Operations in place

    @override
    def truncate(self, length: int) -> None:
        end = self._end
        self.reading.forget()
        super().truncate(length)
        self._erase(self._end, end)
        self._tell_device()

    @override
    def clear(self) -> None:
        self._erase(0, self._end)
        self.reading.forget()
        super().clear()
        self._tell_device()
        self.total = 0

    def _erase(self, start: int, end: int) -> None:
        """Leave zeros, since attention reads a bucket's free slots too: masked, but a NaN is not masked by a zero."""
        if self._reserved is not None and self._keys is not None and not self._tracks_gradients and start < end:
            for buffer in self._buffers():
                buffer.read(start, end - start).zero_()

    @override
    def hand_out(self) -> StatePair:
        # The address is promised to compiled code, which writes there whatever the caller keeps.
        return self.newest(self.length) if torch.compiler.is_compiling() else self._views()

    @override
    def rewritten(self, keys: Tensor, values: Tensor) -> Self:
        unchanged = (form_of(keys), form_of(values)) == (self._key_form, self._value_form)
        followed = self._tracks_gradients or keys.requires_grad or values.requires_grad
        if unchanged and self._reserved is not None and not followed and keys.shape[2] <= self.capacity:
            # They may be views of what is erased.
            keys, values = self._apart(keys), self._apart(values)
            self.clear()
            self.validate(keys, values)
            self.append(keys, values)
            return self
        fresh = super().rewritten(keys, values)
        fresh.reading = self.reading
        return fresh

    @override
    def select(self, indices: Tensor) -> None:
        if self._key_form is None or self._value_form is None:
            return
        batch_size, length = indices.shape[0], self.length
        key_form, value_form = (batch_size, *self._key_form[1:]), (batch_size, *self._value_form[1:])
        self.check_batch(batch_size)
        self.reading.forget()
        held = None
        if length:
            keys, values = self.newest(length)
            held = keys.index_select(0, indices.to(keys.device)), values.index_select(0, indices.to(values.device))
        if self._tracks_gradients and held is not None:
            self._key_form, self._value_form = key_form, value_form
            self._adopt(*held)
        else:
            reserved = self._reservation(key_form, value_form, self.capacity)
            for buffer in reserved:
                # Rows that are let go of may come back.
                buffer.tensor[batch_size : self._key_form[0], :, : self._end].zero_()
            self._sit_on(reserved, key_form, value_form, held, self._start)

    @override
    def swap_buffers(self, move: Mover) -> None:
        if self._reserved is None or self._key_form is None or self._tracks_gradients:
            super().swap_buffers(move)
            return
        start, end = self._start, self._end
        self._reserved = move(self._reserved[0], start, end), move(self._reserved[1], start, end)
        if self._keys is not None:
            self._keys, self._values = (buffer.first_sequences(self._key_form[0]) for buffer in self._reserved)
            self._handed_out = None

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        tokens = super().check_state(tensors)
        if tensors:
            self.check_reservation(form_of(tensors["keys"]), form_of(tensors["values"]))
        return tokens

    @override
    def fork(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin.__setstate__(self.__getstate__())
        twin.reading = MaskExtent(copy.copy(self.reading.mode))
        return twin

    @override
    def __getstate__(self) -> dict[str, Any]:
        live = super().__getstate__()
        # Only live tokens travel; the reservation is taken again.
        length = live.pop("_end")
        live["_place"], live["_unslotted"], live["_symbolic_offset"] = (
            self._places.at(length),
            0,
            _symbolic_offset(self.total - length),
        )
        live["_reserved"] = live["_cursor"] = live["_passed_on_device"] = None
        live["_rows"] = self.reserved_batch_size
        return live

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._keys is not None and not self._tracks_gradients:
            self._allocate(self.capacity)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from super().held_tensors()
        yield from (buffer.tensor for buffer in self._reserved or ())
        yield from (count for count in (self._cursor, self._passed_on_device) if count is not None)


def _symbolic_offset(number: int) -> Tensor:
    """A tensor without elements that is `number` long, and a little: compiled code reads a size without a guard on it.

    A number that it reads from an attribute, it is compiled for alone the first time, and for all others the second.
    """
    ruler = torch.empty((number + SPECIAL_SIZES, 0))
    if not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(ruler, 0)
    return ruler


def _fits(states: Tensor, held: Tensor) -> bool:
    alike = states.dim() == 4 and states.dtype == held.dtype and states.device == held.device
    return alike and (*states.shape[:2], states.shape[3]) == (*held.shape[:2], held.shape[3])


def is_one_number(number: int) -> bool:
    """Whether a number is the same in every run of what is being compiled, and needs no guard to be."""
    if not torch.compiler.is_compiling():
        return True
    # Here, as sympy takes long to import.
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(number)


def _count(number: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), number, dtype=COUNT_DTYPE, device=device)
