"""Buffers at home, and the copies of them that a device works on."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.offload.storage import HomeMemory
from kvlayers.stores.buffer import StateForm, TokenBuffer


def by_tokens(states: Tensor) -> Tensor:
    """States `[batch, kv_heads, tokens, head_dim]` as `[tokens, batch, kv_heads, head_dim]`, a view."""
    return states.permute(2, 0, 1, 3)


def as_states(rows: Tensor) -> Tensor:
    """Rows `[tokens, batch, kv_heads, head_dim]` as states, a view."""
    return rows.permute(1, 2, 0, 3)


class HostBuffer(TokenBuffer):
    """A buffer in the memory that states are at home in.

    The tokens are the outermost dimension in memory, so that any run of them is one piece for a copy between devices.

    Attributes:
        rows: the memory, `[capacity, batch, kv_heads, head_dim]`, contiguous.
        memory: where it is from, and what it grows into.
        device: where the states are computed.
    """

    __slots__ = ("device", "memory", "rows")

    def __init__(self, rows: Tensor, memory: HomeMemory, device: torch.device) -> None:
        super().__init__(as_states(rows))
        self.rows = rows
        self.memory = memory
        self.device = device

    @classmethod
    def like(cls, buffer: TokenBuffer, memory: HomeMemory, device: torch.device) -> "HostBuffer":
        """An unfilled buffer with room for what another one has room for."""
        rows = by_tokens(buffer.tensor)
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            return cls(memory.empty(tuple(rows.shape), rows.dtype), memory, device)

    @property
    @override
    def form(self) -> StateForm:
        return (*super().form[:4], self.device)

    @override
    def moved(self, start: int, count: int, capacity: int, free: int = 0) -> "HostBuffer":
        rows = self._empty(capacity, self.rows.shape[1])
        with torch.no_grad():
            rows[free : free + count].copy_(self.rows[start : start + count])
        return HostBuffer(rows, self.memory, self.device)

    @override
    def selected(self, indices: Tensor, start: int, count: int, capacity: int, free: int = 0) -> "HostBuffer":
        rows = self._empty(capacity, indices.shape[0])
        with torch.no_grad():
            chosen = rows[free : free + count]
            torch.index_select(self.rows[start : start + count], 1, indices.to(rows.device), out=chosen)
        return HostBuffer(rows, self.memory, self.device)

    @override
    def another(self, batch_size: int, capacity: int) -> "HostBuffer":
        # Not zeros: no more than the tokens that are there is ever brought.
        return HostBuffer(self._empty(capacity, batch_size), self.memory, self.device)

    def _empty(self, capacity: int, batch_size: int) -> Tensor:
        _, _, kv_heads, head_dim = self.rows.shape
        return self.memory.empty((capacity, batch_size, kv_heads, head_dim), self.rows.dtype)

    @override
    def first_sequences(self, batch_size: int) -> "TokenBuffer":
        if batch_size == self.rows.shape[1]:
            return self
        return HostBuffer(self.rows[:, :batch_size], self.memory, self.device)


class StagedBuffer(TokenBuffer):
    """What a device has of a buffer that is at home elsewhere. It knows which of its tokens are not there yet.

    Attributes:
        rows: its memory, `[capacity, batch, kv_heads, head_dim]`, contiguous.
        home: the buffer that it is a copy of.
        first: token of `home` that is the first one here.
        free: slots before that one.
        kept: tokens that were brought, or moved here from where they were brought to.
        was_brought: whether the memory is what states were brought to, rather than some that they were moved to since.
        written: runs of tokens, start and end, that `home` does not have, or has otherwise.
    """

    __slots__ = ("first", "free", "home", "kept", "rows", "was_brought", "written")

    def __init__(
        self,
        rows: Tensor,
        home: HostBuffer,
        first: int = 0,
        kept: int | None = None,
        written: Sequence[tuple[int, int]] = (),
        free: int = 0,
    ) -> None:
        super().__init__(as_states(rows))
        self.rows = rows
        self.home = home
        self.first = first
        self.free = free
        self.was_brought = kept is None
        self.kept = self.capacity if kept is None else kept
        self.written = list(written)

    @override
    def write(self, start: int, states: Tensor) -> None:
        tokens = states.shape[2]
        # Not by views that are cut ahead for many writes: it is there for one update.
        self.read(start, tokens).copy_(states)
        end = start + tokens
        if self.written and self.written[-1][1] == start:
            self.written[-1] = self.written[-1][0], end
        else:
            self.written.append((start, end))

    @override
    def moved(self, start: int, count: int, capacity: int, free: int = 0) -> "StagedBuffer":
        shape = (capacity, *self.rows.shape[1:])
        with torch.inference_mode(False), torch.no_grad():
            rows = torch.empty(shape, dtype=self.rows.dtype, device=self.rows.device)
            rows[free : free + count].copy_(self.rows[start : start + count])
        written = [(free + begin, free + end) for begin, end in clipped(self.written, start, start + count)]
        return StagedBuffer(rows, self.home, self.first + start - self.free, count, written, free)

    @override
    def first_sequences(self, batch_size: int) -> "TokenBuffer":
        return self if batch_size == self.rows.shape[1] else _FirstSequences(self, batch_size)

    @property
    def is_in_place(self) -> bool:
        """Whether its tokens are in the slots that they have at home."""
        return self.first == self.free and self.capacity == self.home.capacity


class _FirstSequences(TokenBuffer):
    """Some of the sequences of a staged buffer, which is told what is written to them."""

    __slots__ = ("whole",)

    def __init__(self, whole: StagedBuffer, batch_size: int) -> None:
        super().__init__(whole.tensor[:batch_size])
        self.whole = whole

    @override
    def write(self, start: int, states: Tensor) -> None:
        super().write(start, states)
        self.whole.written.append((start, start + states.shape[2]))


def clipped(runs: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of runs that are between two tokens, counted from the first of the two, without what comes twice."""
    found: list[tuple[int, int]] = []
    for begin, stop in sorted((max(run[0], start) - start, min(run[1], end) - start) for run in runs):
        if begin >= stop:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((begin, stop))
    return found
