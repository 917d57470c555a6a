"""The shape of each layer of a model, from its config: all that a plan knows of the model."""

from collections.abc import Callable
from typing import Any

import torch

from kvlayers.core.buffer import LayerShape, RecurrentShape, TokenShape
from kvlayers.core.from_config import HYBRID, RECURRENT, WINDOWED
from kvlayers.errors import ConfigError
from kvlayers.upstream import compat, model_layers, model_types

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
    if model_type in UNDESCRIBED or (
        # Until a recent version a config did not say which layers those are.
        model_type in HIDES_RECURRENT_LAYERS and all(spec.layer_type not in RECURRENT for spec in specs)
    ):
        raise ConfigError(
            f"A config of type '{model_type}' does not say what its layers hold: make the cache, run the model, and "
            "ask the cache for `nbytes`."
        )
    configs = model_layers.layer_configs(config)
    return [_shape_of(spec, configs[spec.index], batch_size, dtype) for spec in specs]


def _shape_of(spec: model_layers.LayerSpec, config: Any, batch_size: int, dtype: torch.dtype) -> LayerShape:
    numbers, layer_type = model_types.ConfigNumbers(config, spec.index), spec.layer_type
    if layer_type in HOLD_NOTHING:
        return LayerShape(batch_size, dtype)
    attends = layer_type in ("full_attention", *WINDOWED, *model_layers.INDEXED, *HYBRID)
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
    token = _token_shape(numbers, HYBRID.get(layer_type, layer_type)) if attends else None
    return LayerShape(batch_size, dtype, token, _recurrent_shape(numbers) if recurs else None)


# Layers of attention


def _token_shape(numbers: model_types.ConfigNumbers, layer_type: str) -> TokenShape:
    """What a layer of attention holds for a token.

    Args:
        numbers: config of the layer.
        layer_type: as in its `LayerSpec`.

    Raises:
        ConfigError: the config lacks a field.
    """
    if numbers.number_or_none("kv_lora_rank") is not None:
        return _latent_shape(numbers, layer_type)
    head_dim = _head_dim(numbers, layer_type)
    value_head_dim = numbers.number_or_none("v_head_dim") or head_dim
    heads = numbers.number_or_none("num_attention_heads_per_layer", "num_attention_heads")
    return TokenShape(model_types.kv_heads(numbers, layer_type), head_dim, value_head_dim, heads=heads)


def _latent_shape(numbers: model_types.ConfigNumbers, layer_type: str) -> TokenShape:
    """Multi-head latent attention: the latent that heads are made from, or in older versions the heads themselves."""
    indexer = numbers.number("index_head_dim") if layer_type in model_layers.INDEXED else 0
    caches_latents = compat.INDEXERS_CACHE_LATENTS if layer_type in model_layers.INDEXED else compat.CACHES_LATENTS
    rope = numbers.number("qk_rope_head_dim")
    if caches_latents:
        return TokenShape(1, numbers.number("kv_lora_rank"), rope, indexer)
    keys, values = numbers.number("qk_nope_head_dim") + rope, numbers.number("v_head_dim")
    return TokenShape(numbers.number("num_attention_heads"), keys, values, indexer)


def _head_dim(numbers: model_types.ConfigNumbers, layer_type: str) -> int:
    # Until transformers 5.13 gemma4 had a field of its own for full attention.
    own = ("global_head_dim",) if layer_type == "full_attention" else ()
    found = numbers.number_or_none(*own, "attention_head_dim", "head_dim", "d_kv")
    return numbers.number("hidden_size") // numbers.number("num_attention_heads") if found is None else found


# Recurrent layers


def _recurrent_shape(numbers: model_types.ConfigNumbers) -> RecurrentShape:
    """What a recurrent layer holds for a sequence.

    Raises:
        ConfigError: the config lacks a field, or the states of its model type have no known shape.
    """
    model_type = str(numbers.get("model_type"))
    if model_type not in _SHAPES:
        raise ConfigError(
            f"The recurrent states of models of type '{model_type}' have no known shape, as those of "
            f"{', '.join(sorted(_SHAPES))} do: make the cache, run the model, and ask the cache for `nbytes`."
        )
    return _SHAPES[model_type](numbers)


def _selective_scan(numbers: model_types.ConfigNumbers) -> RecurrentShape:
    """Mamba. Within hybrids, `intermediate_size` is that of other layers."""
    expand = numbers.number_or_none("mamba_expand")
    channels = numbers.number("intermediate_size") if expand is None else expand * numbers.number("hidden_size")
    kernel, state_size = numbers.number("mamba_d_conv", "conv_kernel"), numbers.number("mamba_d_state", "state_size")
    return RecurrentShape(channels * kernel, channels * state_size)


def _state_space_duality(numbers: model_types.ConfigNumbers) -> RecurrentShape:
    """Mamba 2: the convolution is over what enters the state as well, for each group of heads."""
    # Names of hybrids come first: in their configs, the others are those of attention.
    heads = numbers.number("n_mamba_heads", "mamba_n_heads", "mamba_num_heads", "num_heads")
    channels = heads * numbers.number("mamba_headdim", "mamba_d_head", "mamba_head_dim", "head_dim")
    groups = numbers.number("mamba_ngroups", "mamba_n_groups", "n_groups")
    state_size = numbers.number("mamba_d_state", "ssm_state_size", "state_size")
    convolved = channels + 2 * groups * state_size
    return RecurrentShape(convolved * numbers.number("mamba_d_conv", "conv_kernel"), channels * state_size)


def _gated_delta(numbers: model_types.ConfigNumbers) -> RecurrentShape:
    key_head_dim, value_head_dim = numbers.number("linear_key_head_dim"), numbers.number("linear_value_head_dim")
    value_heads = numbers.number("linear_num_value_heads")
    channels = 2 * numbers.number("linear_num_key_heads") * key_head_dim + value_heads * value_head_dim
    return RecurrentShape(
        channels * numbers.number("linear_conv_kernel_dim"), value_heads * key_head_dim * value_head_dim
    )


def _delta_attention(numbers: model_types.ConfigNumbers) -> RecurrentShape:
    heads, head_dim = numbers.number("linear_num_heads"), numbers.number("linear_head_dim")
    return RecurrentShape(3 * heads * head_dim * numbers.number("linear_conv_kernel_dim"), heads * head_dim**2)


_SHAPES: dict[str, Callable[[model_types.ConfigNumbers], RecurrentShape]] = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), _selective_scan),
    **dict.fromkeys(("mamba2", "nemotron_h", "bamba", "falcon_h1", "granitemoehybrid", "zamba2"), _state_space_duality),
    **dict.fromkeys(
        ("olmo_hybrid", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _gated_delta
    ),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _delta_attention),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        lambda numbers: RecurrentShape(numbers.number("hidden_size") * numbers.number("conv_L_cache")),
    ),
    # Its states are attributes of its modules, which no cache reaches.
    "recurrent_gemma": lambda numbers: RecurrentShape(0),
}
