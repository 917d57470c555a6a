"""What the queries of one update attend to: runs of tokens, some in full precision and some packed."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlayers.quantizers.contract import Side
from kvlayers.quantizers.hadamard import rotate

if TYPE_CHECKING:
    # Stores import attention.
    from kvlayers.quantizers.packed_side import PackedSide


@dataclass(frozen=True, eq=False)
class DenseSegment:
    """Tokens in full precision.

    Attributes:
        keys: `[batch, kv_heads, tokens, key_head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
    """

    keys: Tensor
    values: Tensor

    @property
    def tokens(self) -> int:
        """Tokens in the run."""
        return int(self.keys.shape[2])

    def side(self, side: Side) -> Tensor:
        """Keys or values."""
        return self.keys if side == "keys" else self.values


@dataclass(frozen=True, eq=False)
class PackedSegment:
    """Tokens in packed blocks, of which some have room for more tokens than they hold.

    Attributes:
        keys: packed keys.
        values: packed values.
        first: tokens at the beginning of the first block that are no longer part of the run.
        ends: for each block the tokens that it holds, counted from its beginning; `None` where all are full.
    """

    keys: "PackedSide"
    values: "PackedSide"
    first: int = 0
    ends: tuple[int, ...] | None = None
    for_kernels: dict[str, Any] = field(default_factory=dict, repr=False)
    """What a kernel has made of the run and may use again, by the kernel's name."""

    @property
    def blocks(self) -> int:
        """Blocks in the run."""
        return int(self.keys.codes.shape[2])

    @property
    def tokens(self) -> int:
        """Tokens in the run."""
        held = self.blocks * self.keys.block_tokens if self.ends is None else sum(self.ends)
        return held - self.first

    def side(self, side: Side) -> "PackedSide":
        """Keys or values."""
        return self.keys if side == "keys" else self.values

    def pieces(self, blocks: int) -> "Iterator[PackedSegment]":
        """The run in pieces of at most so many blocks."""
        for start in range(0, self.blocks, blocks):
            yield PackedSegment(
                _blocks_of(self.keys, start, blocks),
                _blocks_of(self.values, start, blocks),
                self.first if start == 0 else 0,
                None if self.ends is None else self.ends[start : start + blocks],
            )

    def dequantized(self, side: Side) -> Tensor:
        """States of one side, float32 `[batch, kv_heads, tokens, head_dim]`; still rotated, where they are."""
        packed = self.side(side)
        states = packed.dequantized()
        if self.ends is None:
            return states[:, :, self.first :]
        size = packed.block_tokens
        starts = (self.first, *([0] * (self.blocks - 1)))
        spans = zip(range(self.blocks), starts, self.ends, strict=True)
        return torch.cat([states[:, :, block * size + start : block * size + end] for block, start, end in spans], 2)


def _blocks_of(side: "PackedSide", start: int, blocks: int) -> "PackedSide":
    return replace(
        side, codes=side.codes[:, :, start : start + blocks], parameters=side.parameters[:, :, start : start + blocks]
    )


@dataclass(frozen=True, eq=False)
class KVSegments:
    """Runs of tokens in their order: dense ones, at most one packed run, dense ones again.

    Attributes:
        before: dense runs of the oldest tokens.
        packed: packed tokens, `None` where there are none.
        after: dense runs of the newest tokens.
    """

    before: tuple[DenseSegment, ...]
    packed: PackedSegment | None
    after: tuple[DenseSegment, ...]

    def of_sequence(self, index: int) -> "KVSegments":
        """That of one of the sequences, a batch of one."""
        one = slice(index, index + 1)

        def of_dense(runs: tuple[DenseSegment, ...]) -> tuple[DenseSegment, ...]:
            return tuple(DenseSegment(run.keys[one], run.values[one]) for run in runs)

        packed = self.packed
        if packed is not None:
            keys, values = (
                replace(side, codes=side.codes[one], parameters=side.parameters[one])
                for side in (packed.keys, packed.values)
            )
            packed = PackedSegment(keys, values, packed.first, packed.ends)
        return KVSegments(of_dense(self.before), packed, of_dense(self.after))

    def behind(self, run: DenseSegment) -> "KVSegments":
        """The same with other tokens in front."""
        return replace(self, before=(run, *self.before))

    @property
    def runs(self) -> tuple[DenseSegment | PackedSegment, ...]:
        """All runs in order."""
        return (*self.before, *(() if self.packed is None else (self.packed,)), *self.after)

    @property
    def tokens(self) -> int:
        """Tokens in all runs."""
        return sum(run.tokens for run in self.runs)

    @property
    def batch(self) -> int:
        """Sequences side by side."""
        return self._shape()[0]

    @property
    def kv_heads(self) -> int:
        """Heads that have keys and values."""
        return self._shape()[1]

    def _shape(self) -> torch.Size:
        return (*self.before, *self.after)[0].keys.shape if self.packed is None else self.packed.keys.codes.shape

    def dense_states(self) -> list[Tensor]:
        """All tensors in full precision."""
        return [states for run in (*self.before, *self.after) for states in (run.keys, run.values)]

    def dense(self, side: Side, dtype: torch.dtype) -> Tensor:
        """All states of one side in full precision, `[batch, kv_heads, tokens, head_dim]`."""
        parts = []
        for run in self.runs:
            if isinstance(run, DenseSegment):
                parts.append(run.side(side))
            else:
                states = run.dequantized(side)
                parts.append((rotate(states) if run.side(side).format.rotated else states).to(dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
