"""Attention on key-value segments in plain torch: a few blocks at a time, with an online softmax, in float32.

It serves a CPU in prefill, in dtypes without a kernel, and without a compiler; accelerators have `fused`. With many
queries, a few packed blocks are brought to full precision at once. With few, as in a decode step, the codes of many
blocks are multiplied as they are, and their scales are folded into the other factor.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from kvlayers.attention.dense_segment import DenseSegment
from kvlayers.attention.gathered_segment import GatheredSegment
from kvlayers.attention.packed_segment import PackedSegment
from kvlayers.attention.piece_columns import PieceColumns
from kvlayers.attention.segments import KVSegments
from kvlayers.quantizers.hadamard import rotate

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


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of queries to the tokens of segments.

    Args:
        query: `[batch, heads, queries, key_head_dim]`, heads a multiple of the segments' kv_heads.
        segments: the keys and values.
        mask: bool or additive, `[batch, heads, queries, tokens]` (expanded), or `None`.
        scale: factor of the scores.

    Returns:
        `[batch, heads, queries, value_head_dim]` in the dtype of the query; the sums are in float32.
    """
    return attend_partly(query, segments, mask, scale)[0].to(query.dtype)


def copying_pays(query: Tensor, segments: KVSegments) -> bool:
    """Whether `attend_to_copy` takes less time than `attend`, as measured on a CPU.

    Torch's attention is slow for a single query of bfloat16, and for any number of queries of float16.
    """
    return query.shape[2] > 1 and query.dtype != torch.float16 and segments.are_dense and not segments.shares_rows


def attend_to_copy(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """As `attend`, by torch's own attention on a copy of the states, for many queries.

    The copy costs about as much as one query, and lives as long as the call.
    """
    keys, values = segments.dense("keys", query.dtype), segments.dense("values", query.dtype)
    return scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True)


def attend_partly(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """As `attend`, for segments that are only a part of the tokens that the queries attend to; see `merge`.

    Returns:
        Attended values float32 `[batch, heads, queries, value_head_dim]`, and the log-sum-exp of the scores, float32
        `[batch, heads, queries]`.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads = segments.kv_heads
    rows = heads // kv_heads * queries
    scaled = query.reshape(batch, kv_heads, rows, head_dim).float() * scale
    highest = scaled.new_full((batch, kv_heads, rows, 1), -torch.inf)
    total = torch.zeros_like(highest)
    sums: dict[bool, Tensor] = {}
    # Products stay the same if both sides are rotated, so keys need not be rotated back.
    queries_for = {False: scaled, True: rotate(scaled)}
    for piece in _pieces(segments, rows):
        scores = piece.scores(queries_for[piece.keys_rotated])
        if mask is not None:
            part = piece.columns_of(mask).reshape(scores.shape)
            scores = (
                scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part.to(scores.dtype)
            )
        if piece.gathered is not None:
            scores = scores.masked_fill(piece.gathered.is_padding, -torch.inf)
        raised = torch.maximum(highest, scores.amax(-1, keepdim=True))
        # A row that may attend to no token yet has -inf as its highest score, and -inf - -inf is not a number.
        reference = raised.masked_fill(raised == -torch.inf, 0.0)
        weights = torch.exp(scores - reference)
        shrink = torch.exp(highest - reference)
        highest = raised
        total = total * shrink + weights.sum(-1, keepdim=True)
        for rotated in sums:
            sums[rotated] = sums[rotated] * shrink
        _add(sums, piece.combine(weights), piece.values_rotated)
    result = sum(rotate(part) if rotated else part for rotated, part in sums.items()) / total
    # As in torch, a query that may attend to no token gets zeros.
    result = torch.where(total == 0, 0.0, result)
    logsumexp = highest.reshape(batch, heads, queries) + total.reshape(batch, heads, queries).log()
    return result.reshape(batch, heads, queries, result.shape[3]), logsumexp


def merge(outs: Sequence[Tensor], logsumexps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries to several sets of tokens, by the log-sum-exp of their scores.

    Args:
        outs: for each set of tokens, the attended values float32 `[batch, heads, q_tokens, head_dim]`, normalised
            within the set.
        logsumexps: for each set, float32 `[batch, heads, q_tokens]`; `-inf` if a query sees no token of the set.

    Returns:
        The attended values of all sets, zeros if a query sees no token at all, and their log-sum-exp.
    """
    stacked = torch.stack(tuple(logsumexps))
    largest = stacked.amax(0)
    # If every set is -inf, -inf - -inf would be nan.
    weights = torch.exp(stacked - largest.masked_fill(largest == -torch.inf, 0))
    total = weights.sum(0)
    shares = weights / total.masked_fill(total == 0, 1)
    # A set of which a query sees no token may hold anything there, even nan, which a weight of zero would not remove.
    parts = (torch.stack(tuple(outs)) * shares[..., None]).masked_fill(shares[..., None] == 0, 0)
    return parts.sum(0), largest + torch.log(total)


def scores(query: Tensor, segments: KVSegments) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`.

    They are `-inf` where a column of a gathered segment stands for no token.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, tokens = segments.kv_heads, segments.tokens
    rows = heads // kv_heads * queries
    plain = query.reshape(batch, kv_heads, rows, head_dim).float()
    queries_for = {False: plain, True: rotate(plain)}
    # Padding is written behind the last token.
    products = plain.new_full((batch, kv_heads, rows, tokens + 1), -torch.inf)
    for piece in _pieces(segments, rows):
        piece.write(piece.scores(queries_for[piece.keys_rotated]), products)
    return products[..., :tokens].reshape(batch, heads, queries, tokens).to(query.dtype)


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`.

    Weights of columns that stand for no token do not count.
    """
    batch, heads, queries, tokens = weights.shape
    rows = heads // segments.kv_heads * queries
    by_kv_head = weights.reshape(batch, segments.kv_heads, rows, tokens)
    sums: dict[bool, Tensor] = {}
    for piece in _pieces(segments, rows):
        part = piece.columns_of(by_kv_head).float()
        if piece.gathered is not None:
            part = part.masked_fill(piece.gathered.is_padding, 0.0)
        _add(sums, piece.combine(part), piece.values_rotated)
    result = torch.stack([rotate(part) if rotated else part for rotated, part in sums.items()]).sum(0)
    return result.reshape(batch, heads, queries, result.shape[3]).to(weights.dtype)


def _add(sums: dict[bool, Tensor], part: Tensor, rotated: bool) -> None:
    """Add weighted values to the sum of the rotated values, or to that of the others."""
    sums[rotated] = sums[rotated] + part if rotated in sums else part


@dataclass(frozen=True, eq=False)
class _Piece(ABC):
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
class FloatPiece(_Piece):
    """Keys and values in float32, `[batch, kv_heads, tokens, head_dim]`."""

    keys: Tensor
    values: Tensor

    @property
    @override
    def tokens(self) -> int:
        return self.keys.shape[2]

    @override
    def scores(self, query: Tensor) -> Tensor:
        return query @ self.keys.transpose(2, 3)

    @override
    def combine(self, weights: Tensor) -> Tensor:
        return weights @ self.values


@dataclass(frozen=True, eq=False, kw_only=True)
class CodePiece(_Piece):
    """Whole blocks, whose scales are folded into the few rows that are multiplied with them: no state is computed."""

    segment: PackedSegment

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


def _pieces(segments: KVSegments, rows: int) -> Iterator[_Piece]:
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
            for piece in pieces(KVSegments((segment,)), rows):
                yield replace(piece, position=position + piece.position)
            position += segment.tokens


def _folds_scales(segment: PackedSegment) -> bool:
    return segment.ends is None and segment.keys.row_group == segment.values.row_group == 1


def pieces(segments: KVSegments, rows: int) -> Iterator[FloatPiece]:
    """All segments in float32, in pieces small enough for so many queries."""
    position = 0
    for segment in segments.in_order:
        if not segment.tokens:
            continue
        source = segment.source if isinstance(segment, GatheredSegment) else segment
        block_tokens = CPU_MINIMUM_BLOCK_TOKENS if isinstance(source, DenseSegment) else source.keys.block_tokens
        tokens = min(max(CPU_SCORES_AT_ONCE // max(rows, 1), block_tokens), CPU_MAXIMUM_TOKENS_AT_ONCE)
        if isinstance(segment, GatheredSegment):
            for padded, columns in segment.padded_pieces(tokens):
                yield from _in_float32(padded, tokens, position, columns)
        else:
            yield from _in_float32(segment, tokens, position)
        position += segment.tokens


def _in_float32(
    segment: DenseSegment | PackedSegment, tokens: int, position: int, gathered: PieceColumns | None = None
) -> Iterator[FloatPiece]:
    """A segment in pieces of at most so many tokens, or one block. Padded pieces are one."""
    if isinstance(segment, DenseSegment):
        sides = torch.split(segment.keys, tokens, 2), torch.split(segment.values, tokens, 2)
        for keys, values in zip(*sides, strict=True):
            cleared = values.float() if gathered is None else gathered.cleared(values.float())
            yield FloatPiece(position, gathered=gathered, keys=keys.float(), values=cleared)
            position += keys.shape[2]
        return
    rotated = segment.keys.format.rotated, segment.values.format.rotated
    for piece in segment.pieces(max(tokens // segment.keys.block_tokens, 1)):
        keys, values = piece.dequantized("keys"), piece.dequantized("values")
        cleared = values if gathered is None else gathered.cleared(values)
        yield FloatPiece(position, *rotated, gathered, keys=keys, values=cleared)
        position += piece.tokens
