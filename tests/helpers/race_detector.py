"""Streams of the device of the tests, and a detector of races between them: the order that is guaranteed, not one run.

Everything is computed at once, but each access to memory is noted with the vector clock of the stream that it was
queued on. Two accesses to the same memory, one of them a write, are a race unless events order them, however the
streams are delayed. Memory that is freed belongs to the stream that it was allocated on: an allocation on this stream
may reuse it, so it is a race with each access to the freed memory that the stream has not waited for. The rules are
those of torch's caching allocator: https://pytorch.org/docs/stable/notes/cuda.html#memory-management
"""

import functools
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

import fake_device
from fake_device import DEVICE, DeviceTensor
from kvlayers.upstream import compat

Clock = dict["Timeline", int]


class Race(AssertionError):
    """Two accesses to the same memory that nothing orders."""


@dataclass(eq=False)
class Timeline:
    """Work that is done in order: that of the host, or of a stream.

    Attributes:
        name: for messages.
        clock: how much of each timeline is done before anything that comes next in this one.
    """

    name: str
    clock: Clock = field(default_factory=dict)

    def join(self, clock: Clock) -> None:
        """Let what comes next wait for everything up to `clock`."""
        for other, time in clock.items():
            self.clock[other] = max(self.clock.get(other, 0), time)

    def tick(self) -> int:
        """The time of one more piece of work."""
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def is_after(self, access: "Access") -> bool:
        """Whether what comes next is done after an access."""
        return self.clock.get(access.timeline, 0) >= access.time


@dataclass(frozen=True)
class Access:
    """A piece of work that reads or writes a range of bytes."""

    timeline: Timeline
    time: int
    start: int
    end: int
    writes: bool
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} {'writes' if self.writes else 'reads'} on {self.timeline.name}"


class Memory:
    """One allocation, and the accesses to it that later ones must be ordered with.

    Attributes:
        owner: the stream that it was allocated on; `None` for memory of the host.
        recorded: streams for which the allocator keeps it.
    """

    def __init__(self, owner: "FakeStream | None" = None) -> None:
        self.accesses: list[Access] = []
        self.owner, self.recorded = owner, set[FakeStream]()

    def note(self, new: Access) -> None:
        for old in self.accesses:
            overlaps = old.start < new.end and new.start < old.end
            if overlaps and (old.writes or new.writes) and not new.timeline.is_after(old):
                raise Race(f"{old}, and nothing orders it before: {new}")
        self.accesses = [old for old in self.accesses if not _replaces(new, old)] + [new]


def _replaces(new: Access, old: Access) -> bool:
    within = new.start <= old.start and old.end <= new.end
    return within and (new.writes or (not old.writes and old.timeline is new.timeline))


class FakeEvent:
    """A point in a stream."""

    def __init__(self, detector: "RaceDetector", clock: Clock) -> None:
        self.detector, self.clock = detector, clock

    def synchronize(self) -> None:
        self.detector.host.join(self.clock)


class FakeStream(Timeline):
    """A stream of the device of the tests.

    Attributes:
        freed: accesses to memory that was allocated on this stream and is free, by other streams.
    """

    def __init__(self, detector: "RaceDetector", name: str) -> None:
        super().__init__(name)
        self.detector, self.device = detector, DEVICE
        self.freed: list[Access] = []

    def record_event(self) -> FakeEvent:
        self.join(self.detector.host.clock)
        return FakeEvent(self.detector, dict(self.clock))

    def wait_event(self, event: FakeEvent) -> None:
        self.join(event.clock)

    def check_reuse(self) -> None:
        for access in self.freed:
            if not self.is_after(access):
                raise Race(f"{access}, to memory that was freed and may be allocated again on {self.name}")
        self.freed.clear()

    def __enter__(self) -> Self:
        self.before, self.detector.current = self.detector.current, self
        return self

    def __exit__(self, *error: object) -> None:
        self.detector.current = self.before


class RaceDetector(TorchDispatchMode):
    """Notes all accesses to memory of the device, and to memory of the host that streams use.

    Attributes:
        host: what the host does. Work of a stream begins after the host has queued it.
        current: the current stream.
        streams: all streams, in the order in which they were made.
        pool: how many streams there are to take from, again and again.
    """

    def __init__(self, pool: int = 32) -> None:
        super().__init__()
        self.host = Timeline("the host")
        self.pool = [FakeStream(self, f"stream {index}") for index in range(pool)]
        self.taken = itertools.cycle(self.pool)
        self.current = FakeStream(self, "the default stream")
        self._device_memory: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()
        self._host_memory: dict[int, tuple[torch.UntypedStorage, Memory]] = {}
        self._new: list[Memory] = []

    def new_stream(self, device: torch.device) -> FakeStream:
        """A stream of the pool."""
        return next(self.taken)

    @contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[Self]:
        """The device of the tests has streams, and they are watched."""
        patch.setattr(torch, "Stream", self.new_stream)
        patch.setattr(torch.accelerator, "current_stream", lambda device: self.current)
        patch.setattr(torch.accelerator, "set_stream", lambda stream: setattr(self, "current", stream))
        patch.setattr(compat, "current_device_index", lambda: 0)
        patch.setattr(DeviceTensor, "record_stream", lambda *given: self._record_stream(*given), raising=False)
        patch.setattr(fake_device.device, "watcher", self._allocated)
        with self:
            yield self

    def _record_stream(self, tensor: DeviceTensor, stream: FakeStream) -> None:
        memory = self._device_memory.get(tensor._allocation)
        # Memory that was taken when no detector was installed is not watched.
        if memory is not None:
            memory.recorded.add(stream)

    # Memory

    def _allocated(self, allocation: Any) -> None:
        self.current.join(self.host.clock)
        self.current.check_reuse()
        memory = self._device_memory[allocation] = Memory(self.current)
        self._new.append(memory)
        weakref.finalize(allocation, self._freed, memory)

    def _freed(self, memory: Memory) -> None:
        # The allocator waits for what recorded streams have queued by now. The order of the owner is its own.
        waited = [memory.owner, *memory.recorded]
        memory.owner.freed += [
            access for access in memory.accesses if not any(stream.is_after(access) for stream in waited)
        ]

    def _memory(self, tensor: Tensor, is_used_by_stream: bool) -> Memory | None:
        if isinstance(tensor, DeviceTensor):
            return self._device_memory.get(tensor._allocation)
        storage = tensor.untyped_storage()
        if is_used_by_stream and tensor.numel():
            # Kept, so that its address belongs to no other memory.
            return self._host_memory.setdefault(storage.data_ptr(), (storage, Memory()))[1]
        return self._host_memory[storage.data_ptr()][1] if storage.data_ptr() in self._host_memory else None

    # Work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._new.clear()
        result = func(*args, **kwargs)
        read, written = _accessed(func, args, kwargs)
        results = fake_device.tensors_in([result])
        tensors = [*read, *written, *results]
        on_device = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        if on_device:
            self.current.join(self.host.clock)
        timeline: Timeline = self.current if on_device else self.host
        time = timeline.tick()
        for tensor, writes in (*((each, False) for each in read), *((each, True) for each in written)):
            memory = self._memory(tensor, on_device)
            if memory is not None and tensor.numel():
                memory.note(Access(timeline, time, *_range(tensor), writes, str(func)))
        if not _is_view(func) and "empty" not in func.name():
            for memory in self._new:
                memory.note(Access(timeline, time, 0, 1 << 62, True, str(func)))
        if on_device and _is_blocking(func, args, kwargs, results):
            self.host.join(self.current.clock)
        return result


def _accessed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those that it writes."""
    if _is_view(func):
        return [], []
    names, of_written, _ = fake_device.names_of(func)
    given = dict(zip(names, args, strict=False)) | kwargs
    read = fake_device.tensors_in(given.get(name) for name in names if name not in of_written)
    return read, fake_device.tensors_in(given.get(name) for name in of_written)


@functools.cache
def _is_view(func: Any) -> bool:
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _is_blocking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> bool:
    """Whether the host waits for the operator: it reads a number, or copies between host and device."""
    if func is torch.ops.aten._local_scalar_dense.default:
        return True
    if func.overloadpacket not in fake_device.COPIES:
        return False
    given = dict(zip(fake_device.names_of(func)[0], args, strict=False)) | kwargs
    involved = [*fake_device.tensors_in(args), *results]
    return not given.get("non_blocking") and len({type(each) is DeviceTensor for each in involved}) == 2


def _range(tensor: Tensor) -> tuple[int, int]:
    """The bytes of a tensor's memory from its first element to its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + (reach + 1) * tensor.element_size()
