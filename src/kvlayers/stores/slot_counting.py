"""Counting the tokens of a reservation, for eager code and for compiled code."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.stores.buckets import Buckets
from kvlayers.stores.contiguous import ContiguousStore
from kvlayers.stores.masking import MaskExtent
from kvlayers.stores.slots import SPECIALIZED_SIZES, TracedCount, device_count, is_static_int, slots_of, symbolic_number
from kvlayers.upstream import compat


class SlotCountingStore(ContiguousStore):
    """Counts tokens so that no number becomes a constant of compiled code, which would recompile it at every token.

    Every operation goes by the count on the host. Compiled code advances it by linked slots (see `Slot`), and writes
    and masks by the count on the device, a tensor, which eager code keeps up to date.

    Args:
        capacity: tokens reserved.
        buckets: sizes that compiled code reads.
        whole_from: number of tokens from which compiled code reads the whole reservation, `None` for its end.
    """

    def __init__(self, capacity: int, buckets: Buckets | None, whole_from: int | None) -> None:
        self.buckets = Buckets() if buckets is None else buckets
        self.whole_from = whole_from
        self.mask_extent = MaskExtent()
        self._set_capacity(capacity)
        self._slot = self._slots.at(0)
        self._unslotted = 0
        self._symbolic_offset = symbolic_number(0)
        self._cursor: Tensor | None = None
        self._offset_on_device: Tensor | None = None
        super().__init__(limit=capacity)

    def _set_capacity(self, capacity: int) -> None:
        self.capacity = self.limit = capacity
        self._sizes = self.buckets.sizes(capacity, self.whole_from)
        self._slots = slots_of(self._sizes)

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

    @total.setter
    def total(self, total: int) -> None:
        self.set_total(total)

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

    def _count_on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The two counts on the device: of the slots in use, and of the tokens before the first slot."""
        if self._cursor is None or self._offset_on_device is None:
            self._cursor = device_count(self._end, device)
            self._offset_on_device = device_count(self.offset, device)
        return self._cursor, self._offset_on_device

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
    def _advance(self, tokens: int) -> None:
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
        self.mask_extent.choose(self._slot, self._can_step(tokens))
        return self._bucket_for(tokens)

    def reads_bucket(self, tokens: int) -> bool:
        """Whether `extend` of `tokens` returns the bucket that was chosen."""
        return self._bucket_for(tokens) is not None

    def _bucket_for(self, tokens: int) -> int | None:
        if compat.may_be_exporting():
            # An exported program serves any number of tokens, which it is told when it runs.
            return self.capacity
        return self._slot.bucket if self._can_step(tokens) and self.mask_extent.is_bucket_of(self._slot) else None

    def _can_step(self, tokens: int) -> bool:
        return self.is_step(tokens) and self._slot.next is not None

    # Copies

    @override
    def __getstate__(self) -> dict[str, Any]:
        live = super().__getstate__()
        length = live.pop("_end")
        live["_slot"], live["_unslotted"] = self._slots.at(length), 0
        live["_symbolic_offset"] = symbolic_number(self.total - length)
        live["_cursor"] = live["_offset_on_device"] = None
        return live

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from super().held_tensors()
        yield from (count for count in (self._cursor, self._offset_on_device) if count is not None)
