"""The copies of one device: layers that are staged there, and tensors that are being written back."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from kvlayers.core.buffer import TokenBuffer
from kvlayers.core.token_store import BufferSwap
from kvlayers.offload.buffers import HostBuffer, StagedBuffer, by_tokens, clipped
from kvlayers.offload.storage import HomeMemory
from kvlayers.offload.transfers import BufferRows, Event, PendingCopy, Traffic, Transfers


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
        copy: the copy to the device.
        traffic: bytes copied that the meter has not counted yet.
    """

    version: int
    buffers: dict[int, StagedBuffer]
    copy: PendingCopy
    traffic: Traffic


class DeviceQueue:
    """The copies for all layers of one device.

    Attributes:
        transfers: copies states to the device and back.
        staged: layers whose states are on the device or on their way there.
        brought: an event after everything that was copied to the device, `None` at first.
        written_back: an event after everything that was written back, `None` at first.
        writing_back: copies to the host that the current stream has not waited for, and what they read.
        last: the layer that was fetched last.
    """

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers
        self.staged: weakref.WeakKeyDictionary[Any, Staged] = weakref.WeakKeyDictionary()
        self.brought: Event = None
        self.written_back: Event = None
        self.writing_back: list[PendingCopy] = []
        self.last: weakref.ref[Any] | None = None
        self._followers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def follow(self, layer: OffloadTarget) -> Any:
        """Record that `layer` follows the last one; return the layer that followed it the last time, if any."""
        before = None if self.last is None else self.last()
        if before is not None and before is not layer:
            self._followers[before] = weakref.ref(layer)
        self.last = weakref.ref(layer)
        follower = self._followers.get(layer)
        return None if follower is None else follower()

    def copy_to_device(self, sources: Sequence[BufferRows]) -> PendingCopy:
        """Copy rows to the same rows of new tensors on the device."""
        copy = self.transfers.copy_to_device(sources)
        self.brought = copy.event
        return copy

    def copy_to_host(self, pairs: Sequence[tuple[BufferRows, BufferRows]]) -> None:
        """Copy rows on the device (the second of each pair) to rows on the host, and hold them until then."""
        copy = self.transfers.copy_to_host(pairs)
        self.written_back = copy.event
        self.writing_back.append(copy)

    def finish_writing_back(self) -> None:
        """Let the current stream wait for what is being written back, and release it."""
        for copy in self.writing_back:
            copy.make_stream_wait()
        self.writing_back.clear()


class WriteBack:
    """Finds a host buffer for each buffer of a layer, and the rows that must be copied there.

    Args:
        memory: memory for new host buffers.
        device: where the states are computed.
        wait: blocks until earlier copies to the host have finished.

    Attributes:
        pairs: rows on the host, and the rows on the device to copy to them.
        moves_buffers: whether a buffer gets a new host buffer, or its first one.
    """

    def __init__(self, memory: HomeMemory, device: torch.device, wait: Callable[[], None]) -> None:
        self._memory, self._device, self._wait = memory, device, wait
        self._host_buffers: dict[int, HostBuffer] = {}
        self.pairs: list[tuple[BufferRows, BufferRows]] = []
        self.moves_buffers = False

    def prepare(self, buffer: TokenBuffer, start: int, end: int) -> TokenBuffer:
        """Find a host buffer for a buffer. As a `BufferSwap`, it changes nothing."""
        if isinstance(buffer, StagedBuffer):
            self._host_buffers[id(buffer)] = host = self._host_buffer_of_staged(buffer)
            self.moves_buffers = self.moves_buffers or host is not buffer.host
            for written in clipped(buffer.written, 0, end):
                self.pairs.append((BufferRows(host.rows, *written), BufferRows(buffer.rows, *written)))
        elif not isinstance(buffer, HostBuffer) and not buffer.tracks_gradients:
            self._host_buffers[id(buffer)] = host = HostBuffer.like(buffer, self._memory, self._device)
            self.moves_buffers = True
            if start < end:
                with torch.inference_mode(False), torch.no_grad():
                    rows = by_tokens(buffer.tensor)[start:end].contiguous()
                self.pairs.append((BufferRows(host.rows, start, end), BufferRows(rows, 0, end - start)))
        return buffer

    def host_buffer_of(self, buffer: TokenBuffer, start: int, end: int) -> TokenBuffer:
        """The host buffer that `prepare` has found; a `BufferSwap`."""
        return self._host_buffers.get(id(buffer), buffer)

    def _host_buffer_of_staged(self, buffer: StagedBuffer) -> HostBuffer:
        """The buffer that it was copied from, or another if the tokens have moved or the capacity has changed."""
        if buffer.first == 0 and buffer.capacity == buffer.host.capacity:
            # Its tokens are in the same slots as on the host.
            return buffer.host
        extended = None if buffer.first else buffer.host.extended(buffer.capacity)
        if extended is not None:
            return extended
        self._wait()
        with torch.inference_mode(False):
            return cast("HostBuffer", buffer.host.reallocated(buffer.first, buffer.kept, buffer.capacity))
