"""Which tokens an eviction keeps, given their scores: of each head, and of packed blocks as a whole."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

HEAD_FLOOR = 0.2
"""The part of an average head's tokens that every head keeps, if heads keep different numbers."""


class KeptTokens(NamedTuple):
    """The tokens to keep of each sequence and KV head. Heads may keep different numbers of them.

    Attributes:
        mask: which of the tokens that the layer held are kept, bool `[batch, kv_heads, tokens]`.
        counts: how many these are, int64 `[batch, kv_heads]` on the host.
    """

    mask: Tensor
    counts: Tensor


def places_of(mask: Tensor, most: int) -> Tensor:
    """Where a mask `[batch, kv_heads, places]` is true, ascending, int64 `[batch, kv_heads, most]`.

    A row with fewer such places has zeros behind them.
    """
    # Every such place goes to its own, and all others to one more, which is cut off. A sort would take twice the time.
    ranks = torch.where(mask, mask.cumsum(2) - 1, most)
    places = torch.arange(mask.shape[2], device=mask.device).expand_as(ranks)
    return ranks.new_zeros(*mask.shape[:2], most + 1).scatter_(2, ranks, places)[..., :most]


def select(
    scores: Tensor,
    keep: int | Sequence[int],
    *,
    sinks: int = 0,
    recent: int = 0,
    padding: Tensor | None = None,
    floor: float = 1.0,
    blocks: Tensor | None = None,
) -> KeptTokens:
    """The tokens with the highest scores, with the sinks and the newest tokens.

    A sequence that has fewer tokens than it may keep keeps all of them. Of tokens with equal scores, the first are
    kept. A score that is NaN counts as the lowest.

    With a `floor` below 1, heads keep the tokens with the highest scores of all heads together: Feng et al. 2024,
    "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference" (arXiv:2407.11550).
    So heads whose attention is spread keep more tokens than heads that look at few.

    Args:
        scores: `[batch, kv_heads, tokens]`, of any floating-point dtype.
        keep: tokens that an average KV head keeps, sinks and newest tokens included: one number, or one for each
            sequence. If there are more sinks and newest tokens than this, they are kept all the same.
        sinks: the first tokens of each sequence, after its padding, that are always kept.
        recent: the newest tokens of each sequence that are always kept.
        padding: how many places in front have no token that may be kept, int64 `[batch, kv_heads]` or `[batch, 1]` on
            the host.
        floor: the part of an average head's tokens that every head keeps, from 0 to 1. At 1, all heads keep as many.
        blocks: number of the packed block of each token, int64 `[batch, kv_heads, tokens]`; -1 for tokens in no block.
            A block has the mean score of its tokens. One that would be kept in part is kept if it has a token that is
            always kept, and evicted otherwise. Padding in it is never kept.
    """
    batch, kv_heads, tokens = scores.shape
    wanted = torch.as_tensor(keep).expand(batch)
    front = (torch.zeros(1, 1, dtype=torch.int64) if padding is None else padding).expand(batch, kv_heads)
    held = tokens - front
    positions, first = torch.arange(tokens, device=scores.device), front.to(scores.device)[..., None]
    is_token, is_always = positions >= first, (positions >= tokens - recent) | (positions < first + sinks)
    if blocks is not None:
        scores = _means_of_blocks(scores, blocks, is_always, is_token)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    limits = torch.finfo(wide.dtype)
    ranked = wide.nan_to_num(nan=limits.min, neginf=limits.min, posinf=limits.max)
    ranked = ranked.masked_fill(is_always, torch.inf).masked_fill(~is_token, -torch.inf)
    average = wanted.clamp(min=sinks + recent).minimum(held.amax(1))
    counts = _counts(ranked, average, floor).minimum(held)
    kept = highest(ranked, counts)
    if blocks is not None:
        # The tokens of a block are kept together, or none of them is.
        is_whole = _sums_of_blocks((is_token & ~kept).long(), blocks) == 0
        kept = torch.where(blocks >= 0, is_token & (is_whole | (scores == torch.inf)), kept)
        counts = kept.sum(2).cpu()
    return KeptTokens(kept, counts)


def _counts(ranked: Tensor, average: Tensor, floor: float) -> Tensor:
    """How many tokens each head keeps, int64 `[batch, kv_heads]` on the host, perhaps more than it has.

    Args:
        ranked: `[batch, kv_heads, tokens]`; infinite for tokens that are kept anyway, minus infinite for padding,
            finite for all others.
        average: tokens that an average head of each sequence keeps, int64 `[batch]` on the host.
        floor: the part of them that every head keeps.
    """
    batch, heads, tokens = ranked.shape
    if floor == 1:
        return average[:, None].expand(-1, heads)
    safe = (average * floor).long()
    guarded = ranked.masked_fill(highest(ranked, safe[:, None].expand(-1, heads)), torch.inf)
    chosen = highest(guarded.view(batch, 1, -1), (average * heads)[:, None])
    return chosen.view(batch, heads, tokens).sum(-1).cpu()


def highest(scores: Tensor, counts: Tensor) -> Tensor:
    """Which scores of each row are among its highest. Of equal scores, the first ones are.

    Args:
        scores: `[batch, rows, tokens]`, without NaN.
        counts: int64 `[batch, rows]` on the host, how many of each row are wanted, from 0 to `tokens`.

    Returns:
        bool `[batch, rows, tokens]`, true for `counts` scores of each row.
    """
    largest = int(counts.max())
    if largest == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    wanted = counts.to(scores.device)[..., None]
    descending = scores.topk(largest, dim=-1).values
    lowest = descending.gather(-1, (wanted - 1).clamp(min=0))
    above = scores > lowest
    # topk may choose any of equal scores, and another one on each device.
    equal = scores == lowest
    short = wanted - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= short))) & (wanted > 0)


def _means_of_blocks(scores: Tensor, blocks: Tensor, always: Tensor, is_token: Tensor) -> Tensor:
    """The mean score of the tokens of each block, for each token: infinite if one of them is always kept."""
    # So low that the sum of a block is finite.
    least = torch.finfo(torch.float32).min / (1 << 16)
    scores = scores.float().nan_to_num(nan=least).clamp(least, -least)
    sums, sizes, safe = (
        _sums_of_blocks(numbers * is_token, blocks) for numbers in (scores, torch.ones_like(scores), always.float())
    )
    return torch.where(blocks >= 0, (sums / sizes).masked_fill(safe > 0, torch.inf), scores)


def _sums_of_blocks(numbers: Tensor, blocks: Tensor) -> Tensor:
    """The sum of the numbers of the block of each token, `[batch, kv_heads, tokens]`; any number outside of blocks."""
    places = blocks + 1
    sums = numbers.new_zeros(*numbers.shape[:2], int(places.max()) + 1)
    return sums.scatter_add_(2, places, numbers).gather(2, places)
