"""Draft models for tests of assisted decoding."""

import copy
from typing import Any

import torch

from families import model_and_inputs
from models import CONFIGS, fresh_model, with_larger_weights


def spread(family: str) -> Any:
    """A random model whose logits say something."""
    if family in CONFIGS:
        return fresh_model(family)
    return with_larger_weights(model_and_inputs(family)[0])


def draft_of(model: Any) -> Any:
    """A model that is right often, and wrong often enough."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * 0.15)
    return draft
