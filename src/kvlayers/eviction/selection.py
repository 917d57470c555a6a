"""Which tokens an eviction keeps, given their scores; packed blocks are kept or evicted as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.errors import OptionError
from kvlayers.eviction.budgets import EvenHeads, HeadBudgets, highest


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The tokens to keep of each sequence and KV head. Heads may keep different numbers of them.

    Attributes:
        indices: int64 `[batch, kv_heads, most]`, numbers of tokens that the layer held, ascending, in the last `counts`
            places. The places in front of them are 0.
        counts: int64 `[batch, kv_heads]` on the host, how many tokens are kept.
    """

    indices: Tensor
    counts: Tensor

    @property
    def are_even(self) -> bool:
        """Whether all heads of all sequences keep the same number of tokens."""
        return bool((self.counts == self.indices.shape[2]).all())


EVEN = EvenHeads()


def select(
    scores: Tensor,
    keep: int | Sequence[int],
    *,
    sinks: int = 0,
    recent: int = 0,
    padding: Sequence[int] | Tensor | None = None,
    head_budgets: HeadBudgets = EVEN,
) -> KeptTokens:
    """The tokens with the highest scores, with the sinks and the newest tokens.

    A sequence that has fewer tokens than it may keep keeps all of them. Of tokens with equal scores, the first are
    kept. A score that is NaN counts as the lowest.

    Args:
        scores: `[batch, kv_heads, tokens]`, of any floating-point dtype.
        keep: tokens that an average KV head keeps, sinks and newest tokens included: one number, or one for each
            sequence. If there are more sinks and newest tokens than this, they are kept all the same.
        sinks: the first tokens of each sequence, after its padding, that are always kept.
        recent: the newest tokens of each sequence that are always kept.
        padding: how many places in front have no token that may be kept: a number for each sequence, or int64
            `[batch, kv_heads]` on the host.
        head_budgets: how the tokens of a sequence are divided among its KV heads.

    Raises:
        OptionError: a number is negative, there is not one for each sequence, or padding is longer than the sequence.
    """
    batch, _, tokens = scores.shape
    if isinstance(padding, Tensor):
        front = padding
    else:
        front = _numbers("padding", 0 if padding is None else padding, batch)[:, None].expand(-1, scores.shape[1])
    wanted = _numbers("keep", keep, batch)
    for name, number in (("sinks", sinks), ("recent", recent)):
        if number < 0:
            raise OptionError(f"`{name}` must be at least 0, got {number}.")
    held = tokens - front
    if bool((held < 0).any()):
        raise OptionError(f"`padding` must be at most the {tokens} tokens there are, got {front.tolist()}.")
    average = wanted.clamp(min=sinks + recent).minimum(held.amax(1))
    ranked = _ranked(scores, front, sinks, recent)
    counts = head_budgets.counts(ranked, average).clamp(min=sinks + recent).minimum(held)
    return kept_tokens(highest(ranked, counts), counts)


def _numbers(name: str, given: int | Sequence[int], batch: int) -> Tensor:
    """One number for each sequence, int64 `[batch]` on the host."""
    numbers = [given] * batch if isinstance(given, int) else list(given)
    if len(numbers) != batch or any(number < 0 for number in numbers):
        raise OptionError(f"`{name}` must be 0 or more, with a number for each of {batch} sequences, got {given!r}.")
    return torch.tensor(numbers, dtype=torch.int64)


def _ranked(scores: Tensor, front: Tensor, sinks: int, recent: int) -> Tensor:
    """The scores without NaN: infinite for tokens that are kept anyway, minus infinite only for padding."""
    tokens = scores.shape[2]
    wide = scores if scores.dtype == torch.float64 else scores.float()
    limits = torch.finfo(wide.dtype)
    ranked = wide.nan_to_num(nan=limits.min, neginf=limits.min, posinf=limits.max)
    positions = torch.arange(tokens, device=scores.device)
    first = front.to(scores.device)[..., None]
    always = (positions >= tokens - recent) | (positions < first + sinks)
    return ranked.masked_fill(always, torch.inf).masked_fill(positions < first, -torch.inf)


def kept_tokens(kept: Tensor, counts: Tensor) -> KeptTokens:
    """The tokens that a mask keeps.

    Args:
        kept: bool `[batch, kv_heads, tokens]`.
        counts: how many each head keeps, int64 `[batch, kv_heads]` on the host.
    """
    most = int(counts.max())
    # Every kept token goes to its own place, and all others to one more place, which is cut off.
    free = most - counts.to(kept.device)[..., None]
    places = torch.where(kept, kept.cumsum(-1) - 1 + free, most)
    positions = torch.arange(kept.shape[2], device=kept.device).expand_as(places)
    indices = torch.zeros(*kept.shape[:2], most + 1, dtype=torch.int64, device=kept.device)
    return KeptTokens(indices.scatter_(-1, places, positions)[..., :most], counts)


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
