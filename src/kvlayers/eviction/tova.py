"""Evicts the tokens to which the newest token attends least."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import Self, override

from kvlayers.eviction.attention_sums import attention_sums, needed
from kvlayers.eviction.contract import EvictionRule
from kvlayers.eviction.registry import register_eviction_rule
from kvlayers.rope.rotary import Rotary


@register_eviction_rule("tova")
@dataclass(frozen=True)
class Tova(EvictionRule):
    """A token is kept for the attention of the last query to it, averaged over all heads of the layer.

    Oren et al. 2024, "Transformers are Multi-State RNNs" (arXiv:2401.06104): Token Omission Via Attention.

    Args:
        scale: factor of the scores of attention. Default: that of the model.
    """

    scale: float | None = None
    queries: int = dataclasses.field(default=1, init=False)
    shares_heads: ClassVar[bool] = True

    @override
    def for_attention(self, rotary: Rotary | None, scale: float | None) -> Self:
        return self if self.scale is not None else dataclasses.replace(self, scale=scale)

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        last = needed(queries, "Tova")[:, :, -1:]
        return attention_sums(keys, last, self.scale).mean(dim=(1, 2))[:, None].expand(keys.shape[:3])
