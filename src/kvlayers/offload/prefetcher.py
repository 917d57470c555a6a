"""Copies the states of layers to their device just before they are needed, and writes back the new ones."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.buffer import TokenBuffer
from kvlayers.core.token_store import BufferSwap, TokenStore
from kvlayers.offload.buffers import HostBuffer, StagedBuffer
from kvlayers.offload.device_queue import DeviceQueue, OffloadTarget, Staged, WriteBack
from kvlayers.offload.storage import HomeMemory, HostMemory
from kvlayers.offload.transfers import (
    BlockingTransfers,
    BufferRows,
    PendingCopy,
    Traffic,
    TrafficMeter,
    Transfers,
    transfers_for,
)

TransfersMaker = Callable[[torch.device], Transfers | None]

BuffersSwapper = Callable[[BufferSwap], None]
"""Calls a `BufferSwap` with some buffers of a layer."""


class Prefetcher:
    """Moves the states of a cache's layers between offloaded memory and the devices that compute.

    It learns which layer comes next: the one that came next the last time. While a layer is computed, the states of the
    next one are copied to the device, so that a device holds the states of two layers at a time. After an update only
    the tokens that it wrote are copied back.

    It guarantees, for each device:

    * An update begins when the layer's states have arrived: the current stream waits for them, the host does not.
    * States are copied to the device after everything that the current stream has queued, which includes that it waits
      for all states that are being written back. So nothing is read before it is written, nor overwritten before it
      is read.
    * States are written back after they were computed: the copy waits for all work that the current stream has queued.
    * If pages are read where they are held, the host writes to them and reads them: after everything that was written
      back of the layer has arrived. Pages that it brings to the device are copied as states are.
    * Tensors that are written back are released at the next update, when the current stream has waited for the copy.
      `StreamTransfers` says why memory is then reused in order, whoever has the same streams.
    * All other operations (crop, reorder, fork, state, ...) are done by the host, in offloaded memory, when everything
      that was written back of the layer has arrived. An operation that changes states begins when all copies to the
      device have finished, and copies that were prefetched before are then not used.

    All layers of a cache must be updated from one thread at a time. The current stream may change between updates only
    as for any other tensor: if the new one waits for the old one.

    Args:
        memory: the offloaded memory; by default pinned memory of the host.
        transfers: makes the transfers of a device; `None` for a device whose states are not offloaded.

    Attributes:
        meter: bytes moved.
        numbers: the indices of new layers.
    """

    def __init__(self, memory: HomeMemory | None = None, transfers: TransfersMaker = transfers_for) -> None:
        self.memory = HostMemory() if memory is None else memory
        self.meter = TrafficMeter()
        self._make_transfers = transfers
        self._queues: dict[torch.device, DeviceQueue | None] = {}
        self.numbers = itertools.count()

    def __reduce__(self) -> tuple[Any, ...]:
        # Streams belong to a process.
        return Prefetcher, (self.memory, self._make_transfers)

    def for_another_cache(self) -> "Prefetcher":
        """A prefetcher for another cache, with memory and streams of the same kind and the same meter."""
        twin = Prefetcher(self.memory, self._make_transfers)
        twin.meter, twin.numbers = self.meter, self.numbers
        return twin

    def queue(self, device: torch.device | None) -> DeviceQueue | None:
        """The queue of a device, `None` if its states are computed in the memory where they are."""
        if device is None:
            return None
        if device not in self._queues:
            transfers = self._make_transfers(device)
            self._queues[device] = None if transfers is None else DeviceQueue(transfers)
        return self._queues[device]

    def offloads(self, device: torch.device | None) -> bool:
        """Whether states that are computed on a device are held in other memory between updates.

        Raises:
            UnsupportedLayerError: they are held in files of a process that has forked this one.
        """
        self.memory.check_process()
        return device is not None and (self.queue(device) is not None or self.memory.holds_host_states)

    def fetch(self, layer: OffloadTarget, device: torch.device) -> None:
        """Have the states of a layer on their device, for all work that the current stream queues from now on."""
        queue = self.queue(device)
        if queue is None:
            return
        queue.finish_writing_back()
        follower = queue.follow(layer)
        staged = self._staged(queue, layer)
        staged.copy.make_stream_wait()
        self.meter.count(layer.index, staged.traffic)
        staged.traffic = Traffic()
        layer.swap_buffers(lambda buffer, start, end: staged.buffers.get(id(buffer), buffer))
        for other in list(queue.staged):
            if other is not layer and other is not follower:
                self._drop(queue, other)
        if follower is not None and follower is not layer:
            # If there is no memory for it yet, it is copied when it is needed.
            with contextlib.suppress(torch.OutOfMemoryError):
                self._staged(queue, follower)

    def _staged(self, queue: DeviceQueue, layer: OffloadTarget) -> Staged:
        """The layer's states on the device, or on their way there; starts to copy them if necessary."""
        staged = queue.staged.get(layer)
        if staged is None or staged.version != layer.version:
            self._drop(queue, layer)
            staged = queue.staged[layer] = self._start_copy(queue, layer.version, layer.swap_buffers)
        return staged

    def _drop(self, queue: DeviceQueue, layer: OffloadTarget) -> None:
        dropped = queue.staged.pop(layer, None)
        if dropped is not None:
            # Copied for nothing, but copied.
            self.meter.count(layer.index, dropped.traffic)

    def _start_copy(self, queue: DeviceQueue, version: int, swap_buffers: BuffersSwapper) -> Staged:
        on_host = _rows_on_host(swap_buffers)
        if not on_host:
            return Staged(version, {}, PendingCopy([]), Traffic())
        copy = queue.copy_to_device([rows for _, rows in on_host])
        # A tensor that is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            buffers = {
                id(host): StagedBuffer(tensor, host) for (host, _), tensor in zip(on_host, copy.tensors, strict=True)
            }
        return Staged(version, buffers, copy, Traffic(to_device=sum(rows.nbytes for _, rows in on_host)))

    def write_back(self, layer: OffloadTarget) -> None:
        """Hold the states of a layer in offloaded memory again: copy the new ones.

        Raises:
            CapacityError: there is no memory for them. They stay on the device.
        """
        queue, device = self.queue(layer.device), layer.device
        if device is None or not self.offloads(device):
            return
        write_back = WriteBack(self.memory, device, lambda: self.synchronize(layer))
        # In two passes: if there is no memory for one buffer, none has been swapped.
        layer.swap_buffers(write_back.prepare)
        layer.swap_buffers(write_back.host_buffer_of)
        if queue is None:
            # From host memory to host memory: no traffic.
            BlockingTransfers(device).copy_to_host(write_back.pairs)
            return
        if write_back.pairs:
            queue.copy_to_host(write_back.pairs)
            self.meter.count(layer.index, Traffic(to_host=sum(rows.nbytes for _, rows in write_back.pairs)))
        if write_back.pairs or write_back.moves_buffers:
            # Even if nothing is copied: the staged copies are of other host buffers than the layer has now.
            queue.staged.pop(layer, None)

    def carry(self, layer: OffloadTarget, device: torch.device, states: Sequence[Tensor]) -> Sequence[Tensor]:
        """Bring parts of a layer's states to their device, for all work that the current stream queues from now on.

        Args:
            layer: the layer, for the meter.
            device: where they are needed.
            states: contiguous tensors on the host, which nobody writes to any more.

        Returns:
            The same states on the device.
        """
        queue = self.queue(device)
        self.meter.count(layer.index, Traffic(to_device=sum(each.nbytes for each in states)))
        if queue is None:
            return states
        copy = queue.copy_to_device([BufferRows(each, 0, each.shape[0]) for each in states])
        copy.make_stream_wait()
        return copy.tensors

    def synchronize(self, layer: OffloadTarget) -> None:
        """Block until everything that was written back of a layer has arrived."""
        queue = self.queue(layer.device)
        if queue is not None and queue.written_back is not None:
            queue.transfers.wait(queue.written_back)
            queue.finish_writing_back()

    @contextlib.contextmanager
    def pages_at_home(self, layer: OffloadTarget, store: TokenStore) -> Iterator[None]:
        """Within this context, have the pages of a layer where they are held, and its other tokens on their device.

        An update in this context writes to the pages where they are held. The other tokens stay on the device until
        `write_back`.

        Blocks until everything that was written back has arrived, and until nobody needs what was copied ahead.

        Args:
            layer: the layer.
            store: how it holds its tokens.
        """
        queue = self.queue(layer.device)
        if queue is None:
            yield
            return
        self.synchronize(layer)
        if layer in queue.staged:
            self.discard(layer)
        unpaged = self._start_copy(queue, layer.version, store.swap_unpaged_buffers)
        unpaged.copy.make_stream_wait()
        store.swap_unpaged_buffers(lambda buffer, start, end: unpaged.buffers.get(id(buffer), buffer))
        self.meter.count(layer.index, unpaged.traffic)
        held = _nbytes_on_host(layer)
        yield
        self.meter.count(layer.index, Traffic(to_host=_nbytes_on_host(layer) - held))

    def discard(self, layer: OffloadTarget) -> None:
        """Discard the copies that were prefetched for a layer, because the host is about to change its states.

        Blocks until earlier copies to the device have finished: copies of this layer may be in use (`layer.keys`).
        """
        queue = self.queue(layer.device)
        if queue is not None:
            if queue.brought is not None:
                queue.transfers.wait(queue.brought)
            self._drop(queue, layer)


def _rows_on_host(swap_buffers: BuffersSwapper) -> list[tuple[HostBuffer, BufferRows]]:
    """The tokens that are in offloaded memory."""
    found: list[tuple[HostBuffer, BufferRows]] = []

    def collect(buffer: TokenBuffer, start: int, end: int) -> TokenBuffer:
        if isinstance(buffer, HostBuffer):
            found.append((buffer, BufferRows(buffer.rows, start, end)))
        return buffer

    swap_buffers(collect)
    return found


def _nbytes_on_host(layer: OffloadTarget) -> int:
    return sum(rows.nbytes for _, rows in _rows_on_host(layer.swap_buffers))
