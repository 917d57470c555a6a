"""Attention on key-value segments in plain torch: a few pieces at a time, with an online softmax, in float32.

It serves a CPU in prefill, in dtypes without a kernel, and without a compiler; accelerators have `fused`. The two
products of eager attention, `scores` and `combine`, serve both.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kvlayers.kernels.attention import fused
from kvlayers.kernels.attention.pieces import CPU_SCORES_AT_ONCE, SegmentPiece, pieces_for, slabs
from kvlayers.kernels.attention.segments import KVSegments, smoothing_of
from kvlayers.kernels.codes.groups import rotate
from kvlayers.kernels.codes.smoothing import KeySmoothing


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
    softmax, scores_of = OnlineSoftmax(scaled), _KeyProducts(scaled)
    for some in _rounds(pieces_for(segments, rows), rows):
        found = [masked(scores_of(piece), piece, mask) for piece in some]
        weights = softmax.weights(found[0] if len(found) == 1 else torch.cat(found, -1))
        for piece, part in zip(some, torch.split(weights, [piece.tokens for piece in some], -1), strict=True):
            softmax.add(piece.combine(part), piece.values_rotated)
    out, logsumexp = softmax.result()
    return out.reshape(batch, heads, queries, out.shape[3]), logsumexp.reshape(batch, heads, queries)


class OnlineSoftmax:
    """Attention of rows to tokens that come a few at a time (Milakov and Gimelshein 2018, arXiv:1805.02867).

    Args:
        query: float32 `[batch, kv_heads, rows, any]`, for its shape and its device.
    """

    def __init__(self, query: Tensor) -> None:
        self._highest = query.new_full((*query.shape[:3], 1), -torch.inf)
        self._total = torch.zeros_like(self._highest)
        self._sums: dict[bool, Tensor] = {}

    def weights(self, scores: Tensor) -> Tensor:
        """Weights of tokens, from their scores `[batch, kv_heads, rows, tokens]`. What was added before shrinks."""
        raised = torch.maximum(self._highest, scores.amax(-1, keepdim=True))
        # A row that may attend to no token yet has -inf as its highest score, and -inf - -inf is not a number.
        reference = raised.masked_fill(raised == -torch.inf, 0.0)
        weights = torch.exp(scores - reference)
        shrink = torch.exp(self._highest - reference)
        self._highest, self._total = raised, self._total * shrink + weights.sum(-1, keepdim=True)
        self._sums = {rotated: part * shrink for rotated, part in self._sums.items()}
        return weights

    def add(self, part: Tensor, rotated: bool) -> None:
        """Add weighted values `[batch, kv_heads, rows, value_head_dim]`, rotated ones apart from the others."""
        self._sums[rotated] = self._sums[rotated] + part if rotated in self._sums else part

    def result(self) -> tuple[Tensor, Tensor]:
        """The attended values, and the log-sum-exp of the scores, `[batch, kv_heads, rows, 1]`."""
        out = _rotated_back(self._sums) / self._total
        # As in torch, a query that may attend to no token gets zeros.
        return torch.where(self._total == 0, 0.0, out), self._highest + self._total.log()


def _rotated_back(sums: dict[bool, Tensor]) -> Tensor:
    """The sum of both, of which the one under `True` is rotated."""
    parts = [rotate(part) if rotated else part for rotated, part in sums.items()]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


class _KeyProducts:
    """Products of queries `[batch, kv_heads, rows, head_dim]` and the keys of pieces, however these are packed."""

    def __init__(self, query: Tensor) -> None:
        self._plain = query
        self._smoothed: dict[tuple[KeySmoothing | None, bool], tuple[Tensor, Tensor | None]] = {}

    def __call__(self, piece: SegmentPiece) -> Tensor:
        kind = smoothing_of(piece.segment), piece.keys_rotated
        if kind not in self._smoothed:
            self._smoothed[kind] = self._query_for(*kind)
        query, offsets = self._smoothed[kind]
        products = piece.scores(query)
        return products if offsets is None else (products + offsets).to(products.dtype)

    def _query_for(self, smoothing: KeySmoothing | None, rotated: bool) -> tuple[Tensor, Tensor | None]:
        """The queries for keys that were smoothed, and perhaps rotated, and what is added to the products."""
        query = self._plain if smoothing is None else smoothing.queries(self._plain)
        # Products stay the same if both sides are rotated, so keys need not be rotated back.
        return rotate(query) if rotated else query, None if smoothing is None else smoothing.offsets(self._plain)


def _rounds(pieces: Iterable[SegmentPiece], rows: int) -> Iterator[list[SegmentPiece]]:
    """Pieces in rounds of so many scores that the fixed cost of a softmax does not dominate."""
    some: list[SegmentPiece] = []
    for piece in pieces:
        if some and rows * sum(other.tokens for other in (*some, piece)) > CPU_SCORES_AT_ONCE:
            yield some
            some = []
        some.append(piece)
    if some:
        yield some


def masked(scores: Tensor, piece: SegmentPiece, mask: Tensor | None) -> Tensor:
    """Scores of a piece, with what its mask says of its tokens."""
    if mask is not None:
        part = piece.columns_of(mask).reshape(scores.shape)
        scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part.to(scores.dtype)
    return scores if piece.gathered is None else scores.masked_fill(piece.gathered.is_padding, -torch.inf)


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
    rows = heads // segments.kv_heads * queries
    by_kv_head = query.reshape(batch, segments.kv_heads, rows, head_dim)
    by_kv_head = by_kv_head if fused.serves(query) else by_kv_head.float()
    # Padding is written as -inf, to the column behind its segment: that of a later piece, or the last one.
    products = by_kv_head.new_full((*by_kv_head.shape[:3], segments.tokens + 1), -torch.inf)
    scores_of = _KeyProducts(by_kv_head)
    for piece in _pieces(query, segments, rows):
        found = masked(scores_of(piece), piece, None)
        if piece.gathered is None:
            products[..., piece.position : piece.position + piece.tokens] = found
        else:
            piece.gathered.write(found, products.narrow(3, piece.position, piece.gathered.width + 1))
    return products[..., :-1].to(query.dtype).reshape(batch, heads, queries, segments.tokens)


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`.

    Weights of columns that stand for no token do not count.
    """
    batch, heads, queries, tokens = weights.shape
    rows = heads // segments.kv_heads * queries
    by_kv_head = weights.reshape(batch, segments.kv_heads, rows, tokens)
    on_accelerator = fused.serves(weights)
    sums: dict[bool, Tensor] = {}
    for piece in _pieces(weights, segments, rows):
        part = piece.columns_of(by_kv_head)
        if piece.gathered is not None:
            part = part.masked_fill(piece.gathered.is_padding, 0.0)
        found = piece.combine(part if on_accelerator else part.float())
        rotated = piece.values_rotated
        sums[rotated] = sums[rotated].float() + found if rotated in sums else found
    result = _rotated_back(sums)
    return result.reshape(batch, heads, queries, result.shape[3]).to(weights.dtype)


def _pieces(rows: Tensor, segments: KVSegments, count: int) -> Iterator[SegmentPiece]:
    """The pieces that `count` queries, or weights, for each KV head are multiplied with."""
    return slabs(segments, rows.dtype) if fused.serves(rows) else pieces_for(segments, count)
