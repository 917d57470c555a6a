"""Tokens in packed blocks that the queries of one update attend to."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvlayers.attention.dense_segment import KernelCache
from kvlayers.attention.segment_rows import SegmentRows
from kvlayers.quantizers.contract import Side
from kvlayers.quantizers.packed_side import PackedSide


@dataclass(frozen=True, eq=False)
class PackedSegment:
    """Tokens in packed blocks, not all of which need be full.

    Attributes:
        keys: packed keys.
        values: packed values.
        first: tokens at the beginning of the first block that have been evicted.
        ends: for each block the tokens that it holds, counted from its beginning; `None` if all are full.
        rows: as `DenseSegment.rows`.
        kernel_cache: as `DenseSegment.kernel_cache`.
    """

    keys: PackedSide
    values: PackedSide
    first: int = 0
    ends: tuple[int, ...] | None = None
    rows: SegmentRows | None = None
    kernel_cache: KernelCache = field(default_factory=KernelCache, init=False, repr=False)

    @property
    def batch(self) -> int:
        """Sequences of the segment."""
        return self.keys.codes.shape[0]

    @functools.cached_property
    def kv_heads(self) -> int:
        """Heads that have keys and values."""
        return self.keys.codes.shape[1]

    @functools.cached_property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a key, and of a value."""
        return self.keys.head_dim, self.values.head_dim

    @property
    def blocks(self) -> int:
        """Blocks in the segment."""
        return int(self.keys.codes.shape[2])

    @property
    def tokens(self) -> int:
        """Tokens in the segment."""
        held = self.blocks * self.keys.block_tokens if self.ends is None else sum(self.ends)
        return held - self.first

    def side(self, side: Side) -> PackedSide:
        """Keys or values."""
        return self.keys if side == "keys" else self.values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes and parameters of the keys, and of the values, `[batch, kv_heads, blocks, ...]`."""
        return self.keys.codes, self.keys.parameters, self.values.codes, self.values.parameters

    def with_tensors(self, tensors: Iterable[Tensor]) -> "PackedSegment":
        """The segment with other `tensors`, in the same order."""
        key_codes, key_parameters, codes, parameters = tensors
        keys = replace(self.keys, codes=key_codes, parameters=key_parameters)
        return replace(self, keys=keys, values=replace(self.values, codes=codes, parameters=parameters))

    def with_rows(self, rows: SegmentRows | None) -> "PackedSegment":
        """The segment with other `rows`."""
        return replace(self, rows=rows)

    def pieces(self, tokens: int) -> Iterator["PackedSegment"]:
        """The segment in pieces of about `tokens` tokens, whole blocks, of which each sequence of the batch reads its
        own."""
        blocks = max(tokens // self.keys.block_tokens, 1)
        for start in range(0, self.blocks, blocks):
            some = slice(start, start + blocks)
            parts = (states[:, :, some] for states in self.tensors)
            piece = self.with_tensors(states if self.rows is None else self.rows.select(states) for states in parts)
            first = self.first if start == 0 else 0
            yield replace(piece, first=first, ends=None if self.ends is None else self.ends[some], rows=None)

    def dequantized(self, side: Side) -> Tensor:
        """States of one side, float32 `[batch, kv_heads, tokens, head_dim]`, still rotated if they were packed so."""
        return self._held(self.side(side).dequantized())

    def states(self, side: Side, dtype: torch.dtype) -> Tensor:
        """States of one side, `[batch, kv_heads, tokens, head_dim]` of a dtype, rotated back."""
        return self._held(self.side(side).states(dtype))

    def _held(self, states: Tensor) -> Tensor:
        """The states of held tokens, among those of whole blocks."""
        if self.ends is None:
            return states[:, :, self.first :]
        runs = [[self.first, 0]]
        for block, end in enumerate(self.ends):
            start = block * self.keys.block_tokens
            if block and runs[-1][1] != start:
                runs.append([start, start])
            runs[-1][1] = start + end
        held = [states[:, :, start:end] for start, end in runs]
        return held[0] if len(held) == 1 else torch.cat(held, 2)
