"""Evicts the tokens whose keys are like most others."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from kvlayers.eviction.contract import EvictionRule
from kvlayers.eviction.registry import register_eviction_rule


@register_eviction_rule("keydiff")
@dataclass(frozen=True)
class KeyDiff(EvictionRule):
    """A token is kept if its key points elsewhere than the mean key.

    Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments" (arXiv:2504.15364): the score is minus the cosine similarity of a key to the mean
    of the normalized keys. Keys that differ from the others tend to receive much attention.
    """

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        unit = normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
        anchor = normalize(unit.mean(dim=2), dim=-1)
        similarities: Tensor = (unit @ anchor[..., None]).squeeze(-1)
        return -similarities
