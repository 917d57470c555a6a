"""The tokens of segments in pieces, which attention in plain torch multiplies one after the other.

On a CPU, many queries take a few packed blocks in float32 at once. With few, as in a decode step, the codes of many
blocks are multiplied as they are, and their scales are folded into the other factor. On an accelerator a piece is as
many packed tokens as may be in full precision at once, in the dtype of the queries.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, PieceColumns, Segment
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.utils.triton_support import runs_triton

CPU_SCORES_AT_ONCE = 1 << 15
"""Scores of one head that are worth a round of torch calls on a CPU: with fewer, their fixed cost dominates."""

CPU_MINIMUM_BLOCK_TOKENS = 64
"""Fewest tokens at once, however many queries there are."""

CPU_MAXIMUM_TOKENS_AT_ONCE = 512
"""Most tokens that are brought to full precision at once, however few queries there are."""

CPU_MAXIMUM_ROWS_OF_CODES = 32
"""Rows of a KV head, its query heads times their queries, up to which codes are multiplied before they are scaled."""

CPU_CODES_AT_ONCE = 1 << 21
"""Codes of keys, or of values, that are numbers in float32 at once: with fewer, the fixed cost of calls dominates."""

SLAB_BYTES = 1 << 28
"""Bytes of keys, values and mask that are in full precision at once on an accelerator."""

MINIMUM_SLAB_TOKENS = 8192
"""Fewest tokens of a piece there, whatever the batch: with fewer, launches and merging cost more than attention."""

UNPACKING_BYTES = 16
"""Bytes that each state takes while plain torch unpacks it: in float32, at several stages at once."""


@dataclass(frozen=True, eq=False)
class SegmentPiece(ABC):
    """A few tokens of a segment.

    Attributes:
        position: column of the first token, or that of the gathered segment.
        segment: the tokens.
        keys_rotated: whether the keys are still rotated.
        values_rotated: whether the values are.
        gathered: where the tokens stand in a gathered segment.
    """

    position: int
    segment: DenseSegment | PackedSegment
    keys_rotated: bool = False
    values_rotated: bool = False
    gathered: PieceColumns | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the piece."""
        return self.segment.tokens

    @abstractmethod
    def scores(self, query: Tensor) -> Tensor:
        """Products of queries `[batch, kv_heads, rows, head_dim]` and the keys, `[batch, kv_heads, rows, tokens]`."""

    @abstractmethod
    def combine(self, weights: Tensor) -> Tensor:
        """Sums of the values, weighted by `[batch, kv_heads, rows, tokens]`: `[batch, kv_heads, rows, head_dim]`."""

    def columns_of(self, rows: Tensor) -> Tensor:
        """Entries of `[batch, heads, rows, all tokens]` for the tokens of the piece."""
        if self.gathered is None:
            return rows.narrow(3, self.position, self.tokens)
        return self.gathered.read(rows.narrow(3, self.position, self.gathered.width))


@dataclass(frozen=True, eq=False, kw_only=True)
class StatePiece(SegmentPiece):
    """Tokens whose states are brought to a dtype, one side after the other: `[batch, kv_heads, tokens, head_dim]`.

    Attributes:
        dtype: the dtype. Packed states are rotated back, unless they are float32 and `keys_rotated` or `values_rotated`
            say otherwise.
    """

    dtype: torch.dtype = torch.float32

    def states(self, side: Side) -> Tensor:
        """The keys, or the values. They are computed anew each time."""
        segment = self.segment
        stays_rotated = self.keys_rotated if side == "keys" else self.values_rotated
        if stays_rotated and isinstance(segment, PackedSegment):
            states = segment.dequantized(side)
        else:
            states = segment.states(side, self.dtype)
        return states if self.gathered is None or side == "keys" else self.gathered.cleared(states)

    @override
    def scores(self, query: Tensor) -> Tensor:
        return query @ self.states("keys").transpose(2, 3)

    @override
    def combine(self, weights: Tensor) -> Tensor:
        return weights @ self.states("values")


@dataclass(frozen=True, eq=False)
class CodePiece(SegmentPiece):
    """Whole blocks, whose scales are folded into the few rows that are multiplied with them: no state is computed."""

    segment: PackedSegment

    @override
    def scores(self, query: Tensor) -> Tensor:
        keys = self.segment.keys
        by_block = query.unsqueeze(2).expand(-1, -1, keys.blocks, -1, -1)
        return keys.products(by_block).transpose(2, 3).flatten(3)[..., self.segment.first :]

    @override
    def combine(self, weights: Tensor) -> Tensor:
        values = self.segment.values
        if self.segment.first:
            weights = torch.nn.functional.pad(weights, (self.segment.first, 0))
        by_block = torch.unflatten(weights, 3, (-1, values.block_tokens)).transpose(2, 3)
        return values.products(by_block).sum(2)


def pieces_for(segments: KVSegments, rows: int) -> Iterator[SegmentPiece]:
    """All segments in pieces for a CPU, of codes where few rows are multiplied with them."""
    for position, segment in segments.with_columns:
        if not isinstance(segment, PackedSegment) or rows > CPU_MAXIMUM_ROWS_OF_CODES or not _folds_scales(segment):
            yield from state_pieces(position, segment, rows)
            continue
        rotated = segment.keys.format.rotated, segment.values.format.rotated
        of_token = segments.batch * segment.kv_heads * max(segment.head_dims)
        for some in segment.pieces(CPU_CODES_AT_ONCE // of_token):
            yield CodePiece(position, some, *rotated)
            position += some.tokens


def _folds_scales(segment: PackedSegment) -> bool:
    return segment.ends is None and segment.keys.layout.row_group == segment.values.layout.row_group == 1


def state_pieces(position: int, segment: Segment, rows: int) -> Iterator[StatePiece]:
    """A segment, whose first column is `position`, in float32 pieces that are small enough for so many queries."""
    source = segment.source if isinstance(segment, GatheredSegment) else segment
    least = CPU_MINIMUM_BLOCK_TOKENS if isinstance(source, DenseSegment) else source.keys.block_tokens
    tokens = min(max(CPU_SCORES_AT_ONCE // max(rows, 1), least), CPU_MAXIMUM_TOKENS_AT_ONCE)
    rotated = False, False
    if isinstance(source, PackedSegment):
        rotated = source.keys.format.rotated, source.values.format.rotated
    return _divided(position, segment, tokens, torch.float32, rotated)


def slabs(segments: KVSegments, dtype: torch.dtype, mask_rows: int = 0) -> Iterator[StatePiece]:
    """All segments in pieces for an accelerator. Dense states are divided only if a mask as long must be converted.

    Args:
        segments: the segments.
        dtype: dtype of the pieces.
        mask_rows: rows of the mask that is read beside them.
    """
    itemsize = dtype.itemsize if runs_triton(segments.device) else UNPACKING_BYTES
    numbers = segments.batch * segments.kv_heads * sum(segments.head_dims)
    tokens = max(SLAB_BYTES // (numbers * itemsize + mask_rows * dtype.itemsize), MINIMUM_SLAB_TOKENS)
    for position, segment in segments.with_columns:
        at_once = max(segment.tokens, 1) if isinstance(segment, DenseSegment) and not mask_rows else tokens
        yield from _divided(position, segment, at_once, dtype, (False, False))


def _divided(
    position: int, segment: Segment, tokens: int, dtype: torch.dtype, rotated: tuple[bool, bool]
) -> Iterator[StatePiece]:
    """A segment, whose first column is `position`, in pieces of about so many tokens."""
    if isinstance(segment, GatheredSegment):
        for padded, columns in segment.padded_pieces(tokens):
            yield StatePiece(position, padded, *rotated, gathered=columns, dtype=dtype)
        return
    for piece in segment.pieces(tokens) if segment.tokens else ():
        yield StatePiece(position, piece, *rotated, dtype=dtype)
        position += piece.tokens
