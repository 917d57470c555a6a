"""Copies between a device and the host, on streams of their own."""

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.upstream import compat

logger = logging.getLogger(__name__)

Event = Any
"""A point in the work of a stream, in the form that one kind of `Transfers` uses."""


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `end` of the first dimension of a tensor, which are contiguous in memory."""

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


class Transfers(ABC):
    """Copies for one device, while it computes.

    Work is done in three queues: computation on the device, copies to it, and copies from it. Each queue runs in order;
    only events order the work of different queues.
    """

    @abstractmethod
    def record_computation(self) -> Event:
        """An event after all work that was queued so far on the device's current stream."""

    @abstractmethod
    def copy_to_device(self, sources: Sequence[Rows], after: Sequence[Event]) -> tuple[list[Tensor], Event]:
        """Copy rows to the same rows of new tensors on the device, after all events in `after`.

        The new tensors may reuse the memory of tensors that nobody holds any more and that were used before `after`.
        """

    @abstractmethod
    def copy_to_host(self, pairs: Sequence[tuple[Rows, Rows]], after: Sequence[Event]) -> Event:
        """Copy rows on the device (the second of each pair) to rows on the host (the first), after all `after`."""

    @abstractmethod
    def make_stream_wait(self, event: Event) -> None:
        """Let all work that is queued from now on, on the device's current stream, wait for an event."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Block until an event is reached."""

    @abstractmethod
    def is_reached(self, event: Event) -> bool:
        """Whether an event has been reached."""


class StreamTransfers(Transfers):
    """Two streams beside the current one, ordered by events; nothing waits for the whole device.

    Raises:
        RuntimeError: the device has no streams.
        ValueError: it is not the accelerator of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._inbound = torch.Stream(device=device)
        self._outbound = torch.Stream(device=device)
        # Some devices can create streams, but have no current stream.
        self.wait(self.record_computation())

    @override
    def record_computation(self) -> Event:
        return torch.accelerator.current_stream(self.device).record_event()

    @override
    def copy_to_device(self, sources: Sequence[Rows], after: Sequence[Event]) -> tuple[list[Tensor], Event]:
        for event in after:
            self._inbound.wait_event(event)
        # Allocated on this stream, because the allocator reuses memory in the order of the stream.
        with _on(self._inbound):
            copies = [_copied(rows, self.device, non_blocking=True) for rows in sources]
        return copies, self._inbound.record_event()

    @override
    def copy_to_host(self, pairs: Sequence[tuple[Rows, Rows]], after: Sequence[Event]) -> Event:
        for event in after:
            self._outbound.wait_event(event)
        with _on(self._outbound):
            for on_host, rows in pairs:
                on_host.states.copy_(rows.states, non_blocking=True)
        written = self._outbound.record_event()
        # Streams come from a pool, and another cache may use this one too: its memory is reused in this order.
        self._inbound.wait_event(written)
        return written

    @override
    def make_stream_wait(self, event: Event) -> None:
        torch.accelerator.current_stream(self.device).wait_event(event)

    @override
    def wait(self, event: Event) -> None:
        event.synchronize()

    @override
    def is_reached(self, event: Event) -> bool:
        return bool(event.query())


class BlockingTransfers(Transfers):
    """Copies that finish before they return, for devices without streams: all work is in one order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @override
    def record_computation(self) -> Event:
        return None

    @override
    def copy_to_device(self, sources: Sequence[Rows], after: Sequence[Event]) -> tuple[list[Tensor], Event]:
        return [_copied(rows, self.device, non_blocking=False) for rows in sources], None

    @override
    def copy_to_host(self, pairs: Sequence[tuple[Rows, Rows]], after: Sequence[Event]) -> Event:
        for on_host, rows in pairs:
            on_host.states.copy_(rows.states)

    @override
    def make_stream_wait(self, event: Event) -> None:
        pass

    @override
    def wait(self, event: Event) -> None:
        pass

    @override
    def is_reached(self, event: Event) -> bool:
        return True


def transfers_for(device: torch.device) -> Transfers | None:
    """The transfers of a device, `None` for the host itself."""
    if device.type in ("cpu", "meta"):
        return None
    try:
        return StreamTransfers(device)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        _warn_of_blocking(str(device), str(error))
        return BlockingTransfers(device)


def _copied(rows: Rows, device: torch.device, non_blocking: bool) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.empty(rows.tensor.shape, dtype=rows.tensor.dtype, device=device)
        tensor[rows.start : rows.end].copy_(rows.states, non_blocking=non_blocking)
    return tensor


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
