"""Tokens in full precision, in buffers that are reserved once and keep their address."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import mismatch, no_room_for_batch, no_room_for_tokens
from kvlayers.core.buffer import COUNT_DTYPE, StateForm, TokenBuffer, form_of, forms_of_batch
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.description import Argument, OptionsArgument
from kvlayers.core.forward_pass import in_module
from kvlayers.core.sharing import SharedSegment
from kvlayers.core.token_store import BufferSwap, KVPair, TokenStore, register_store
from kvlayers.errors import OptionError
from kvlayers.kernels.attention.custom_masks import ReservedColumns, columns_of, marked_for_custom_masks
from kvlayers.kernels.attention.gqa import marked_for_sdpa, shared_in_graph
from kvlayers.static.slots import (
    SPECIALIZED_SIZES,
    Buckets,
    MaskExtent,
    TracedCount,
    is_static_int,
    slots_of,
    symbolic_number,
)
from kvlayers.upstream import compat
from kvlayers.utils.options import check_whole_number


def check_reserved(number: object, name: str, what: str, most: int | None = None) -> None:
    """Raise `OptionError` if `number` is not a positive whole number. `what` says what is counted, such as "tokens"."""
    check_whole_number(
        number, f"`{name}`", 1, most, of=what, advice=f": pass the most {what} that will be held at once"
    )


@register_store
class StaticStore(DenseStore):
    """Full-precision states in buffers of `capacity` tokens, reserved when the first states arrive.

    States that do not fit the reservation raise `CapacityError`, or move to a larger one if `grow` is true.

    Eager code writes at the count on the host. Compiled code writes and masks at the count on the device, a tensor that
    eager code keeps up to date, and returns buckets. It advances the count by linked slots (see `Slot`), so that no
    number becomes a constant of compiled code, which would recompile it at every token.

    Args:
        capacity: tokens to reserve.
        max_batch_size: sequences to reserve for, `None` for the batch size of the first states.
        buckets: sizes that compiled code reads.
        whole_from: number of tokens from which compiled code reads the whole reservation, `None` for its end.
        grow: whether to take a larger reservation if this one is too small.

    Attributes:
        reserved_batch_size: sequences that the reservation has room for, `None` if it is not known yet.

    Raises:
        OptionError: an option has a value that it cannot have.
    """

    hints = ()
    # Compiled code writes to one address, whatever is forked.
    can_share = False
    made_with = (
        Argument("capacity", "initial_capacity"),
        Argument("max_batch_size"),
        OptionsArgument("buckets", options=Buckets),
        Argument("whole_from"),
        Argument("grow"),
    )

    def __init__(
        self,
        capacity: int,
        max_batch_size: int | None = None,
        buckets: Buckets | None = None,
        whole_from: int | None = None,
        grow: bool = False,
    ) -> None:
        if not isinstance(grow, bool):
            raise OptionError(f"`grow` must be True or False, got {grow!r}: pass one of them.")
        if buckets is not None and not isinstance(buckets, Buckets):
            raise OptionError(
                f"`buckets` must be a Buckets, got {buckets!r}: pass kvlayers.stores.Buckets(minimum, factor)."
            )
        if max_batch_size is not None:
            check_reserved(max_batch_size, "max_batch_size", "sequences")
        if whole_from is not None:
            check_whole_number(whole_from, "`whole_from`", 0, of="tokens")
        self.max_batch_size = max_batch_size
        self.grow = grow
        self.initial_capacity = capacity
        self.reserved_batch_size = max_batch_size
        self._reserved: tuple[TokenBuffer, TokenBuffer] | None = None
        self.buckets = Buckets() if buckets is None else buckets
        self.whole_from = whole_from
        self.mask_extent = MaskExtent()
        self._set_capacity(capacity)
        self._symbolic_offset = symbolic_number(0)
        self._cursor: Tensor | None = None
        self._offset_on_device: Tensor | None = None
        # `DenseStore` sets `_end`, and so the slot.
        super().__init__()

    @classmethod
    @override
    def reserved_by(cls, facts: Mapping[str, Any]) -> tuple[int, int]:
        return facts["capacity"], facts["max_batch_size"] or 0

    # Taking in states

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        if torch.compiler.is_compiling() and self._keys is not None and self._values is not None:
            # Compiled code checks the buffers' tensors at each call in any case, but it does not check forms.
            held = self._keys.tensor, self._values.tensor
            if all(map(_fits, (keys, values), held)) and keys.shape[2] == values.shape[2]:
                self._validated = None
                return keys.shape[2]
        return super().validate(keys, values)

    @override
    def _validate_other_form(self, keys: Tensor, forms: tuple[StateForm, StateForm]) -> int:
        raise mismatch(forms, self._known_forms(), self.length)

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        if not torch.compiler.is_compiling():
            super().append(keys, values)
            self._sync_cursor()
            return
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
            self.hold(tokens)

    def _reserve_in_graph(self, tokens: int) -> None:
        if self._validated is not None:
            self._apply_form(tokens)
        if self._tracks_gradients or self._cursor is None or self._capacity < self.capacity:
            self._allocate(self.capacity)

    @override
    def extend(self, keys: Tensor, values: Tensor, past: int | None = None) -> KVPair:
        bucket = self.bucket_for(keys.shape[2])
        if bucket is None:
            # A model takes in the next tokens, and has not asked for the sizes of a mask.
            is_asked = self.mask_extent.asked_at is self._slot
            has_custom_mask = not is_asked and (torch.compiler.is_compiling() or in_module())
            attended = super().extend(keys, values, past)
            return marked_for_custom_masks(*attended, self._reserved_columns()) if has_custom_mask else attended
        self.append(keys, values)
        key_buffer, value_buffer = self._buffers()
        held = key_buffer.tensor[:, :, :bucket], value_buffer.tensor[:, :, :bucket]
        return shared_in_graph(*held) if torch.compiler.is_compiling() else marked_for_sdpa(*held, keys.shape[2])

    @override
    def extend_and_evict(self, keys: Tensor, values: Tensor, past: int, kept: int) -> KVPair:
        tokens = keys.shape[2]
        total = self.total + tokens
        if not torch.compiler.is_compiling():
            attended = super().extend_and_evict(keys, values, past, kept)
            self.set_total(total)
            return attended
        self._reserve_in_graph(kept)
        # Some of the tokens to keep may be older than those to attend to. Not max(): if none is, which compiled code
        # knows, `past` stays the number that it is there.
        held = kept - tokens if kept > past + tokens else past
        states = keys.detach(), values.detach()
        if held:
            earlier = self.newest(held)
            states = torch.cat([earlier[0], states[0]], dim=2), torch.cat([earlier[1], states[1]], dim=2)
        for buffer, each in zip(self._buffers(), states, strict=True):
            buffer.tensor[:, :, :kept].copy_(each[:, :, each.shape[2] - kept :])
        self._set_position(kept, total)
        return states if held == past else (states[0][:, :, held - past :], states[1][:, :, held - past :])

    # A constant of compiled code: a number may vary there, and cannot make a class.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _reserved_columns(self) -> ReservedColumns:
        # The layers of transformers reserve no more than the window.
        return columns_of(self.capacity if self.whole_from is None else self.whole_from + 1)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that compiled code writes to: `keys`, `values`, and the `position` of the next token."""
        keys, values = self._buffers()
        return {"keys": keys.tensor, "values": values.tensor, "position": self._cursor}  # type: ignore[dict-item]

    def _set_capacity(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots = slots_of(self.buckets.sizes(capacity, self.whole_from))

    # The count of tokens. Eager code reads numbers; compiled code reads slots and the count on the device. Methods set
    # it in compiled code, as TorchDynamo before 2.13 does not see what the setter of a property does.

    @property
    def _end(self) -> int:
        return self._slot.length + self._unslotted

    @_end.setter
    def _end(self, end: int) -> None:
        self._set_end(end)

    @override
    def _set_end(self, end: int) -> None:
        self._slot, self._unslotted = self._slots.at(end), 0

    @property
    def offset(self) -> int:
        """Position of the first slot: the number of tokens that were taken in before the token there."""
        return self._symbolic_offset.shape[0] - SPECIALIZED_SIZES

    @property
    def total(self) -> int:
        """Tokens taken in and not truncated, including the evicted ones."""
        return self.offset + self._end

    def set_total(self, total: int) -> None:
        """Set `total`, of which the newest tokens are held."""
        offset = total - self._end
        further = offset - self.offset
        if further:
            if self._offset_on_device is not None:
                self._offset_on_device.add_(further)
            self._symbolic_offset = symbolic_number(offset)

    @property
    def mask_offset(self) -> "int | TracedCount":
        """`offset`, by which compiled code makes masks without a CUDA graph for each number."""
        compiling = torch.compiler.is_dynamo_compiling() and not compat.may_be_exporting()
        if not compiling or self._offset_on_device is None:
            return self.offset
        return TracedCount(self.offset, self._offset_on_device)

    def total_on_device(self) -> Tensor:
        """`total` as compiled code knows it: a new int64 tensor without a dimension."""
        if self._cursor is None or self._offset_on_device is None:
            return torch.full((), self.total, dtype=torch.int64)
        return self._cursor + self._offset_on_device

    def _set_position(self, end: int, total: int) -> None:
        self._start = 0
        if end == 0:
            # A case of its own, because compiled code may treat it as a number that varies.
            self._slot, self._unslotted = self._slots.first, 0
        elif is_static_int(end):
            self._set_end(end)
        else:
            self._slot, self._unslotted = self._slots.at(0), end
        self._sync_cursor()
        self.set_total(total)

    def _sync_cursor(self) -> None:
        """Set the count on the device to that on the host."""
        if self._cursor is not None:
            self._cursor.fill_(self._end)

    def sync_slot(self) -> None:
        """Find the slot again, if compiled code has taken in several tokens at once and could not name it."""
        if self._unslotted and not torch.compiler.is_compiling():
            self._set_position(self._end, self.total)

    def is_step(self, tokens: int) -> bool:
        """Whether `tokens` more lead from one slot to the next, so that no number needs to be read."""
        return tokens == 1 and self._unslotted == 0

    def lacks_room_for(self, tokens: int) -> bool:
        """Whether fewer than `tokens` slots are free after those in use."""
        if self.is_step(tokens):
            return self._slot.next is None
        return self._end + tokens > self.capacity

    @override
    def hold(self, tokens: int) -> None:
        if self.is_step(tokens):
            self._slot = self._slot.next  # type: ignore[assignment]
        elif is_static_int(tokens) and is_static_int(self._end):
            self._set_end(self._end + tokens)
        else:
            self._unslotted += tokens

    # What attention reads

    def choose_extent(self, tokens: int) -> int | None:
        """Choose what the next `extend` of `tokens` returns: the number of slots in the bucket, from the first one on.

        `None` if it returns the tokens that it is asked for. Updates of several tokens always do: they are few, and
        masks with the size of a bucket would cost more than they save.
        """
        self.mask_extent.choose(self._slot, self.is_step(tokens))
        return self.bucket_for(tokens)

    def bucket_for(self, tokens: int) -> int | None:
        """The slots that `extend` of `tokens` returns, if it returns the bucket that was chosen; else `None`."""
        if compat.may_be_exporting():
            # An exported program serves any number of tokens, which it is told when it runs.
            return self.capacity
        return self._slot.bucket if self.is_step(tokens) and self.mask_extent.bucket_of is self._slot else None

    # The reservation

    @override
    def _apply_form(self, tokens: int) -> None:
        if self._validated is not None:
            self.check_room(tokens)
            self.check_reservation(self._validated)
            # No memory is reserved yet: states that autograd follows are not held in a reservation.
            self._release(self._validated)
            self._validated = None

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        self.check_reservation((key_form, value_form))
        self._release((key_form, value_form))
        self._allocate(self.capacity)

    def check_reservation(self, forms: tuple[StateForm, StateForm]) -> None:
        """Check that the reservation can hold keys and values of these forms.

        Raises:
            StateMismatchError: the reservation is for other kv_heads, head_dim or dtype, or on another device.
            CapacityError: it is for fewer sequences, and may not grow.
        """
        if self._reserved is not None:
            reserved = self._reserved[0].form, self._reserved[1].form
            seen = forms_of_batch(forms, reserved[0].batch_size)
            if seen != reserved:
                raise mismatch(seen, reserved, self.length)
        self.check_select(forms[0].batch_size)

    @override
    def check_select(self, batch_size: int) -> None:
        reserved = self.reserved_batch_size
        if reserved is not None and batch_size > reserved and not self.grow:
            raise no_room_for_batch(reserved, batch_size)

    def covers(self, other: "StaticStore", batch_size: int | None) -> bool:
        """Whether this store can replace `other` for `batch_size` sequences, with the memory it has reserved."""
        rows = self.reserved_batch_size if self._reserved is not None else None
        return (
            rows is not None
            and rows >= (batch_size or other.max_batch_size or rows)
            and self.capacity >= other.capacity
            and (self.buckets, self.grow, self.max_batch_size) == (other.buckets, other.grow, other.max_batch_size)
        )

    @override
    def check_room(self, tokens: int) -> None:
        # Compiled code writes to a fixed address: only eager code may change it.
        if (not self.grow or torch.compiler.is_compiling()) and self.length + tokens > self.capacity:
            raise no_room_for_tokens(self.capacity, self.length, tokens)

    @override
    def _buffers(self) -> tuple[TokenBuffer, TokenBuffer]:
        if self._keys is None or self._values is None:
            self._allocate(self.capacity)
        return self._keys, self._values  # type: ignore[return-value]

    @override
    def _allocate(self, capacity: int) -> None:
        """Move the held tokens to the front of a reservation of `capacity` tokens, a new one if necessary."""
        forms, length, total = self._known_forms(), self.length, self.total
        held = self.newest(length) if length else None
        reserved = self._reservation(forms, capacity)
        if held is not None and reserved is self._reserved:
            held = held[0].clone(), held[1].clone()
        self._use_reservation(reserved, forms, held, 0)
        if capacity != self.capacity:
            self._set_capacity(capacity)
        self._set_position(length, total)

    def _reservation(self, forms: tuple[StateForm, StateForm], capacity: int) -> tuple[TokenBuffer, TokenBuffer]:
        """The current reservation if it is large enough, else a new one of zeros."""
        batch_size, current = forms[0].batch_size, self._reserved
        if current is not None and current[0].capacity == capacity and current[0].form.batch_size >= batch_size:
            return current
        self.check_select(batch_size)
        rows = max(batch_size, self.reserved_batch_size or 0)
        alike = (self._keys, self._values) if current is None else current
        keys, values = (
            TokenBuffer.allocate(form.of_batch(rows), capacity, torch.zeros)
            if buffer is None
            else buffer.allocate_like(rows, capacity)
            for buffer, form in zip(alike, forms, strict=True)
        )
        return keys, values

    @property
    @override
    def sized_for(self) -> int | None:  # type: ignore[override]
        return self.capacity

    def _use_reservation(
        self,
        reserved: tuple[TokenBuffer, TokenBuffer],
        forms: tuple[StateForm, StateForm],
        held: KVPair | None,
        start: int,
    ) -> None:
        """Use the first rows of a reservation, with states `held` from slot `start` on."""
        keys, values = (buffer.first_sequences(forms[0].batch_size) for buffer in reserved)
        if held is not None:
            with torch.no_grad():
                keys.write(start, held[0])
                values.write(start, held[1])
        self._reserved, self._keys, self._values, self._capacity = reserved, keys, values, keys.capacity
        self.reserved_batch_size = reserved[0].form.batch_size
        self._views = None
        self.forms, self._tracks_gradients = forms, False
        if self._cursor is None or self._offset_on_device is None:
            with torch.inference_mode(False):
                self._cursor, self._offset_on_device = (
                    torch.full((), count, dtype=COUNT_DTYPE, device=forms[0].device)
                    for count in (self._end, self.offset)
                )
        if not torch.compiler.is_compiling():
            self.mask_extent.mode.device = forms[0].device
            # Memory that a compiled function allocates is one of its results, and has no fixed address.
            for tensor in (keys.tensor, values.tensor, self._cursor, self._offset_on_device):
                torch._dynamo.mark_static_address(tensor)

    def make_room(self, tokens: int) -> None:
        """Take a larger reservation if `tokens` more do not fit. Eager code calls it: compiled code cannot grow.

        Raises:
            CapacityError: it may not grow.
        """
        self.prepare()
        if self.lacks_room_for(tokens):
            self.check_room(tokens)
            self._grow_to(self.length + tokens)

    def prepare(self) -> None:
        """Prepare for compiled code: move states that autograd follows to the reservation, and find the slot."""
        if self._tracks_gradients:
            self._allocate(self.capacity)
        self.sync_slot()

    @override
    def _make_room(self, tokens: int) -> None:
        needed = self.length + tokens
        # Tensors that autograd follows may belong to the caller: they are copied, never moved within.
        if needed > self.capacity:
            self._grow_to(needed)
        elif self._capacity < self.capacity or self._tracks_gradients:
            self._allocate(self.capacity)
        else:
            self.move_to_front(self.length)

    def _grow_to(self, needed: int) -> None:
        capacity = self.capacity
        while capacity < needed:
            capacity = self.buckets.after(capacity)
        if self.forms is None:
            self._resize(capacity)
        else:
            self._allocate(capacity)

    @override
    def reserve(self, tokens: int) -> None:
        """Make sure that `tokens` tokens fit in all. A reservation that is too small is replaced by a larger one."""
        if tokens > self.capacity:
            if torch.compiler.is_compiling():
                raise no_room_for_tokens(self.capacity, self.length, tokens - self.length)
            self._resize(tokens + tokens // 4)
        self._apply_form(tokens)

    @override
    def shrink(self, tokens: int) -> None:
        if tokens < self.capacity:
            self._resize(tokens)

    def _resize(self, capacity: int) -> None:
        self.mask_extent.forget()
        if self._keys is not None and not self._tracks_gradients:
            self._allocate(capacity)
        else:
            self._set_capacity(capacity)
            # The same count, as a slot of the new reservation.
            self._set_end(self._end)

    @override
    def _adopt(
        self,
        keys: Tensor,
        values: Tensor,
        segments: Sequence[SharedSegment] = (),
        forms: tuple[StateForm, StateForm] | None = None,
    ) -> None:
        first = self.offset + self._start
        if keys.shape[2] > self.capacity:
            self._set_capacity(keys.shape[2])
        super()._adopt(keys, values, segments, forms)
        self.set_total(first + self._end)

    # Operations in place

    def move_to_front(self, kept: int) -> None:
        """Move the newest `kept` tokens to the first slots, and forget the tokens before them."""
        total, start = self.total, self._end - kept
        if torch.compiler.is_compiling():
            for buffer in self._buffers():
                buffer.tensor[:, :, :kept].copy_(buffer.tensor.narrow(2, start, kept).clone())
        else:
            self._start = start
            self._shift_to_front()
        for buffer in self._buffers():
            buffer.tensor[:, :, kept:].zero_()
        self._set_position(kept, total)

    @override
    def _invalidate(self) -> None:
        super()._invalidate()
        # The free slots of the reservation would not be zeros.
        self._reserved = self._cursor = self._offset_on_device = None

    @override
    def truncate(self, length: int) -> None:
        end = self._end
        self.mask_extent.forget()
        super().truncate(length)
        self._erase(self._end, end)
        self._sync_cursor()

    @override
    def clear(self) -> None:
        self._erase(0, self._end)
        self.mask_extent.forget()
        super().clear()
        self._set_position(0, 0)

    def _erase(self, start: int, end: int) -> None:
        """Fill slots with zeros. Attention reads the free slots of a bucket too: masked, but 0 times NaN is NaN."""
        if self._reserved is not None and self._keys is not None and not self._tracks_gradients and start < end:
            for buffer in self._buffers():
                buffer.read(start, end - start).zero_()

    @override
    def caller_views(self) -> KVPair:
        # Compiled code writes to this address in any case, even if a caller keeps the views.
        return self.newest(self.length) if torch.compiler.is_compiling() else self._cached_views()

    @override
    def rewritten(self, keys: Tensor, values: Tensor) -> Self:
        unchanged = (form_of(keys), form_of(values)) == self.forms
        followed = self._tracks_gradients or keys.requires_grad or values.requires_grad
        if unchanged and self._reserved is not None and not followed and keys.shape[2] <= self.capacity:
            # They may be views of the slots that are erased.
            keys, values = self._copied_if_aliased(keys), self._copied_if_aliased(values)
            self.clear()
            self.validate(keys, values)
            self.append(keys, values)
            return self
        fresh = TokenStore.rewritten(self, keys, values)
        fresh.mask_extent = self.mask_extent
        return fresh

    @override
    def select(self, indices: Tensor) -> None:
        if self.forms is None:
            return
        batch_size, length = indices.shape[0], self.length
        forms = forms_of_batch(self.forms, batch_size)
        self.check_select(batch_size)
        self.mask_extent.forget()
        held = None
        if self._keys is not None:
            # Of no tokens too, so that an index out of range is refused.
            keys, values = self.newest(length)
            held = keys.index_select(0, indices.to(keys.device)), values.index_select(0, indices.to(values.device))
        if self._tracks_gradients and held is not None and length:
            self._adopt(*held, forms=forms)
        else:
            reserved = self._reservation(forms, self.capacity)
            for buffer in reserved:
                # Rows that are dropped now may be used again.
                buffer.tensor[batch_size : self.forms[0].batch_size, :, : self._end].zero_()
            self._use_reservation(reserved, forms, held, self._start)

    @override
    def swap_buffers(self, swap: BufferSwap) -> None:
        if self._reserved is None or self.forms is None or self._tracks_gradients:
            super().swap_buffers(swap)
            return
        start, end = self._start, self._end
        self._reserved = swap(self._reserved[0], start, end), swap(self._reserved[1], start, end)
        if self._keys is not None:
            rows = self.forms[0].batch_size
            self._keys, self._values = (buffer.first_sequences(rows) for buffer in self._reserved)
            self._views = None

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        tokens = super().check_state(tensors)
        if tensors:
            self.check_reservation((form_of(tensors["keys"]), form_of(tensors["values"])))
        return tokens

    @override
    def fork(self) -> Self:
        twin = copy.copy(self)
        twin.mask_extent = MaskExtent(copy.copy(self.mask_extent.mode))
        return twin

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Copies of the live tokens alone; `__setstate__` reserves memory again, and finds the slot by the count `_end`.
        live = {**super().__getstate__(), "_reserved": None, "_cursor": None, "_offset_on_device": None}
        live["_symbolic_offset"] = symbolic_number(self.total - live["_end"])
        del live["_slot"]
        return live

    def __setstate__(self, state: dict[str, Any]) -> None:
        end = state.pop("_end")
        self.__dict__.update(state)
        self._set_end(end)
        if self._keys is not None and not self._tracks_gradients:
            self._allocate(self.capacity)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from super().held_tensors()
        yield from (buffer.tensor for buffer in self._reserved or ())
        yield from (count for count in (self._cursor, self._offset_on_device) if count is not None)


def _fits(states: Tensor, held: Tensor) -> bool:
    alike = states.dim() == 4 and states.dtype == held.dtype and states.device == held.device
    return alike and (*states.shape[:2], states.shape[3]) == (*held.shape[:2], held.shape[3])
