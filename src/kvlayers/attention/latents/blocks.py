"""Attention over packed latents: a few blocks at a time are brought to full precision, once for all heads."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvlayers.attention.pieces import StatePiece, state_pieces
from kvlayers.attention.segments import KVSegments, without_rows
from kvlayers.quantizers.hadamard import rotate


def attend(query: Tensor, rotated: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention to latents, with the scores of the rotated keys; the sums are in float32.

    Args:
        query: queries of the latents, `[batch, heads, queries, latent_dim]`.
        rotated: queries of the rotated keys, `[batch, heads, queries, rotated_channels]`.
        segments: the latents, as keys, and the rotated keys, as values, of one KV head, no segment gathered.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores.

    Returns:
        `[batch, heads, queries, latent_dim]` in the dtype of the query.
    """
    batch, heads, queries, latent_dim = query.shape
    rows = heads * queries
    # Products stay the same if both sides are rotated. A rotation by blocks of a Hadamard matrix is its own inverse.
    of_latents = _both(query.reshape(batch, 1, rows, latent_dim).float() * scale)
    of_rotated = _both(rotated.reshape(batch, 1, rows, -1).float() * scale)
    if mask is not None:
        mask = mask.expand(batch, heads, queries, segments.tokens)
    highest = of_latents[False].new_full((batch, 1, rows, 1), -torch.inf)
    total = torch.zeros_like(highest)
    sums = {False: torch.zeros_like(of_latents[False]), True: torch.zeros_like(of_latents[False])}
    for piece, latents, keys in _pieces(segments, rows):
        scores = of_latents[piece.keys_rotated] @ latents.transpose(2, 3)
        scores += of_rotated[piece.values_rotated] @ keys.transpose(2, 3)
        if mask is not None:
            part = mask.narrow(3, piece.position, scores.shape[3]).reshape(scores.shape)
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        raised = torch.maximum(highest, scores.amax(-1, keepdim=True))
        # A row that may attend to no token yet has -inf as its highest score, and -inf - -inf is not a number.
        weights = torch.exp(scores - raised.masked_fill(raised == -torch.inf, 0.0))
        shrink = torch.exp(highest - raised.masked_fill(raised == -torch.inf, 0.0))
        highest, total = raised, total * shrink + weights.sum(-1, keepdim=True)
        for part in sums.values():
            part *= shrink
        sums[piece.keys_rotated] += weights @ latents
    result = (sums[False] + rotate(sums[True])) / total
    # As in torch, a query that may attend to no token gets zeros.
    result = torch.where(total == 0, 0.0, result)
    return result.reshape(batch, heads, queries, latent_dim).to(query.dtype)


def _pieces(segments: KVSegments, rows: int) -> Iterator[tuple[StatePiece, Tensor, Tensor]]:
    """Segments in pieces, with their latents and their rotated keys. Each sequence of the batch has its own row."""
    position = 0
    for segment in segments.in_order:
        for piece in state_pieces(KVSegments((without_rows(segment),)), rows):
            latents, keys = piece.states("keys"), piece.states("values")
            if segment.rows is not None:
                index = segment.rows.on(latents.device)[0]
                latents, keys = latents.index_select(0, index), keys.index_select(0, index)
            if segments.smoothing is not None and piece.is_packed:
                # Latents are summed up as well, so the queries cannot make up for it.
                latents = segments.smoothing.restored(rotate(latents) if piece.keys_rotated else latents)
                piece = replace(piece, keys_rotated=False)
            yield replace(piece, position=position + piece.position), latents, keys
        position += segment.tokens


def _both(query: Tensor) -> dict[bool, Tensor]:
    """Queries as they are, and rotated."""
    return {False: query, True: rotate(query)}
