"""Streams that are only pretended, on the host: for tests of late copies, and for counting.

What the device computes, the host computes at once: only copies are late. `race_detector.py` finds what is not ordered.
"""

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.offload.transfers import BufferRows, Event, PendingCopy, Transfers

FILLING = 0xAB
"""Bytes of memory that nothing was copied to: as a float, nothing that attention could take for a state."""

Progress = Callable[[int], int]


@dataclass(eq=False)
class _Copy:
    """A copy that was asked for, and is done some time later."""

    run: Callable[[], None]
    queue: deque["_Copy"]
    done: bool = field(default=False)


class _LateCopy(PendingCopy):
    """A copy that is finished, at the latest, if the current stream waits for it or its memory goes."""

    @override
    def make_stream_wait(self) -> None:
        _finish(self.event)

    def __del__(self) -> None:
        _finish(self.event)


class RecordingTransfers(Transfers):
    """Copies between two memories of the host, done no sooner than allowed and as late as `progress` likes.

    "Device" memory is given out again as soon as nobody holds it, as an allocator for streams does, and is overwritten
    when a copy to it begins. So what is read too early or let go too early comes out wrong.

    Args:
        progress: how many of so many copies that could be done are done whenever something is asked. At random where
            not given, from `seed`.
        seed: of the random numbers.

    Attributes:
        peak_bytes: the most device memory that was held at a time.
    """

    def __init__(self, progress: Progress | None = None, seed: int = 0) -> None:
        numbers = random.Random(seed)
        self._progress = (lambda waiting: numbers.randint(0, waiting)) if progress is None else progress
        self._inbound: deque[_Copy] = deque()
        self._outbound: deque[_Copy] = deque()
        self._blocks: list[Tensor] = []
        self.peak_bytes = 0

    @override
    def copy_to_device(self, sources: Sequence[BufferRows]) -> PendingCopy:
        copied, copies = [], []
        for rows in sources:
            block = self._block(rows.tensor.numel() * rows.tensor.element_size())
            with torch.inference_mode(False):
                copied.append(_typed(block, rows.tensor))
            copies.append((block, rows))
        self.peak_bytes = max(self.peak_bytes, self.cache_nbytes)

        def run() -> None:
            for block, rows in copies:
                block.fill_(FILLING)
                _typed(block, rows.tensor)[rows.start : rows.end].copy_(rows.states)

        return _LateCopy(copied, self._ask(self._inbound, run))

    @override
    def copy_to_host(self, pairs: Sequence[tuple[BufferRows, BufferRows]]) -> PendingCopy:
        # What is on the device is not held by being sent, but by the copy that is returned.
        found = [(on_host, self._without_holding(rows)) for on_host, rows in pairs]

        def run() -> None:
            for on_host, read in found:
                on_host.states.copy_(read())

        return _LateCopy([rows.tensor for _, rows in pairs], self._ask(self._outbound, run))

    @override
    def wait(self, event: Event) -> None:
        _finish(event)

    @property
    def cache_nbytes(self) -> int:
        """Device memory that somebody holds."""
        return sum(block.numel() for block in self._blocks if not _is_free(block))

    def _ask(self, queue: deque[_Copy], run: Callable[[], None]) -> _Copy:
        copy = _Copy(torch.no_grad()(run), queue)
        queue.append(copy)
        for waiting in (self._inbound, self._outbound):
            for _ in range(self._progress(len(waiting))):
                if waiting:
                    _finish(waiting[0])
        return copy

    def _block(self, nbytes: int) -> Tensor:
        for block in self._blocks:
            if block.numel() == nbytes and _is_free(block):
                return block
        with torch.inference_mode(False):
            block = torch.full((nbytes,), FILLING, dtype=torch.uint8)
        self._blocks = [*(block for block in self._blocks if not _is_free(block)), block]
        return block

    def _without_holding(self, rows: BufferRows) -> Callable[[], Tensor]:
        start, end, tensor = rows.start, rows.end, rows.tensor
        for block in self._blocks:
            if block.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and block.numel():
                like = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
                return lambda: _typed(block, like)[start:end]
        held = weakref.ref(tensor)

        def read() -> Tensor:
            found = held()
            if found is None:
                raise RuntimeError("memory was let go before it was sent")
            return found[start:end]

        return read


def recording_transfers(device: torch.device) -> RecordingTransfers:
    """Of a module, so that it can be pickled."""
    return RecordingTransfers()


def buffers_of(layer: Any) -> list[tuple[Any, int, int]]:
    """The buffers of a layer, and the slots of each that its tokens are in."""
    found: list[tuple[Any, int, int]] = []

    def note(*buffer: Any) -> Any:
        found.append(buffer)
        return buffer[0]

    layer.swap_buffers(note)
    return found


def live_bytes(layer: Any) -> int:
    """Bytes of the tokens that a layer holds, without spare room."""
    return sum(buffer.read(start, end - start).nbytes for buffer, start, end in buffers_of(layer))


def held_bytes(layer: Any) -> int:
    """Bytes of the buffers of a layer, with spare room."""
    return sum(buffer.tensor.nbytes for buffer, *_ in buffers_of(layer))


def devices_of(layer: Any) -> set[torch.device]:
    """Where the states of a layer are."""
    return {buffer.tensor.device for buffer, *_ in buffers_of(layer)}


def _finish(copy: _Copy) -> None:
    while not copy.done:
        first = copy.queue.popleft()
        first.run()
        first.done = True


def _typed(block: Tensor, like: Tensor) -> Tensor:
    return block.view(like.dtype).view(like.shape)


def _is_free(block: Tensor) -> bool:
    """Whether nothing but the block itself refers to its memory."""
    return torch._C._storage_Use_Count(block.untyped_storage()._cdata) <= 2
