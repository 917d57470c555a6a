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

Mark = Any
"""A point in the work of a stream, as one kind of `Transfers` knows it."""


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `end` of a tensor: those of its first dimension, so that they lie together."""

    tensor: Tensor
    start: int
    end: int

    @property
    def states(self) -> Tensor:
        """The rows themselves."""
        return self.tensor[self.start : self.end]

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        row = self.tensor.nbytes // max(self.tensor.shape[0], 1)
        return (self.end - self.start) * row


class Transfers(ABC):
    """Copies for one device, in the background of what it computes.

    There are three orders of work: what the device computes, what is brought to it, what is sent from it. Each goes by
    itself, one thing after the other; between them there is no order but that of marks.
    """

    @abstractmethod
    def computed(self) -> Mark:
        """A mark behind everything that was asked of the device so far, on the stream that is the current one."""

    @abstractmethod
    def bring(self, sources: Sequence[Rows], after: Sequence[Mark]) -> tuple[list[Tensor], Mark]:
        """Copy rows to new tensors on the device, in the same places, when all of `after` is done.

        The memory of the tensors may be that of others that nobody holds any more, and whose use came before `after`.
        """

    @abstractmethod
    def send(self, pairs: Sequence[tuple[Rows, Rows]], after: Sequence[Mark]) -> Mark:
        """Copy rows from the device, the second of each pair, to the host, the first, when all of `after` is done."""

    @abstractmethod
    def computing_waits(self, mark: Mark) -> None:
        """Let whatever is asked of the device from now on, on the current stream, come after a mark."""

    @abstractmethod
    def host_waits(self, mark: Mark) -> None:
        """Return when a mark is reached."""

    @abstractmethod
    def is_reached(self, mark: Mark) -> bool:
        """Whether a mark is reached by now."""


class StreamTransfers(Transfers):
    """Two streams beside the current one, and events between them; nothing waits for the whole device.

    Raises:
        RuntimeError: the device has no streams.
        ValueError: it is not the accelerator of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._inbound = torch.Stream(device=device)
        self._outbound = torch.Stream(device=device)
        # A device may have streams to be made, and none that are current.
        self.host_waits(self.computed())

    @override
    def computed(self) -> Mark:
        return torch.accelerator.current_stream(self.device).record_event()

    @override
    def bring(self, sources: Sequence[Rows], after: Sequence[Mark]) -> tuple[list[Tensor], Mark]:
        for mark in after:
            self._inbound.wait_event(mark)
        # Allocated on this stream, whose order of work is that in which the allocator gives memory out again.
        with _on(self._inbound):
            brought = [_copied(rows, self.device, non_blocking=True) for rows in sources]
        return brought, self._inbound.record_event()

    @override
    def send(self, pairs: Sequence[tuple[Rows, Rows]], after: Sequence[Mark]) -> Mark:
        for mark in after:
            self._outbound.wait_event(mark)
        with _on(self._outbound):
            for home, rows in pairs:
                home.states.copy_(rows.states, non_blocking=True)
        sent = self._outbound.record_event()
        # Streams are of a pool, and another cache may have this one too: its memory is given out again in this order.
        self._inbound.wait_event(sent)
        return sent

    @override
    def computing_waits(self, mark: Mark) -> None:
        torch.accelerator.current_stream(self.device).wait_event(mark)

    @override
    def host_waits(self, mark: Mark) -> None:
        mark.synchronize()

    @override
    def is_reached(self, mark: Mark) -> bool:
        return bool(mark.query())


class BlockingTransfers(Transfers):
    """Copies that are done when they are asked for, on devices without streams: everything is in one order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @override
    def computed(self) -> Mark:
        return None

    @override
    def bring(self, sources: Sequence[Rows], after: Sequence[Mark]) -> tuple[list[Tensor], Mark]:
        return [_copied(rows, self.device, non_blocking=False) for rows in sources], None

    @override
    def send(self, pairs: Sequence[tuple[Rows, Rows]], after: Sequence[Mark]) -> Mark:
        for home, rows in pairs:
            home.states.copy_(rows.states)

    @override
    def computing_waits(self, mark: Mark) -> None:
        pass

    @override
    def host_waits(self, mark: Mark) -> None:
        pass

    @override
    def is_reached(self, mark: Mark) -> bool:
        return True


def transfers_for(device: torch.device) -> Transfers | None:
    """How states get to a device and back, `None` for the host itself."""
    if device.type in ("cpu", "meta"):
        return None
    try:
        return StreamTransfers(device)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        _say_blocking(str(device), str(error))
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
def _say_blocking(device: str, reason: str) -> None:
    logger.warning("%s has no streams to offload on (%s): copies wait for one another instead.", device, reason)
