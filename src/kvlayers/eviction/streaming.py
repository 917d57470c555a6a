"""Evicts the oldest tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.eviction.contract import EvictionRule
from kvlayers.eviction.registry import register_eviction_rule


@register_eviction_rule("streaming")
@dataclass(frozen=True)
class Streaming(EvictionRule):
    """A token is kept for being new. With the sinks, which the layer keeps, that is a window behind sinks.

    Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453). Other than in the
    paper, and in `SinkCache`, tokens keep the positions that they have in the text.
    """

    shares_heads: ClassVar[bool] = True

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        return torch.arange(keys.shape[2], dtype=torch.float32, device=keys.device).expand(keys.shape[:3])
