"""How the tokens that a sequence keeps are divided among its KV heads."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.errors import OptionError
from kvlayers.eviction.highest import highest


@dataclass(frozen=True, eq=False)
class SequenceBudgets:
    """How many tokens each sequence may keep.

    Attributes:
        keep: int64 `[batch]` on the host, tokens that an average head keeps.
        least: int64 `[batch]` on the host, tokens that every head keeps.
        most: int64 `[batch]` on the host, tokens that a head has.
        multiple: the tokens that a head keeps are a multiple of this number, unless they are all that it has.
    """

    keep: Tensor
    least: Tensor
    most: Tensor
    multiple: int = 1


class HeadBudgets(ABC):
    """Divides the tokens that a sequence keeps among its KV heads."""

    @abstractmethod
    def counts(self, scores: Tensor, budgets: SequenceBudgets) -> Tensor:
        """How many tokens each head keeps.

        Args:
            scores: `[batch, kv_heads, tokens]`; infinite for tokens that are kept anyway, minus infinite for padding,
                finite for all others.
            budgets: the budgets of the sequences. `least` is at most `most`.

        Returns:
            int64 `[batch, kv_heads]` on the host, between `least` and `most`.
        """


@dataclass(frozen=True)
class EvenHeads(HeadBudgets):
    """Every head keeps as many tokens."""

    @override
    def counts(self, scores: Tensor, budgets: SequenceBudgets) -> Tensor:
        whole = budgets.keep // budgets.multiple * budgets.multiple
        kept = torch.where(budgets.keep < budgets.most, whole, budgets.most)
        return kept.clamp(budgets.least, budgets.most)[:, None].expand(-1, scores.shape[1])


@dataclass(frozen=True)
class AdaptiveHeads(HeadBudgets):
    """Heads keep the tokens with the highest scores of all heads together, and each head a floor.

    Feng et al. 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference"
    (arXiv:2407.11550): heads whose attention is spread keep more tokens than heads that look at few.

    Args:
        floor: the part of an average head's tokens that every head keeps, from 0 to 1.

    Raises:
        OptionError: `floor` is not such a number.
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        if isinstance(self.floor, bool) or not isinstance(self.floor, int | float) or not 0 <= self.floor <= 1:
            raise OptionError(f"`floor` must be a number from 0 to 1, got {self.floor!r}.")

    @override
    def counts(self, scores: Tensor, budgets: SequenceBudgets) -> Tensor:
        heads, tokens = scores.shape[1], scores.shape[2]
        safe = (budgets.keep * self.floor).long().clamp(max=budgets.most)
        wanted = (budgets.keep * heads).clamp(max=budgets.most * heads)
        guarded = scores.masked_fill(highest(scores, safe[:, None].expand(-1, heads)), torch.inf)
        chosen = highest(guarded.flatten(1)[:, None], wanted[:, None]).view(-1, heads, tokens)
        shares = chosen.sum(-1).cpu()
        return torch.stack([_rounded(shares[row], budgets, row) for row in range(len(shares))])


def _rounded(shares: Tensor, budgets: SequenceBudgets, row: int) -> Tensor:
    """The shares of one sequence as multiples within the bounds, `[kv_heads]`, by the largest remainder."""
    least, most, multiple = int(budgets.least[row]), int(budgets.most[row]), budgets.multiple
    counts = [min(max(int(share) // multiple * multiple, least), most) for share in shares]
    left = int(shares.sum()) - sum(counts)
    by_remainder = sorted(range(len(counts)), key=lambda head: counts[head] - int(shares[head]))
    while True:
        given = False
        for head in by_remainder:
            step = min(multiple, most - counts[head])
            if 0 < step <= left:
                counts[head] += step
                left -= step
                given = True
        if not given:
            break
    # The heads with the most tokens pay for heads that were raised to `least`.
    while left < 0:
        richest = max(range(len(counts)), key=counts.__getitem__)
        # A head that keeps all its tokens may hold a part of a multiple.
        lower = (counts[richest] - 1) // multiple * multiple
        if lower < least:
            break
        left += counts[richest] - lower
        counts[richest] = lower
    return torch.tensor(counts)
