"""Times of calls on a device, of contenders in turns."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lib.gpu_stage import Setup
from lib.internals import interleaved

Call = Callable[[int], Any]
"""A call with the number of its turn, which chooses among copies of the states."""

CACHES_BYTES = 256 * 2**20
"""Larger than a device's second-level cache: this many bytes are read before the same bytes are read again."""


def copies_of(nbytes: int) -> int:
    """Copies of states to read in turns, so that none of them is still in the device's caches."""
    return 1 + CACHES_BYTES // max(nbytes, 1)


def microseconds(
    setup: Setup, calls: Mapping[str, Call], turns: Mapping[str, int], trials: int, in_graph: bool
) -> dict[str, list[float]]:
    """Microseconds of a call of each contender, by trial.

    Args:
        setup: the device.
        calls: the calls of each contender.
        turns: how many calls in a row are timed: at least as many as there are copies of its states.
        trials: how often.
        in_graph: whether the calls in a row are one CUDA graph, so that the device is timed and not Python.
    """
    runs: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        count = turns[name]

        def in_a_row(call: Call = call, count: int = count) -> None:
            for turn in range(count):
                call(turn)

        runs[name] = recorded(in_a_row) if in_graph else in_a_row
        runs[name]()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for trial in range(trials):
        for name in interleaved(list(calls), trial):
            found[name].append(1e6 * elapsed(setup, runs[name]) / turns[name])
    return found


def recorded(in_a_row: Callable[[], None]) -> Callable[[], None]:
    """Calls in a row as a CUDA graph. Before it is recorded they run once, as kernels may prepare for each call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        in_a_row()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_a_row()
    return graph.replay


def elapsed(setup: Setup, run: Callable[[], Any]) -> float:
    """Seconds from the first to the last work that a call queues on the device; on a CPU those of the call."""
    setup.synchronize()
    if not setup.on_cuda:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def milliseconds(setup: Setup, run: Callable[[], Any]) -> float:
    """Milliseconds of a call with all work that it queues, by the clock of the host."""
    setup.synchronize()
    begin = time.perf_counter()
    run()
    setup.synchronize()
    return 1000 * (time.perf_counter() - begin)


class Memory:
    """Bytes on the device, of which the peak is zero on a CPU.

    Attributes:
        before: bytes when the measurement began.
        peak: most bytes at a time, beyond those at the beginning.
        held: bytes at the end, beyond those at the beginning.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.before = self.peak = self.held = 0

    def __enter__(self) -> "Memory":
        if self._setup.on_cuda:
            self._setup.synchronize()
            torch.cuda.reset_peak_memory_stats(self._setup.device)
            self.before = torch.cuda.memory_allocated(self._setup.device)
        return self

    def __exit__(self, *error: object) -> None:
        if self._setup.on_cuda:
            self._setup.synchronize()
            self.peak = torch.cuda.max_memory_allocated(self._setup.device) - self.before
            self.held = torch.cuda.memory_allocated(self._setup.device) - self.before


@contextmanager
def counted_captures() -> Iterator[list[int]]:
    """Counts the CUDA graphs that are recorded in a block."""
    counted = [0]
    graph: Any = torch.cuda.graph
    enter = graph.__enter__

    def counting(self: Any) -> Any:
        counted[0] += 1
        return enter(self)

    graph.__enter__ = counting
    try:
        yield counted
    finally:
        graph.__enter__ = enter


def median(values: list[float]) -> float:
    return statistics.median(values)
