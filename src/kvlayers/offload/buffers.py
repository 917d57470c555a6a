"""Buffers in offloaded memory, and the copies of them that a device works on."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.core.buffer import StateForm, TokenBuffer
from kvlayers.offload.storage import HomeMemory


def by_tokens(states: Tensor) -> Tensor:
    """States `[batch, kv_heads, tokens, head_dim]` as `[tokens, batch, kv_heads, head_dim]`, a view."""
    return states.permute(2, 0, 1, 3)


def as_states(rows: Tensor) -> Tensor:
    """Rows `[tokens, batch, kv_heads, head_dim]` as states, a view."""
    return rows.permute(1, 2, 0, 3)


class HostBuffer(TokenBuffer):
    """A buffer in offloaded memory.

    Tokens are the outermost dimension in memory, so that any range of tokens is one contiguous piece for a copy.

    Attributes:
        rows: the tensor, `[capacity, batch, kv_heads, head_dim]`, contiguous.
        memory: the memory that it comes from, and grows into.
        device: where the states are computed.
    """

    __slots__ = ("device", "memory", "rows")

    def __init__(self, rows: Tensor, memory: HomeMemory, device: torch.device) -> None:
        super().__init__(as_states(rows))
        self.rows = rows
        self.memory = memory
        self.device = device

    def __reduce__(self) -> tuple[Callable[[Tensor], TokenBuffer], tuple[Tensor]]:
        # Without the spare room of its memory.
        return TokenBuffer(self.tensor.clone()).__reduce__()

    @classmethod
    def like(cls, buffer: TokenBuffer, memory: HomeMemory, device: torch.device) -> "HostBuffer":
        """An unfilled buffer with the form and the capacity of another one."""
        rows = by_tokens(buffer.tensor)
        # A tensor that is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            return cls(memory.empty(tuple(rows.shape), rows.dtype), memory, device)

    @property
    @override
    def form(self) -> StateForm:
        return super().form._replace(device=self.device)

    def extended(self, capacity: int) -> "HostBuffer | None":
        """A larger buffer in the same memory, `None` if the memory has no room for it."""
        rows = self.memory.extended(self.rows, capacity) if capacity >= self.capacity else None
        return None if rows is None else HostBuffer(rows, self.memory, self.device)

    @override
    def selected(self, indices: Tensor, start: int, count: int, capacity: int) -> "HostBuffer":
        selected = self.allocate_like(indices.shape[0], capacity)
        rows = selected.rows[:count]
        with torch.no_grad():
            torch.index_select(self.rows[start : start + count], 1, indices.to(rows.device), out=rows)
        return selected

    @override
    def allocate_like(
        self, batch_size: int, capacity: int, create: Callable[..., Tensor] = torch.zeros
    ) -> "HostBuffer":
        # Never zeros: only held tokens are ever copied to the device.
        shape = (capacity, batch_size, *self.rows.shape[2:])
        return HostBuffer(self.memory.empty(shape, self.rows.dtype), self.memory, self.device)

    @override
    def first_sequences(self, batch_size: int) -> "TokenBuffer":
        is_all = batch_size == self.rows.shape[1]
        return self if is_all else HostBuffer(self.rows[:, :batch_size], self.memory, self.device)


class StagedBuffer(TokenBuffer):
    """A copy of a `HostBuffer` on a device. It records which of its tokens differ from the host's.

    Attributes:
        rows: the tensor, `[capacity, batch, kv_heads, head_dim]`, contiguous.
        host: the buffer that it is a copy of.
        first: slot of the host buffer that the first copied token was in.
        kept: number of tokens that were copied from the host and are still here.
        written: ranges of slots, start and end, in which the host buffer lacks these tokens or has others.
    """

    __slots__ = ("first", "host", "kept", "rows", "written")

    def __init__(
        self,
        rows: Tensor,
        host: HostBuffer,
        first: int = 0,
        kept: int | None = None,
        written: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(as_states(rows))
        self.rows = rows
        self.host = host
        self.first = first
        self.kept = self.capacity if kept is None else kept
        self.written = list(written)

    @override
    def write(self, start: int, states: Tensor) -> None:
        # Without the prepared views of single slots: this buffer serves a single update.
        self.slots(start, states.shape[2]).copy_(states)

    @override
    def slots(self, start: int, count: int) -> Tensor:
        end = start + count
        if self.written and self.written[-1][1] == start:
            self.written[-1] = self.written[-1][0], end
        else:
            self.written.append((start, end))
        return self.read(start, count)

    @override
    def reallocated(self, start: int, count: int, capacity: int) -> "StagedBuffer":
        shape = (capacity, *self.rows.shape[1:])
        with torch.inference_mode(False), torch.no_grad():
            rows = torch.empty(shape, dtype=self.rows.dtype, device=self.rows.device)
            rows[:count].copy_(self.rows[start : start + count])
        return StagedBuffer(rows, self.host, self.first + start, count, clipped(self.written, start, start + count))

    @override
    def first_sequences(self, batch_size: int) -> "TokenBuffer":
        if batch_size == self.rows.shape[1]:
            return self
        first = StagedBuffer(self.rows[:, :batch_size], self.host)
        # What is written to them is written to this buffer.
        first.written = self.written
        return first


def clipped(ranges: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of ranges between `start` and `end`, counted from `start`, sorted and without overlaps."""
    found: list[tuple[int, int]] = []
    for begin, stop in sorted((max(part[0], start) - start, min(part[1], end) - start) for part in ranges):
        if begin < stop and found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif begin < stop:
            found.append((begin, stop))
    return found
