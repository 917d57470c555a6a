"""How the tokens that a sequence keeps are divided among its KV heads."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.errors import OptionError
from kvlayers.eviction.highest import highest


class HeadBudgets(ABC):
    """Divides the tokens that a sequence keeps among its KV heads."""

    @abstractmethod
    def counts(self, scores: Tensor, keep: Tensor) -> Tensor:
        """How many tokens each head keeps.

        Args:
            scores: `[batch, kv_heads, tokens]`; infinite for tokens that are kept anyway, minus infinite for padding,
                finite for all others.
            keep: tokens that an average head of each sequence keeps, int64 `[batch]` on the host: at least the
                tokens that are kept anyway, and at most the tokens of the longest head.

        Returns:
            int64 `[batch, kv_heads]` on the host. A head that is given more than it has keeps all its tokens.
        """


@dataclass(frozen=True)
class EvenHeads(HeadBudgets):
    """Every head keeps the same number of tokens."""

    @override
    def counts(self, scores: Tensor, keep: Tensor) -> Tensor:
        return keep[:, None].expand(-1, scores.shape[1])


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
    def counts(self, scores: Tensor, keep: Tensor) -> Tensor:
        batch, heads, tokens = scores.shape
        safe = (keep * self.floor).long()
        guarded = scores.masked_fill(highest(scores, safe[:, None].expand(-1, heads)), torch.inf)
        chosen = highest(guarded.view(batch, 1, -1), (keep * heads)[:, None])
        return chosen.view(batch, heads, tokens).sum(-1).cpu()
