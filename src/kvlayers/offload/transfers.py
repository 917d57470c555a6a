"""Copies between a device and the host, on streams of their own, and a count of their bytes."""

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.upstream import compat

logger = logging.getLogger(__name__)

KEPT_STEPS = 64
"""Number of newest steps that the meter remembers one by one."""

Event = Any
"""A point in the work of a stream, in the form that one kind of `Transfers` uses."""


@dataclass(frozen=True)
class BufferRows:
    """BufferRows `start` to `end` of the first dimension of a tensor, which are contiguous in memory."""

    tensor: Tensor
    start: int
    end: int

    @property
    def states(self) -> Tensor:
        """A view of the rows."""
        return self.tensor[self.start : self.end]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        row = self.tensor.nbytes // max(self.tensor.shape[0], 1)
        return (self.end - self.start) * row


class PendingCopy:
    """Copies that may still be under way, and the memory of the device that they read or write.

    Whoever holds it holds the memory, and lets it go after `make_stream_wait`.

    Attributes:
        tensors: the tensors on the device.
        event: an event after the copies, `None` if they have finished.
    """

    def __init__(self, tensors: list[Tensor], event: Event = None) -> None:
        self.tensors = tensors
        self.event = event

    def make_stream_wait(self) -> None:
        """Let all work that is queued from now on, on the device's current stream, wait for the copies."""


class Transfers(ABC):
    """Copies for one device, while it computes.

    Work is done in three queues: computation on the device, copies to it, and copies from it. Each queue runs in order;
    only events order the work of different queues. The current stream, which computes, must wait for each copy: see
    `PendingCopy`.
    """

    @abstractmethod
    def copy_to_device(self, sources: Sequence[BufferRows]) -> PendingCopy:
        """Copy rows to the same rows of new tensors on the device.

        The copies come after all work that was queued so far on the current stream. The new tensors may reuse memory
        that this work has used.
        """

    @abstractmethod
    def copy_to_host(self, pairs: Sequence[tuple[BufferRows, BufferRows]]) -> PendingCopy:
        """Copy rows on the device (the second of each pair) to rows on the host (the first).

        The copies come after all work that was queued so far on the current stream.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Block until an event is reached."""


class StreamTransfers(Transfers):
    """Two streams beside the current one, ordered by events; nothing waits for the whole device.

    torch takes streams from a pool of 32, so another cache or the user may have the same ones. This does no harm,
    because no memory belongs to them: all tensors are allocated on the current stream, as those of the model are. The
    allocator reuses memory in the order of the stream that it was allocated on, and the current stream waits for each
    copy before the memory goes. If it could not (the cache goes while a copy is under way, or the current stream is
    another one by now), `record_stream` lets the allocator wait. Always to call `record_stream` would be simpler, but
    the allocator then keeps memory until the host sees that a copy has finished. The host is far ahead of the device,
    so the device would hold all layers instead of two.

    Raises:
        RuntimeError: the device has no streams.
        NotImplementedError: its allocator knows of one stream alone.
        ValueError: it is not the accelerator of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._inbound = torch.Stream(device=device)
        self._outbound = torch.Stream(device=device)
        # Some devices can create streams, but have no current stream, or cannot record one.
        self.wait(torch.accelerator.current_stream(device).record_event())
        torch.empty(1, device=device).record_stream(self._inbound)

    @override
    def copy_to_device(self, sources: Sequence[BufferRows]) -> PendingCopy:
        # Allocated before the other stream waits, since the memory may be in use until then.
        pairs = _with_room(sources, self.device)
        return self._copy(self._inbound, pairs, [rows.tensor for rows, _ in pairs])

    @override
    def copy_to_host(self, pairs: Sequence[tuple[BufferRows, BufferRows]]) -> PendingCopy:
        return self._copy(self._outbound, pairs, [rows.tensor for _, rows in pairs])

    def _copy(
        self, stream: torch.Stream, pairs: Sequence[tuple[BufferRows, BufferRows]], tensors: list[Tensor]
    ) -> PendingCopy:
        current = torch.accelerator.current_stream(self.device)
        stream.wait_event(current.record_event())
        # Made before the first copy, so that it keeps the memory even if a later one fails.
        copy = _StreamCopy(tensors, stream, current)
        with _on(stream):
            _copy_rows(pairs, non_blocking=True)
        copy.event = stream.record_event()
        return copy

    @override
    def wait(self, event: Event) -> None:
        event.synchronize()


class _StreamCopy(PendingCopy):
    """Copies on a stream, with memory that was allocated on another one.

    Attributes:
        stream: the stream that copies.
        owner: the stream that the memory belongs to.
    """

    def __init__(self, tensors: list[Tensor], stream: torch.Stream, owner: torch.Stream) -> None:
        super().__init__(tensors)
        self.stream, self.owner = stream, owner
        self._owner_waits = False

    @override
    def make_stream_wait(self) -> None:
        current = torch.accelerator.current_stream(self.owner.device)
        current.wait_event(self.event)
        if current == self.owner:
            self._owner_waits = True
        else:
            self._record(current)

    def __del__(self) -> None:
        if not self._owner_waits:
            self._record(self.stream)

    def _record(self, stream: torch.Stream) -> None:
        for tensor in self.tensors:
            tensor.record_stream(stream)


class BlockingTransfers(Transfers):
    """Copies that finish before they return, for devices without streams: all work is in one order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @override
    def copy_to_device(self, sources: Sequence[BufferRows]) -> PendingCopy:
        pairs = _with_room(sources, self.device)
        _copy_rows(pairs)
        return PendingCopy([rows.tensor for rows, _ in pairs])

    @override
    def copy_to_host(self, pairs: Sequence[tuple[BufferRows, BufferRows]]) -> PendingCopy:
        _copy_rows(pairs)
        return PendingCopy([])

    @override
    def wait(self, event: Event) -> None:
        pass


def transfers_for(device: torch.device) -> Transfers | None:
    """The transfers of a device, `None` for the host itself."""
    if device.type in ("cpu", "meta"):
        return None
    try:
        return StreamTransfers(device)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        _warn_of_blocking(str(device), str(error))
        return BlockingTransfers(device)


def _with_room(sources: Sequence[BufferRows], device: torch.device) -> list[tuple[BufferRows, BufferRows]]:
    """The same rows of new tensors on a device, with the rows to copy there."""
    # A tensor that is made in inference mode could not be written to outside of it.
    with torch.inference_mode(False):
        rooms = [torch.empty(rows.tensor.shape, dtype=rows.tensor.dtype, device=device) for rows in sources]
    return [(BufferRows(room, rows.start, rows.end), rows) for room, rows in zip(rooms, sources, strict=True)]


@torch.no_grad()
def _copy_rows(pairs: Sequence[tuple[BufferRows, BufferRows]], non_blocking: bool = False) -> None:
    for target, source in pairs:
        target.states.copy_(source.states, non_blocking=non_blocking)


@contextlib.contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    device = compat.current_device_index()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        if compat.current_device_index() != device:
            compat.set_device_index(device)


@functools.cache
def _warn_of_blocking(device: str, reason: str) -> None:
    logger.warning("%s has no streams to offload on (%s): copies wait for one another instead.", device, reason)


@dataclass
class Traffic:
    """Bytes moved.

    Attributes:
        to_host: bytes from the device to offloaded memory.
        to_device: bytes from offloaded memory to the device.
    """

    to_host: int = 0
    to_device: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.to_host + other.to_host, self.to_device + other.to_device)


class TrafficMeter:
    """Counts the bytes that an offloaded cache and its forks move to their devices and back.

    A step begins when a layer is updated again.

    Attributes:
        total: everything since the cache was made.
        steps: for each of the newest steps, oldest first, the traffic of each layer by its index. Prefetched bytes
            count for the step in which the layer uses them, or in which they are discarded.
    """

    def __init__(self) -> None:
        self.total = Traffic()
        self.steps: deque[dict[int, Traffic]] = deque([{}], maxlen=KEPT_STEPS)
        self._updated: set[int] = set()

    def __repr__(self) -> str:
        return f"TrafficMeter(total={self.total})"

    def begin_update(self, layer: int) -> None:
        """Record that a layer is updated."""
        if layer in self._updated:
            self.steps.append({})
            self._updated = set()
        self._updated.add(layer)

    def count(self, layer: int, traffic: Traffic) -> None:
        """Add the traffic of one layer."""
        self.total += traffic
        self.steps[-1][layer] = self.steps[-1].get(layer, Traffic()) + traffic

    def of_step(self, step: int = -1) -> Traffic:
        """The traffic of all layers in one step, by default the newest."""
        return sum(self.steps[step].values(), Traffic())
