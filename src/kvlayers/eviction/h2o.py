"""Evicts the tokens to which all queries together attend least."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.eviction.attention_sums import attention_sums, needed
from kvlayers.eviction.contract import ALL_QUERIES, EvictionRule
from kvlayers.eviction.registry import register_eviction_rule
from kvlayers.rope.rotary import Rotary


@register_eviction_rule("h2o")
@dataclass(frozen=True)
class HeavyHitters(EvictionRule):
    """A token is kept for the attention of all queries behind it, averaged over them and the heads that share its key.

    Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
    (arXiv:2306.14048). The paper takes the sum over the queries, by which an old token wins because more queries see
    it; here the sum is divided by the number of queries that see the token.

    Args:
        scale: factor of the scores of attention. Default: that of the model.
    """

    scale: float | None = None
    queries: int = dataclasses.field(default=ALL_QUERIES, init=False)

    @override
    def for_attention(self, rotary: Rotary | None, scale: float | None) -> Self:
        return self if self.scale is not None else dataclasses.replace(self, scale=scale)

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        observed = needed(queries, "HeavyHitters")
        sums = attention_sums(keys, observed, self.scale).mean(dim=2)
        seen_by = torch.arange(keys.shape[2], 0, -1, device=keys.device).clamp(max=observed.shape[2])
        return sums / seen_by
