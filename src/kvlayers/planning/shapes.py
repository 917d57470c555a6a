"""The shape of each layer of a model, from its config: all that a plan knows of the model."""

from typing import Any

import torch

from kvlayers.caches.from_config import HYBRID, RECURRENT, WINDOWED
from kvlayers.errors import ConfigError
from kvlayers.layers.shape import LayerShape
from kvlayers.planning.attention_shapes import INDEXED, token_shape
from kvlayers.planning.recurrent_shapes import recurrent_shape
from kvlayers.upstream import compat, model_layers, model_types
from kvlayers.upstream.model_layers import LayerSpec
from kvlayers.upstream.model_types import ConfigNumbers

HOLD_NOTHING = ("dummy", "moe", "mlp")
"""Layer types without a cache of their own."""

UNDESCRIBED = ("cpmant", "dots3_note_text", "hy_v4", "mllama_text_model", "openai-gpt")
"""Model types whose configs do not say what their layers hold: tokens that are not those of the text, indexers in some
layers only, or nothing."""

HIDES_RECURRENT_LAYERS = ("recurrent_gemma",)
"""Model types whose configs may describe recurrent layers as layers that attend."""


def layer_shapes(config: object, batch_size: int, dtype: torch.dtype) -> list[LayerShape]:
    """The shape of each layer that has a cache, in order.

    Raises:
        ConfigError: `config` is no model config, lacks a field, or has layers of a type that is not known here.
    """
    model_type, specs = model_types.decoder_config(config).model_type, model_layers.layer_specs(config)
    # Until a recent version a config did not say which layers those are.
    hides_states = model_type in HIDES_RECURRENT_LAYERS and all(spec.layer_type not in RECURRENT for spec in specs)
    if model_type in UNDESCRIBED or hides_states:
        raise ConfigError(
            f"A config of type '{model_type}' does not say what its layers hold: make the cache, run the model, and "
            "ask the cache for `nbytes`."
        )
    # There are fewer specs than configs if the last layers read what earlier ones hold.
    return [
        _shape_of(spec, own, batch_size, dtype)
        for spec, own in zip(specs, model_layers.layer_configs(config), strict=False)
    ]


def _shape_of(spec: LayerSpec, config: Any, batch_size: int, dtype: torch.dtype) -> LayerShape:
    numbers, layer_type = ConfigNumbers(config, spec.index), spec.layer_type
    if layer_type in HOLD_NOTHING:
        return LayerShape(batch_size, dtype)
    attends = layer_type in ("full_attention", *WINDOWED, *INDEXED, *HYBRID)
    recurs = layer_type in (*RECURRENT, *HYBRID)
    if not attends and not recurs:
        raise ConfigError(
            f"The states of layers of type '{layer_type}' have no known shape: make the cache, run the model, and ask "
            "the cache for `nbytes`."
        )
    if recurs and not compat.MODELS_PASS_COLUMNS:
        raise ConfigError(
            f"Recurrent layers are planned from transformers 5.15 on, when kvlayers began to hold their states, but "
            f"this is {compat.TRANSFORMERS}: make the cache, run the model, and ask the cache for `nbytes`."
        )
    token = token_shape(numbers, HYBRID.get(layer_type, layer_type)) if attends else None
    return LayerShape(batch_size, dtype, token, recurrent_shape(numbers) if recurs else None)
