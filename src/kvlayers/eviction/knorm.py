"""Evicts the tokens whose keys are long."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.eviction.contract import EvictionRule
from kvlayers.eviction.registry import register_eviction_rule


@register_eviction_rule("knorm")
@dataclass(frozen=True)
class KNorm(EvictionRule):
    """A token is kept for the small L2 norm of its key.

    Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv:2406.11430):
    keys of a small norm tend to receive much attention.
    """

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        wide = torch.promote_types(keys.dtype, torch.float32)
        norms: Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=wide)
        return -norms
