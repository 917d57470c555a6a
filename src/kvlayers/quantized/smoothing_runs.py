"""Runs of packed blocks, whose keys were smoothed by the same vectors."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.core.buffer import TokenBuffer
from kvlayers.core.token_store import BufferSwap
from kvlayers.kernels.codes.smoothing import MOST_RUNS, STARTS_NAME, UNSMOOTHED, KeySmoothing


@dataclass(eq=False)
class SmoothingRuns:
    """Where runs begin, and their vectors. It is never changed.

    Attributes:
        starts: first block of each run; of the first one 0.
        buffers: the vectors of each run by their names, `[batch, kv_heads, 1, head_dim]`, contiguous as kernels read
            them, and in buffers because they are offloaded with the tokens.
    """

    starts: tuple[int, ...] = ()
    buffers: tuple[Mapping[str, TokenBuffer], ...] = ()

    @classmethod
    def of(cls, vectors: KeySmoothing, starts: tuple[int, ...] = (0,)) -> Self:
        """Runs with vectors `[batch, kv_heads, runs, head_dim]`."""

        def of_run(run: int) -> dict[str, TokenBuffer]:
            held = vectors.state().items()
            return {name: TokenBuffer(of_all[:, :, run : run + 1].contiguous()) for name, of_all in held}

        return cls(starts, tuple(map(of_run, range(len(starts)))))

    @classmethod
    def of_state(cls, tensors: dict[str, Tensor], blocks: int) -> Self:
        """Copies of those in the state of a store, which has been checked, that begin before a number of blocks."""
        starts = tuple(tensors[STARTS_NAME].tolist()) if STARTS_NAME in tensors else (0,)
        return cls.of(KeySmoothing.of_state(tensors).mapped(torch.clone), starts).part(0, blocks, keeps_first=True)

    def __len__(self) -> int:
        return len(self.starts)

    def __getstate__(self) -> dict[str, object]:
        return {"starts": self.starts, "buffers": self.buffers}

    @property
    def are_settled(self) -> bool:
        """Whether no later block is asked: there are no vectors, or as many runs as there may be."""
        return len(self) == MOST_RUNS or (len(self) > 0 and not self.buffers[0])

    @functools.cached_property
    def in_order(self) -> tuple[KeySmoothing, ...]:
        """How the keys of each run were smoothed."""
        vectors = ({name: buffer.tensor for name, buffer in of_run.items()} for of_run in self.buffers)
        return tuple(map(KeySmoothing.of_state, vectors))

    def followed(self, start: int, smoothing: KeySmoothing) -> Self:
        """These runs, and one more that begins at a block."""
        return self.__class__((*self.starts, start), self.buffers + self.of(smoothing).buffers)

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int, KeySmoothing]]:
        """The parts of the blocks from `begin` to `end` that belong to a run: first block, block behind, and run."""
        if not self.starts:
            yield begin, end, UNSMOOTHED
        for (start, stop), smoothing in zip(pairwise((*self.starts, end)), self.in_order, strict=True):
            start, stop = max(start, begin), min(stop, end)
            if start < stop:
                yield start, stop, smoothing

    def part(self, begin: int, end: int, keeps_first: bool) -> Self:
        """The runs of the blocks from `begin` to `end`. The first one may serve other tokens, and is kept then."""
        starts = tuple(max(start - begin, 0) for start in self.starts)
        skipped = 0 if keeps_first else max(starts.count(0) - 1, 0)
        kept = slice(skipped, max(sum(start < end - begin for start in starts), int(keeps_first)))
        return self if starts[kept] == self.starts else self.__class__(starts[kept], self.buffers[kept])

    def _each(self, change: Callable[[TokenBuffer], TokenBuffer]) -> Self:
        changed = ({name: change(buffer) for name, buffer in of_run.items()} for of_run in self.buffers)
        return self.__class__(self.starts, tuple(changed))

    def _in_buffers(self) -> Iterator[TokenBuffer]:
        return (buffer for of_run in self.buffers for buffer in of_run.values())

    def selected(self, indices: Tensor) -> Self:
        """The runs of the selected sequences."""
        return self._each(lambda buffer: buffer.selected(indices, 0, 1, 1))

    def promoted(self, dtype: torch.dtype) -> Self:
        """The runs in another dtype."""
        return self._each(lambda buffer: TokenBuffer(buffer.tensor.to(dtype)))

    def owned(self) -> Self:
        """The same runs: nobody writes to them, but memory that is offloaded has one owner."""
        if all(type(buffer) is TokenBuffer for buffer in self._in_buffers()):
            return self
        return self._each(lambda buffer: buffer.reallocated(0, 1, 1))

    def swapped(self, swap: BufferSwap) -> Self:
        """The runs in other buffers."""
        return self._each(lambda buffer: swap(buffer, 0, 1))

    def common_blocks(self, other: Self, blocks: int) -> int:
        """How many of the first blocks have the same vectors as in other runs of as many sequences, of `blocks`."""
        if self is other:
            return blocks
        for mine, others in zip(self.within(0, blocks), other.within(0, blocks), strict=False):
            if not mine[2].is_same(others[2]):
                return mine[0]
            if mine[1] != others[1]:
                return min(mine[1], others[1])
        return blocks

    def held_tensors(self) -> Iterator[Tensor]:
        """See `TokenStore.held_tensors`."""
        return (buffer.tensor for buffer in self._in_buffers())

    def state(self) -> dict[str, Tensor]:
        """Copies of the vectors, and where the runs begin; empty without vectors."""
        of_runs = [run.state() for run in self.in_order]
        tensors = {name: torch.cat([run[name] for run in of_runs], 2) for name in of_runs[0]} if of_runs else {}
        if tensors:
            device = next(iter(tensors.values())).device
            tensors[STARTS_NAME] = torch.tensor(self.starts, dtype=torch.int64, device=device)
        return tensors
