"""What a model wants of whoever runs it through a cache: its layers, its positions and its arguments."""

from kvlayers.core.from_config import WINDOWED
from kvlayers.rope.from_config import depends_on_length, rope_parameters, rotaries
from kvlayers.upstream.cache_argument import in_output, name_for, name_in_generate
from kvlayers.upstream.compat import INDEXERS_DEPEND_ON_CHUNKS, STATIC_LAYER, dequantizing_gguf
from kvlayers.upstream.model_layers import INDEXED, MODELS_WITH_OWN_CACHE, layer_devices, layer_specs
from kvlayers.upstream.model_types import (
    bos_ids,
    config_of,
    decoder_config,
    head_dims,
    is_peft_model,
    kept_states,
    most_positions,
    newest_logits_only,
    remembers_positions,
    tokens_at_once,
    unwrapped,
)

__all__ = [
    "INDEXED",
    "INDEXERS_DEPEND_ON_CHUNKS",
    "MODELS_WITH_OWN_CACHE",
    "STATIC_LAYER",
    "WINDOWED",
    "bos_ids",
    "config_of",
    "decoder_config",
    "depends_on_length",
    "dequantizing_gguf",
    "head_dims",
    "in_output",
    "is_peft_model",
    "kept_states",
    "layer_devices",
    "layer_specs",
    "most_positions",
    "name_for",
    "name_in_generate",
    "newest_logits_only",
    "remembers_positions",
    "rope_parameters",
    "rotaries",
    "tokens_at_once",
    "unwrapped",
]
