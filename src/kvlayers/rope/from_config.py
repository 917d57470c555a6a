"""Which rotation each layer of a model gives its keys, by the model's config."""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvlayers.errors import ConfigError
from kvlayers.rope.parameters import rope_config_of_windows, rope_parameters
from kvlayers.rope.rotary import Layout, Rotary
from kvlayers.upstream.compat import LayerSpec, layer_specs
from kvlayers.upstream.model_types import decoder_config

# A config says how fast a model turns its keys, and not which dimensions it turns with which. That is in the code of
# the model, and a wrong guess gives wrong text and no error. So only what has been looked at is known here: the keys
# of every type below are checked in tests/rope/test_rotary.py against those of the model itself.
HALVES = frozenset({
    "afmoe", "apertus", "arcee", "aria_text", "bamba", "bitnet", "cwm", "dbrx", "diffllama", "doge", "dots1", "exaone4",
    "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
    "gemma4_text", "gemma4_unified_text", "glm4_moe", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "granite",
    "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hrm_text", "hy_v3",
    "hyperclovax", "jais2", "jetmoe", "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "mellum",
    "mimo_v2_flash", "minimax_m2", "ministral", "mistral", "mixtral", "modernbert-decoder", "nanochat", "nemotron",
    "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma",
    "zamba2", "zaya",
})  # fmt: skip
"""Model types (of the text model) that turn dimension `i` with `i + pairs`."""

PAIRS = frozenset({
    "codegen", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "helium",
    "llama4_text",
})  # fmt: skip
"""Model types (of the text model) that turn dimension `2 i` with `2 i + 1`."""

BACKWARDS = frozenset({"nanochat"})
"""Model types that turn the other way round."""

LENGTH_INDEPENDENT = ("default", "linear", "llama3", "yarn", "proportional")
"""RoPE types whose frequencies are the same at every position and for every length."""

SCALED_AFTER = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Model types whose keys are scaled dimension by dimension after their rotation, so that they cannot be turned on."""

SCALED_BY_POSITION = ("beam",)
"""Model types whose queries are scaled by their absolute position, without a word of it in the config."""

WITH_KEYS = ("full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding")
WITHOUT_KEYS = ("linear_attention", "conv", "dummy", "moe", "mlp")

_SWITCHES: dict[str, Callable[[PretrainedConfig], bool]] = {
    "falcon": lambda config: not config.alibi,
    "granitemoehybrid": lambda config: config.position_embedding_type == "rope",
    "zamba2": lambda config: config.use_mem_rope,
}
"""Whether a model of that type rotates keys at all, where its config can tell it not to."""

_LayerRule = Callable[[PretrainedConfig, int, str], bool]


def _everywhere(config: PretrainedConfig, index: int, layer_type: str) -> bool:
    return True


def _in_windows(config: PretrainedConfig, index: int, layer_type: str) -> bool:
    return layer_type == "sliding_attention"


def _in_windows_if_any(config: PretrainedConfig, index: int, layer_type: str) -> bool:
    return config.sliding_window is None or layer_type == "sliding_attention"


def _in_windows_or_dense(config: PretrainedConfig, index: int, layer_type: str) -> bool:
    dense = config.mlp_layer_types[index] == "dense" and config.prefix_dense_sliding_window_pattern == 1
    return dense or layer_type == "sliding_attention"


def _where_listed(config: PretrainedConfig, index: int, layer_type: str) -> bool:
    # Despite its name, the list has a 1 for each layer that does rotate its keys.
    return bool(config.no_rope_layers[index])


def _where_theta_is_set(config: PretrainedConfig, index: int, layer_type: str) -> bool:
    return bool(config.layer_rope_theta[index])


_ROTATES: dict[str, _LayerRule] = {
    **dict.fromkeys(("afmoe", "cohere2", "flint"), _in_windows),
    **dict.fromkeys(("exaone4", "exaone_moe", "kolibri1"), _in_windows_if_any),
    **dict.fromkeys(("llama4_text", "smollm3"), _where_listed),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), _where_theta_is_set),
    "cohere2_moe": _in_windows_or_dense,
}
"""Whether a layer of that type of model rotates its keys, for models where only some do."""


def rotaries(config: object) -> list[Rotary | None]:
    """How the keys of each layer that has a cache are rotated, in order.

    The frequencies are those of the model's own code, to the last bit of its float32. They are computed as for a model
    that is built or loaded in its dtype: `model.to(torch.bfloat16)` on a float32 model rounds the model's own.

    Args:
        config: the model's config, or that of its text model.

    Returns:
        A `Rotary` for each layer that rotates its keys, the same one for all that rotate alike, and `None` for a layer
        that does not, or has no keys.

    Raises:
        ConfigError: `config` is no model config, or keys of the model cannot be moved to another position with what it
            says: see the message.
    """
    decoder = decoder_config(config)
    specs = layer_specs(decoder)
    _check(decoder, specs)
    sign = -1.0 if decoder.model_type in BACKWARDS else 1.0
    layout: Layout = "halves" if decoder.model_type in HALVES else "pairs"
    found: dict[tuple[float, ...], Rotary] = {}
    result: list[Rotary | None] = []
    for frequencies in _layer_frequencies(decoder, specs):
        if frequencies is None:
            result.append(None)
            continue
        alike = tuple(frequencies.tolist())
        if alike not in found:
            found[alike] = Rotary(sign * frequencies, layout)
        result.append(found[alike])
    return result


def _check(decoder: PretrainedConfig, specs: list[LayerSpec]) -> None:
    """Raise `ConfigError` where the keys of a model cannot be moved, with the reason that says most."""
    model_type = decoder.model_type
    if not type(decoder).__module__.startswith("transformers."):
        # A model with code of its own may have any name, and may do anything.
        raise _unknown(decoder)
    if not _has_rope(decoder):
        raise ConfigError(
            f"expected a model whose keys are rotated by their positions (RoPE), but '{model_type}' as configured does "
            "not rotate them: use a cache that leaves tokens where they are."
        )
    # A model that knows of sections has some of its own where its config has none.
    known = [getattr(decoder, "ignore_keys_at_rope_validation", None) or (), *rope_parameters(decoder)]
    if any("mrope_section" in keys for keys in known):
        raise ConfigError(
            f"expected positions that are one number for each token, but those of '{model_type}' have several axes "
            "(mrope_section): where it sees nothing but text, pass rotary=kvlayers.Rotary(inv_freq, layout), with the "
            "frequencies and the layout of the model's own code."
        )
    for own in rope_parameters(decoder):
        rope_type = own.get("rope_type", "default")
        if own.get("llama_4_scaling_beta") is not None:
            raise _scaled_by_position(model_type, "llama_4_scaling_beta")
        if rope_type not in LENGTH_INDEPENDENT:
            raise ConfigError(
                f"expected RoPE of a type that is the same for every length ({', '.join(LENGTH_INDEPENDENT)}), but saw "
                f"'{rope_type}': use a cache that leaves tokens where they are."
            )
    if model_type in SCALED_BY_POSITION:
        raise _scaled_by_position(model_type, "its code")
    if model_type in SCALED_AFTER:
        raise ConfigError(
            f"expected keys that are cached as they were rotated, but '{model_type}' scales each of their dimensions "
            "after that: use a cache that leaves tokens where they are."
        )
    # By attribute, as configs have other names for some of these.
    if getattr(decoder, "qk_rope_head_dim", None) is not None:
        raise ConfigError(
            f"expected a model that caches the keys which it rotates, but '{model_type}' has multi-head latent "
            "attention, which caches what it rotates as values: use a cache that leaves tokens where they are."
        )
    if model_type not in HALVES | PAIRS:
        raise _unknown(decoder)
    if model_type == "llama4_text" and decoder.attn_temperature_tuning and not all(decoder.no_rope_layers):
        raise _scaled_by_position(model_type, "attn_temperature_tuning")
    unknown = sorted({spec.layer_type for spec in specs} - {*WITH_KEYS, *WITHOUT_KEYS})
    if unknown:
        raise ConfigError(
            f"expected layers that attend to each token ({', '.join(WITH_KEYS)}) or cache none, but '{model_type}' has "
            f"{', '.join(unknown)}: use a cache that leaves tokens where they are."
        )


def _unknown(decoder: PretrainedConfig) -> ConfigError:
    return ConfigError(
        f"expected a model whose rotary layout is known to kvlayers, but saw '{decoder.model_type}' "
        f"({type(decoder).__name__}): pass rotary=kvlayers.Rotary(inv_freq, layout), with the frequencies and the "
        "layout of the model's own code."
    )


def _scaled_by_position(model_type: str, by: str) -> ConfigError:
    return ConfigError(
        f"expected attention that depends on how far apart tokens are, but '{model_type}' also scales queries by their "
        f"absolute position ({by}): switch that off, or use a cache that leaves tokens where they are."
    )


def _has_rope(decoder: PretrainedConfig) -> bool:
    if decoder.model_type in ("codegen", "gptj"):
        return decoder.rotary_dim is not None
    switch = _SWITCHES.get(decoder.model_type)
    parameters = list(rope_parameters(decoder))
    return any(own.get("rope_theta") is not None for own in parameters) and (switch is None or switch(decoder))


def depends_on_length(config: object) -> bool:
    """Whether a key is rotated by angles that depend on how long its sequence was when it was computed.

    Raises:
        ConfigError: `config` is no model config.
    """
    parameters = rope_parameters(decoder_config(config))
    return any(own.get("rope_type", "default") not in LENGTH_INDEPENDENT for own in parameters)


def _layer_frequencies(decoder: PretrainedConfig, specs: list[LayerSpec]) -> Iterator[Tensor | None]:
    """Radians per token of the keys of each layer, float32 `[pairs]`, `None` where nothing is rotated."""
    rotates = _ROTATES.get(decoder.model_type, _everywhere)
    shared, of_windows = _model_frequencies(decoder), rope_config_of_windows(decoder)
    for index, spec in enumerate(specs):
        if spec.layer_type in WITHOUT_KEYS or not rotates(decoder, index, spec.layer_type):
            yield None
        elif rotates is _where_theta_is_set:
            own = copy.copy(decoder)
            own.rope_parameters = {**decoder.rope_parameters, "rope_theta": decoder.layer_rope_theta[index]}
            yield _model_frequencies(own)["inv_freq"]
        elif of_windows is not None and spec.layer_type == "sliding_attention":
            yield _model_frequencies(of_windows)["inv_freq"]
        elif "inv_freq" in shared:
            yield shared["inv_freq"]
        elif decoder.rope_parameters[spec.layer_type] is None:
            yield None
        else:
            yield shared[f"{spec.layer_type}_inv_freq"]


def _model_frequencies(decoder: PretrainedConfig) -> dict[str, Tensor]:
    """The buffers of the model's rotary embedding: `inv_freq`, or `<layer type>_inv_freq` for each kind of layer."""
    if decoder.model_type in ("codegen", "gptj"):
        steps = torch.arange(0, decoder.rotary_dim, 2, dtype=torch.float32, device="cpu") / decoder.rotary_dim
        return {"inv_freq": 1.0 / 10000**steps}
    # On the CPU as models are built, also where the caller has set another default device.
    with torch.device("cpu"):
        embedding = _rotary_embedding(type(decoder).__module__)(decoder)
    return {name: buffer for name, buffer in embedding.named_buffers() if name.endswith("inv_freq")}


@functools.cache
def _rotary_embedding(config_module: str) -> Any:
    """The class that computes the angles of the text model, from the module beside that of the config."""
    name = config_module.replace(".configuration_", ".modeling_")
    (embedding,) = (
        found
        for _, found in inspect.getmembers(importlib.import_module(name), inspect.isclass)
        if found.__module__ == name and found.__name__.endswith("RotaryEmbedding") and "Vision" not in found.__name__
    )
    return embedding
