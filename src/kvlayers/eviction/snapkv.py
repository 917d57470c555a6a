"""Evicts the tokens to which the newest queries attend least."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad
from typing_extensions import Self, override

from kvlayers.errors import OptionError
from kvlayers.eviction.attention_sums import attention_sums, needed
from kvlayers.eviction.contract import EvictionRule
from kvlayers.eviction.registry import register_eviction_rule
from kvlayers.rope.rotary import Rotary


@register_eviction_rule("snapkv")
@dataclass(frozen=True)
class SnapKV(EvictionRule):
    """A token is kept for the attention of the newest queries (the window) to it and to its neighbours.

    Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv:2404.14469): probabilities are
    averaged over the window and over the query heads of a KV head, and pooled over neighbours. The tokens of the window
    have the highest scores.

    Args:
        queries: tokens of the window.
        kernel: neighbours over which a score is averaged, itself included: an odd number.
        scale: factor of the scores of attention. Default: that of the model.

    Raises:
        OptionError: `queries` or `kernel` is not such a number.
    """

    queries: int = 64
    kernel: int = 5
    scale: float | None = None

    def __post_init__(self) -> None:
        for name, number in (("queries", self.queries), ("kernel", self.kernel)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise OptionError(f"`{name}` must be a positive whole number, got {number!r}.")
        if not self.kernel % 2:
            raise OptionError(f"`kernel` must be odd, so that a token is in the middle, got {self.kernel}.")

    @override
    def for_attention(self, rotary: Rotary | None, scale: float | None) -> Self:
        return self if self.scale is not None else dataclasses.replace(self, scale=scale)

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        window = needed(queries, "SnapKV")[:, :, -self.queries :]
        sums = attention_sums(keys, window, self.scale).mean(dim=2)
        before = sums[..., : keys.shape[2] - window.shape[2]] / window.shape[2]
        if before.shape[2]:
            before = avg_pool1d(before, self.kernel, stride=1, padding=self.kernel // 2)
        return pad(before, (0, window.shape[2]), value=torch.inf)
