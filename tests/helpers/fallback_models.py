"""Small models with layers for which kvlayers has no kind of its own: indexers, and shared keys and values."""

import functools
from typing import Any

import torch
import transformers

import versions
from families import FAMILIES as OTHERS
from models import with_larger_weights

# With few heads some scores are zero, and which of them are the best ones depends on how many there are to choose from.
INDEXER = {**OTHERS["deepseek_v32"][1], "index_n_heads": 64}


INDEXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32Config", INDEXER),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**INDEXER, "n_group": 1}),
}


SHARING = {family: OTHERS[family] for family in ("gemma3n", "gemma4")}


FAMILIES = {**INDEXERS, **SHARING}


@functools.cache
def model_of(family: str, seed: int = 0) -> Any:
    if family in INDEXERS:
        versions.need_since("5.8", "indexers as layers of a cache")
    class_name, options = FAMILIES[family]
    versions.need_model_class(class_name)
    torch.manual_seed(seed)
    return with_larger_weights(
        transformers.AutoModelForCausalLM.from_config(getattr(transformers, class_name)(**options)).eval()
    )
