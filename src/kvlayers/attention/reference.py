"""Attention over a history in plain torch: a few blocks at a time, with an online softmax.

For prefill, for devices and dtypes that no kernel is for, and where there is no compiler. No more than a few packed
blocks are in full precision at once, and the more queries there are, the fewer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.attention.segments import DenseSegment, KVSegments
from kvlayers.quantizers.hadamard import rotate

SCORES_AT_ONCE = 1 << 15
"""Scores of one head that are worth a round of torch calls: with fewer, their fixed cost is most of the time."""

MINIMUM_BLOCK_TOKENS = 64
"""Tokens at once at least, however many the queries."""

MOST_TOKENS_AT_ONCE = 512
"""Tokens that are brought to full precision at once, however few the queries."""


def attend(query: Tensor, history: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of some queries over a history.

    Args:
        query: `[batch, heads, queries, key_head_dim]`, heads a multiple of the history's kv_heads.
        history: what they attend to.
        mask: bool or additive, `[batch, heads, queries, tokens]` (expanded), or `None`.
        scale: factor of the scores.

    Returns:
        `[batch, heads, queries, value_head_dim]` in the dtype of the query; the sums are in float32.
    """
    return attend_partly(query, history, mask, scale)[0].to(query.dtype)


def attend_partly(query: Tensor, history: KVSegments, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """As `attend`, for a history that is not all that the queries attend to: see `merging.merge`.

    Returns:
        Attended values float32 `[batch, heads, queries, value_head_dim]`, and the log-sum-exp of the scores, float32
        `[batch, heads, queries]`.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads = history.kv_heads
    rows = heads // kv_heads * queries
    scaled = query.reshape(batch, kv_heads, rows, head_dim).float() * scale
    highest = scaled.new_full((batch, kv_heads, rows, 1), -torch.inf)
    total = torch.zeros_like(highest)
    sums: dict[bool, Tensor] = {}
    position = 0
    # Products stay what they are where both sides are rotated, so that keys need not be rotated back.
    queries_of = {False: scaled, True: rotate(scaled)}
    for piece in _pieces(history, rows):
        tokens = piece.keys.shape[2]
        scores = queries_of[piece.keys_rotated] @ piece.keys.transpose(2, 3)
        if mask is not None:
            part = mask[..., position : position + tokens].reshape(batch, kv_heads, rows, tokens)
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        position += tokens
        raised = torch.maximum(highest, scores.amax(-1, keepdim=True))
        # A row that may attend to nothing yet has -inf for its highest score, and -inf - -inf is not a number.
        reference = raised.masked_fill(raised == -torch.inf, 0.0)
        weights = torch.exp(scores - reference)
        shrink = torch.exp(highest - reference)
        highest = raised
        total = total * shrink + weights.sum(-1, keepdim=True)
        for held in sums:
            sums[held] = sums[held] * shrink
        attended = weights @ piece.values
        rotated = piece.values_rotated
        sums[rotated] = sums[rotated] + attended if rotated in sums else attended
    result = sum(rotate(part) if rotated else part for rotated, part in sums.items()) / total
    # As torch does: a query that may attend to nothing gets zeros.
    result = torch.where(total == 0, 0.0, result)
    logsumexp = highest.reshape(batch, heads, queries) + total.reshape(batch, heads, queries).log()
    return result.reshape(batch, heads, queries, result.shape[3]), logsumexp


def scores(query: Tensor, history: KVSegments) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`."""
    batch, heads, queries, head_dim = query.shape
    rows = heads // history.kv_heads * queries
    plain = query.reshape(batch, history.kv_heads, rows, head_dim).float()
    queries_of = {False: plain, True: rotate(plain)}
    products = [queries_of[piece.keys_rotated] @ piece.keys.transpose(2, 3) for piece in _pieces(history, rows)]
    return torch.cat(products, dim=3).reshape(batch, heads, queries, history.tokens).to(query.dtype)


def combine(weights: Tensor, history: KVSegments) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`."""
    batch, heads, queries, tokens = weights.shape
    rows = heads // history.kv_heads * queries
    by_kv_head = weights.reshape(batch, history.kv_heads, rows, tokens)
    sums: dict[bool, Tensor] = {}
    position = 0
    for piece in _pieces(history, rows):
        some = by_kv_head.narrow(3, position, piece.values.shape[2]).float() @ piece.values
        position += piece.values.shape[2]
        rotated = piece.values_rotated
        sums[rotated] = sums[rotated] + some if rotated in sums else some
    result = torch.stack([rotate(part) if rotated else part for rotated, part in sums.items()]).sum(0)
    return result.reshape(batch, heads, queries, result.shape[3]).to(weights.dtype)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Keys and values of a few tokens, float32."""

    keys: Tensor
    values: Tensor
    keys_rotated: bool = False
    values_rotated: bool = False


def _pieces(history: KVSegments, rows: int) -> Iterator[_Piece]:
    for run in history.runs:
        if not run.tokens:
            continue
        block_tokens = MINIMUM_BLOCK_TOKENS if isinstance(run, DenseSegment) else run.keys.block_tokens
        tokens = min(max(SCORES_AT_ONCE // max(rows, 1), block_tokens), MOST_TOKENS_AT_ONCE)
        if isinstance(run, DenseSegment):
            for keys, values in zip(torch.split(run.keys, tokens, 2), torch.split(run.values, tokens, 2), strict=True):
                yield _Piece(keys.float(), values.float())
            continue
        for piece in run.pieces(max(tokens // block_tokens, 1)):
            keys, values = piece.dequantized("keys"), piece.dequantized("values")
            yield _Piece(keys, values, run.keys.format.rotated, run.values.format.rotated)
