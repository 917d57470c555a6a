"""The tokens of segments in pieces, which attention in plain torch multiplies one after the other.

With many queries, a few packed blocks are brought to full precision at once. With few, as in a decode step, the codes
of many blocks are multiplied as they are, and their scales are folded into the other factor.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.attention.dense_segment import DenseSegment
from kvlayers.attention.gathered_segment import GatheredSegment
from kvlayers.attention.packed_segment import PackedSegment
from kvlayers.attention.piece_columns import PieceColumns
from kvlayers.attention.segments import KVSegments
from kvlayers.quantizers.contract import Side

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


@dataclass(frozen=True, eq=False)
class SegmentPiece(ABC):
    """A few tokens of a segment.

    Attributes:
        position: column of the first token, or that of the gathered segment.
        keys_rotated: whether the keys are still rotated.
        values_rotated: whether the values are.
        gathered: where the tokens stand in a gathered segment.
    """

    position: int
    keys_rotated: bool = False
    values_rotated: bool = False
    gathered: PieceColumns | None = None

    @property
    @abstractmethod
    def is_packed(self) -> bool:
        """Whether the tokens are packed."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens of the piece."""

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

    def write(self, products: Tensor, rows: Tensor) -> None:
        """Write products of the tokens to `[batch, kv_heads, rows, all tokens and one more]`."""
        if self.gathered is None:
            rows.narrow(3, self.position, self.tokens).copy_(products)
        else:
            self.gathered.write(products, rows, self.position)


@dataclass(frozen=True, eq=False, kw_only=True)
class StatePiece(SegmentPiece):
    """Tokens whose states are brought to float32, one side after the other: `[batch, kv_heads, tokens, head_dim]`."""

    segment: DenseSegment | PackedSegment

    @property
    @override
    def is_packed(self) -> bool:
        return isinstance(self.segment, PackedSegment)

    @property
    @override
    def tokens(self) -> int:
        return self.segment.tokens

    def states(self, side: Side) -> Tensor:
        """The keys, or the values, still rotated if they were packed so. They are computed anew each time."""
        segment = self.segment
        states = segment.side(side).float() if isinstance(segment, DenseSegment) else segment.dequantized(side)
        return states if self.gathered is None or side == "keys" else self.gathered.cleared(states)

    @override
    def scores(self, query: Tensor) -> Tensor:
        return query @ self.states("keys").transpose(2, 3)

    @override
    def combine(self, weights: Tensor) -> Tensor:
        return weights @ self.states("values")


@dataclass(frozen=True, eq=False, kw_only=True)
class CodePiece(SegmentPiece):
    """Whole blocks, whose scales are folded into the few rows that are multiplied with them: no state is computed."""

    segment: PackedSegment

    @property
    @override
    def is_packed(self) -> bool:
        return True

    @property
    @override
    def tokens(self) -> int:
        return self.segment.tokens

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
    """All segments in pieces, of codes where few rows are multiplied with them."""
    position = 0
    for segment in segments.in_order:
        if isinstance(segment, PackedSegment) and rows <= CPU_MAXIMUM_ROWS_OF_CODES and _folds_scales(segment):
            rotated = segment.keys.format.rotated, segment.values.format.rotated
            of_block = segment.batch * segment.kv_heads * segment.keys.block_tokens * max(segment.head_dims)
            for some in segment.pieces(max(CPU_CODES_AT_ONCE // of_block, 1)):
                yield CodePiece(position, *rotated, segment=some)
                position += some.tokens
        else:
            for piece in state_pieces(KVSegments((segment,)), rows):
                yield replace(piece, position=position + piece.position)
            position += segment.tokens


def _folds_scales(segment: PackedSegment) -> bool:
    return segment.ends is None and segment.keys.row_group == segment.values.row_group == 1


def state_pieces(segments: KVSegments, rows: int) -> Iterator[StatePiece]:
    """All segments in pieces of states, small enough for so many queries."""
    position = 0
    for segment in segments.in_order:
        if not segment.tokens:
            continue
        source = segment.source if isinstance(segment, GatheredSegment) else segment
        block_tokens = CPU_MINIMUM_BLOCK_TOKENS if isinstance(source, DenseSegment) else source.keys.block_tokens
        tokens = min(max(CPU_SCORES_AT_ONCE // max(rows, 1), block_tokens), CPU_MAXIMUM_TOKENS_AT_ONCE)
        if isinstance(segment, GatheredSegment):
            for padded, columns in segment.padded_pieces(tokens):
                for piece in _state_pieces(padded, tokens):
                    yield replace(piece, position=position, gathered=columns)
        else:
            for piece in _state_pieces(segment, tokens):
                yield replace(piece, position=position + piece.position)
        position += segment.tokens


def _state_pieces(segment: DenseSegment | PackedSegment, tokens: int) -> Iterator[StatePiece]:
    """A segment in pieces of at most so many tokens, or one block. Padded pieces are one."""
    position = 0
    if isinstance(segment, DenseSegment):
        rotated = False, False
        sides = torch.split(segment.keys, tokens, 2), torch.split(segment.values, tokens, 2)
        some: Iterator[DenseSegment | PackedSegment] = map(DenseSegment, *sides)
    else:
        rotated = segment.keys.format.rotated, segment.values.format.rotated
        some = segment.pieces(max(tokens // segment.keys.block_tokens, 1))
    for piece in some:
        yield StatePiece(position, *rotated, segment=piece)
        position += piece.tokens
