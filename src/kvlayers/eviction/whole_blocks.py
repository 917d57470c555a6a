"""Selections that keep or evict packed blocks as a whole."""

import torch
from torch import Tensor

from kvlayers.eviction.kept import KeptTokens
from kvlayers.eviction.selection import kept_tokens


def block_scores(scores: Tensor, blocks: Tensor, sinks: int, recent: int, front: Tensor) -> Tensor:
    """Scores with which the tokens of a block are chosen together: the mean of the scores of each block.

    A block that has a token which is always kept has the highest score.

    Args:
        scores: `[batch, kv_heads, tokens]`.
        blocks: number of the block of each token, int64 `[batch, kv_heads, tokens]`; -1 for tokens in no block.
        sinks: first tokens that are always kept.
        recent: newest tokens that are always kept.
        front: places in front that have no token, int64 `[batch, kv_heads]` on the host.
    """
    scores = scores.float().nan_to_num(nan=torch.finfo(torch.float32).min)
    positions = torch.arange(scores.shape[2], device=scores.device)
    first = front.to(scores.device)[..., None]
    always = (positions >= scores.shape[2] - recent) | ((positions < first + sinks) & (positions >= first))
    scores = scores.masked_fill(always, torch.inf)
    count = int(blocks.max()) + 1
    if not count:
        return scores
    places = blocks.clamp(min=0)
    inside = (blocks >= 0).to(scores.dtype)
    sums = scores.new_zeros(*scores.shape[:2], count).scatter_add_(2, places, scores.masked_fill(blocks < 0, 0.0))
    sizes = torch.zeros_like(sums).scatter_add_(2, places, inside)
    means = (sums / sizes.clamp(min=1)).gather(2, places)
    return torch.where(blocks >= 0, means, scores)


def without_parts(kept: KeptTokens, blocks: Tensor, scores: Tensor) -> KeptTokens:
    """The same selection, with each block that it keeps in part kept if it must be, and evicted otherwise.

    Args:
        kept: a selection by the scores of `block_scores`.
        blocks: as for `block_scores`.
        scores: the result of `block_scores`.
    """
    tokens = blocks.shape[2]
    places = torch.arange(kept.indices.shape[2], device=blocks.device)
    is_kept = places >= kept.indices.shape[2] - kept.counts.to(blocks.device)[..., None]
    mask = torch.zeros(*blocks.shape[:2], tokens + 1, dtype=torch.bool, device=blocks.device)
    mask.scatter_(2, torch.where(is_kept, kept.indices, tokens), torch.ones_like(is_kept))
    mask = mask[..., :tokens]
    count = int(blocks.max()) + 1
    if count:
        numbers = blocks.clamp(min=0)
        outside = (~mask & (blocks >= 0)).long()
        missing = torch.zeros(*blocks.shape[:2], count, dtype=torch.int64, device=blocks.device)
        missing = missing.scatter_add_(2, numbers, outside).gather(2, numbers)
        mask = torch.where(blocks >= 0, (missing == 0) | (scores == torch.inf), mask)
    return kept_tokens(mask, mask.sum(2).cpu())
