"""The copies of one device: layers that are staged there, and tensors that are being written back."""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvlayers.offload.buffers import HostBuffer, StagedBuffer, by_tokens, clipped
from kvlayers.offload.storage import HomeMemory
from kvlayers.offload.traffic import Traffic
from kvlayers.offload.transfers import Event, Rows, Transfers
from kvlayers.stores.buffer import TokenBuffer
from kvlayers.stores.contract import BufferSwap


class OffloadTarget(Protocol):
    """A layer whose states are offloaded."""

    index: int
    """Index of the layer in its cache, for the meter."""
    version: int
    """A number that changes whenever the states change other than by an update."""

    @property
    def device(self) -> torch.device | None:
        """Where its states are computed, `None` before the first states."""

    def swap_buffers(self, swap: BufferSwap) -> None:
        """See `TokenStore.swap_buffers`."""


@dataclass
class Staged:
    """The states of a layer on the device, or on their way there.

    Attributes:
        version: version of the layer when they were copied.
        buffers: copies, by the identity of the host buffers.
        ready: the event after which they are there, `None` if there was nothing to copy.
        traffic: bytes copied that the meter has not counted yet.
    """

    version: int
    buffers: dict[int, StagedBuffer]
    ready: Event | None
    traffic: Traffic


class DeviceQueue:
    """The copies for all layers of one device.

    Attributes:
        transfers: copies states to the device and back.
        staged: layers whose states are on the device or on their way there.
        written_back: an event after everything that was written back, `None` at first.
        last: the layer that was fetched last.
    """

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers
        self.staged: weakref.WeakKeyDictionary[Any, Staged] = weakref.WeakKeyDictionary()
        self.written_back: Event | None = None
        self.last: weakref.ref[Any] | None = None
        self._followers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._in_flight: deque[tuple[Event, list[Tensor]]] = deque()

    def follow(self, layer: OffloadTarget) -> Any:
        """Record that `layer` follows the last one; return the layer that followed it the last time, if any."""
        before = None if self.last is None else self.last()
        if before is not None and before is not layer:
            self._followers[before] = weakref.ref(layer)
        self.last = weakref.ref(layer)
        follower = self._followers.get(layer)
        return None if follower is None else follower()

    def hold_until(self, event: Event, tensors: list[Tensor]) -> None:
        """Keep tensors alive until they have been written back, for one layer at a time."""
        self._in_flight.append((event, tensors))
        while len(self._in_flight) > 1:
            # The allocator may reuse the memory for anything that is computed from now on.
            reached, _ = self._in_flight[0]
            self.transfers.make_stream_wait(reached)
            self._in_flight.popleft()
        self.release()

    def release(self) -> None:
        """Release the tensors that have been written back by now."""
        while self._in_flight and self.transfers.is_reached(self._in_flight[0][0]):
            self._in_flight.popleft()


class WriteBack:
    """Finds a host buffer for each buffer of a layer, and the rows that must be copied there.

    Args:
        memory: memory for new host buffers.
        device: where the states are computed.
        wait: blocks until earlier copies to the host have finished.

    Attributes:
        pairs: rows on the host, and the rows on the device to copy to them.
        sources: tensors that are copied from and that nobody else keeps alive until then.
        moves_buffers: whether a buffer gets a new host buffer, or its first one.
    """

    def __init__(self, memory: HomeMemory, device: torch.device, wait: Callable[[], None]) -> None:
        self._memory, self._device, self._wait = memory, device, wait
        self._host_buffers: dict[int, HostBuffer] = {}
        self.pairs: list[tuple[Rows, Rows]] = []
        self.sources: list[Tensor] = []
        self.moves_buffers = False

    def prepare(self, buffer: TokenBuffer, start: int, end: int) -> TokenBuffer:
        """Find a host buffer for a buffer. As a `BufferSwap`, it changes nothing."""
        if isinstance(buffer, StagedBuffer):
            self._host_buffers[id(buffer)] = host = self._host_buffer_of_staged(buffer)
            self.moves_buffers = self.moves_buffers or host is not buffer.host
            for written in clipped(buffer.written, 0, end):
                self.pairs.append((Rows(host.rows, *written), Rows(buffer.rows, *written)))
            if not buffer.is_original:
                self.sources.append(buffer.rows)
        elif not isinstance(buffer, HostBuffer) and not buffer.tracks_gradients:
            self._host_buffers[id(buffer)] = host = HostBuffer.like(buffer, self._memory, self._device)
            self.moves_buffers = True
            if start < end:
                with torch.inference_mode(False), torch.no_grad():
                    rows = by_tokens(buffer.tensor)[start:end].contiguous()
                self.pairs.append((Rows(host.rows, start, end), Rows(rows, 0, end - start)))
                self.sources.append(rows)
        return buffer

    def host_buffer_of(self, buffer: TokenBuffer, start: int, end: int) -> TokenBuffer:
        """The host buffer that `prepare` has found; a `BufferSwap`."""
        return self._host_buffers.get(id(buffer), buffer)

    def _host_buffer_of_staged(self, buffer: StagedBuffer) -> HostBuffer:
        """The buffer that it was copied from, or a new one if the tokens have moved or the capacity has changed."""
        if buffer.is_aligned:
            return buffer.host
        self._wait()
        with torch.inference_mode(False):
            return buffer.host.reallocated(buffer.first, buffer.kept, buffer.capacity, buffer.free)
