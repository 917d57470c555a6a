"""Brings the states of layers to their device just before they are needed, and sends back what is new."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvlayers.offload.buffers import HostBuffer, StagedBuffer, by_tokens, clipped
from kvlayers.offload.storage import HomeMemory, HostMemory
from kvlayers.offload.traffic import Traffic, TrafficMeter
from kvlayers.offload.transfers import Mark, Rows, Transfers, transfers_for
from kvlayers.stores.buffer import TokenBuffer
from kvlayers.stores.contract import Mover

TransfersMaker = Callable[[torch.device], Transfers | None]


class OffloadTarget(Protocol):
    """A layer whose states travel."""

    index: int
    """Which layer of the cache it is, for the meter."""
    edition: int
    """A number that changes when its states do, other than by an update."""

    @property
    def device(self) -> torch.device | None:
        """Where its states are computed, `None` before the first ones."""

    def swap_buffers(self, move: Mover) -> None:
        """See `TokenStore.swap_buffers`."""


@dataclass
class Staged:
    """The states of a layer on the device, or on their way there."""

    edition: int
    buffers: dict[int, StagedBuffer]
    """By the identity of the buffers at home."""
    ready: Mark | None
    """When they are there, `None` where there was nothing to bring."""
    traffic: Traffic


class DeviceQueue:
    """What the layers of one device share.

    Attributes:
        transfers: how states get there and back.
        staged: layers that were brought ahead, or are there.
        sent: a mark behind everything that was sent.
        last: the layer that was asked for last.
    """

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers
        self.staged: weakref.WeakKeyDictionary[Any, Staged] = weakref.WeakKeyDictionary()
        self.sent: Mark | None = None
        self.last: weakref.ref[Any] | None = None
        self._followers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._in_flight: deque[tuple[Mark, list[Tensor]]] = deque()

    def follow(self, layer: OffloadTarget) -> Any:
        """Note that `layer` comes after the one before; the layer that came after it the last time, if any."""
        before = None if self.last is None else self.last()
        if before is not None and before is not layer:
            self._followers[before] = weakref.ref(layer)
        self.last = weakref.ref(layer)
        follower = self._followers.get(layer)
        return None if follower is None else follower()

    def hold_until_sent(self, mark: Mark, tensors: list[Tensor]) -> None:
        """Keep the memory of what is being sent, of one layer at a time."""
        self._in_flight.append((mark, tensors))
        while len(self._in_flight) > 1:
            # The allocator may give memory out again to whatever is computed from then on.
            sent, _ = self._in_flight[0]
            self.transfers.computing_waits(sent)
            self._in_flight.popleft()
        self.let_go()

    def let_go(self) -> None:
        """Hold no more of the memory of what has been sent by now."""
        while self._in_flight and self.transfers.is_reached(self._in_flight[0][0]):
            self._in_flight.popleft()


class WriteBack:
    """What it takes for a layer's states to be at home: a home for each buffer, and what is to be sent there.

    Args:
        memory: where homes are.
        device: where the states are computed.
        wait: returns when what was sent before has arrived.

    Attributes:
        pairs: rows at home, and those that are to be sent to them.
        sent_from: memory that is sent from, and that nobody else holds until then.
        changes_homes: whether a buffer has another home now than what it was brought from, or its first one.
    """

    def __init__(self, memory: HomeMemory, device: torch.device, wait: Callable[[], None]) -> None:
        self._memory, self._device, self._wait = memory, device, wait
        self._homes: dict[int, HostBuffer] = {}
        self.pairs: list[tuple[Rows, Rows]] = []
        self.sent_from: list[Tensor] = []
        self.changes_homes = False

    def note(self, buffer: TokenBuffer, start: int, end: int) -> TokenBuffer:
        """Find a home for a buffer; a `Mover` that moves nothing."""
        if isinstance(buffer, StagedBuffer):
            self._homes[id(buffer)] = home = self._home_of_staged(buffer)
            self.changes_homes = self.changes_homes or home is not buffer.home
            for run in clipped(buffer.written, 0, end):
                self.pairs.append((Rows(home.rows, *run), Rows(buffer.rows, *run)))
            if not buffer.was_brought:
                self.sent_from.append(buffer.rows)
        elif not isinstance(buffer, HostBuffer) and not buffer.tracks_gradients:
            self._homes[id(buffer)] = home = HostBuffer.like(buffer, self._memory, self._device)
            self.changes_homes = True
            if start < end:
                with torch.inference_mode(False), torch.no_grad():
                    rows = by_tokens(buffer.tensor)[start:end].contiguous()
                self.pairs.append((Rows(home.rows, start, end), Rows(rows, 0, end - start)))
                self.sent_from.append(rows)
        return buffer

    def home_of(self, buffer: TokenBuffer, start: int, end: int) -> TokenBuffer:
        """Where a buffer that was noted is at home; a `Mover`."""
        return self._homes.get(id(buffer), buffer)

    def _home_of_staged(self, buffer: StagedBuffer) -> HostBuffer:
        """Where it came from, or that with as much room as the buffer has by now."""
        if buffer.is_in_place:
            return buffer.home
        self._wait()
        with torch.inference_mode(False):
            return buffer.home.moved(buffer.first, buffer.kept, buffer.capacity, buffer.free)


class Prefetcher:
    """Moves the states of a cache's layers between their home and the devices that compute.

    Which layer comes next is learned: it is the one that came next the last time. While a layer is computed, the next
    one's states are brought, so that there are those of two layers on a device at a time. After an update only the
    tokens that it wrote are sent.

    What is guaranteed, for each device:

    * An update begins when the layer's states have arrived: the current stream waits for them, the host does not.
    * States are brought after all that was ever sent has arrived at home, and into memory whose former use, whatever
      was asked of the current stream before, is over. So nothing is read before it is written, nor written over before
      it is read, and the allocator needs to be told of no other stream.
    * What is sent was computed before: sending waits for the current stream, as far as it has been asked by then.
    * Memory that is sent from, and is not that of a staged layer, is let go when the current stream has waited for it.
    * Whatever else is done to a layer (crop, reorder, fork, state, ...) is done at home, by the host, when what was
      sent of it has arrived. What was brought ahead of it is then not used.

    All layers of a cache must be updated from one thread at a time. The stream that is the current one may change
    between updates only as for any other tensor: if the one waits for the other.

    Args:
        memory: where states are at home, pinned memory of the host where not given.
        transfers: makes the streams of a device; `None` for a device whose states need not travel.

    Attributes:
        meter: bytes moved.
    """

    def __init__(self, memory: HomeMemory | None = None, transfers: TransfersMaker = transfers_for) -> None:
        self.memory = HostMemory() if memory is None else memory
        self.meter = TrafficMeter()
        self._make_transfers = transfers
        self._lanes: dict[torch.device, DeviceQueue | None] = {}
        self._layers = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Streams are of a process.
        return Prefetcher, (self.memory, self._make_transfers)

    def another(self) -> "Prefetcher":
        """One for the layers of another cache, with homes and streams of the same kind, and counted together."""
        twin = Prefetcher(self.memory, self._make_transfers)
        twin.meter, twin._layers = self.meter, self._layers
        return twin

    def next_index(self) -> int:
        """The number of a layer that is new."""
        self._layers += 1
        return self._layers - 1

    def lane(self, device: torch.device | None) -> DeviceQueue | None:
        """What the layers of a device share, `None` where their states are computed where they are."""
        if device is None:
            return None
        if device not in self._lanes:
            transfers = self._make_transfers(device)
            self._lanes[device] = None if transfers is None else DeviceQueue(transfers)
        return self._lanes[device]

    def travels(self, device: torch.device | None) -> bool:
        """Whether states that are computed on a device are at home elsewhere."""
        return device is not None and (self.lane(device) is not None or self.memory.holds_host_states)

    def bring(self, layer: OffloadTarget, device: torch.device) -> None:
        """Let the states of a layer be on their device, for what is asked of the current stream from now on."""
        lane = self.lane(device)
        if lane is None:
            return
        lane.let_go()
        follower = lane.follow(layer)
        staged = self._staged(lane, layer)
        if staged.ready is not None:
            lane.transfers.computing_waits(staged.ready)
        self.meter.count(layer.index, staged.traffic)
        staged.traffic = Traffic()
        layer.swap_buffers(lambda buffer, start, end: staged.buffers.get(id(buffer), buffer))
        for other in list(lane.staged):
            if other is not layer and other is not follower:
                self._drop(lane, other)
        if follower is not None and follower is not layer:
            # Where there is no memory for it yet, it is brought when it is needed.
            with contextlib.suppress(torch.OutOfMemoryError):
                self._staged(lane, follower)

    def _staged(self, lane: DeviceQueue, layer: OffloadTarget) -> Staged:
        """What is on the device, or on its way there; sets out for it where there is nothing."""
        staged = lane.staged.get(layer)
        if staged is None or staged.edition != layer.edition:
            self._drop(lane, layer)
            staged = lane.staged[layer] = self._set_out(lane, layer)
        return staged

    def _drop(self, lane: DeviceQueue, layer: OffloadTarget) -> None:
        dropped = lane.staged.pop(layer, None)
        if dropped is not None:
            # Brought in vain, but brought.
            self.meter.count(layer.index, dropped.traffic)

    def _set_out(self, lane: DeviceQueue, layer: OffloadTarget) -> Staged:
        at_home: list[tuple[HostBuffer, Rows]] = []

        def note(buffer: TokenBuffer, start: int, end: int) -> TokenBuffer:
            if isinstance(buffer, HostBuffer):
                at_home.append((buffer, Rows(buffer.rows, start, end)))
            return buffer

        layer.swap_buffers(note)
        if not at_home:
            return Staged(layer.edition, {}, None, Traffic())
        # Marked just before the memory is taken: see the guarantees.
        after = [lane.transfers.computed()] + ([] if lane.sent is None else [lane.sent])
        tensors, ready = lane.transfers.bring([rows for _, rows in at_home], after)
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            buffers = {id(home): StagedBuffer(tensor, home) for (home, _), tensor in zip(at_home, tensors, strict=True)}
        return Staged(layer.edition, buffers, ready, Traffic(to_device=sum(rows.nbytes for _, rows in at_home)))

    def leave(self, layer: OffloadTarget) -> None:
        """Let the states of a layer be at home again: what is not there yet is sent.

        Raises:
            CapacityError: there is no memory for them. They stay where they are.
        """
        lane, device = self.lane(layer.device), layer.device
        if device is None or not self.travels(device):
            return
        departure = WriteBack(self.memory, device, lambda: self.settle(layer))
        # Twice: where there is no memory for one buffer, none has been moved.
        layer.swap_buffers(departure.note)
        layer.swap_buffers(departure.home_of)
        if departure.pairs:
            self._send(lane, layer, departure)
        if lane is not None and (departure.pairs or departure.changes_homes):
            # Even where nothing is sent: what is staged is of other buffers than those that are at home now.
            lane.staged.pop(layer, None)

    def _send(self, lane: DeviceQueue | None, layer: OffloadTarget, departure: WriteBack) -> None:
        if lane is None:
            # Within the host's memory: nothing travels.
            with torch.no_grad():
                for home, rows in departure.pairs:
                    home.states.copy_(rows.states)
            return
        lane.sent = lane.transfers.send(departure.pairs, [lane.transfers.computed()])
        if departure.sent_from:
            lane.hold_until_sent(lane.sent, departure.sent_from)
        self.meter.count(layer.index, Traffic(to_host=sum(rows.nbytes for _, rows in departure.pairs)))

    def settle(self, layer: OffloadTarget) -> None:
        """Return when all that was sent of a layer's states has arrived at home."""
        lane = self.lane(layer.device)
        if lane is not None and lane.sent is not None:
            lane.transfers.host_waits(lane.sent)
            lane.let_go()

    def forget(self, layer: OffloadTarget) -> None:
        """Let go of what was brought of a layer: it is about to change at home."""
        lane = self.lane(layer.device)
        if lane is not None:
            self._drop(lane, layer)
