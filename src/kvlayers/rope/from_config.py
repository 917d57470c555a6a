"""How each layer of a model rotates its keys, found from the model's config."""

import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvlayers.errors import ConfigError
from kvlayers.rope.rotary import Layout, Rotary
from kvlayers.upstream import compat
from kvlayers.upstream.model_layers import LayerSpec, layer_specs
from kvlayers.upstream.model_types import decoder_config, listed_per_layer

# A config says how fast a model rotates its keys, but not which dimensions it rotates together. That is in the model's
# code, and a wrong guess gives wrong text without an error. So this list has only model types whose code was read:
# tests/rope/test_rotary.py checks the keys of each type against those of the model itself.
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
"""Model types (of the text model) that rotate dimension `i` with `i + pairs`."""

PAIRS = frozenset({
    "codegen", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "helium",
    "llama4_text",
})  # fmt: skip
"""Model types (of the text model) that rotate dimension `2 i` with `2 i + 1`."""

BACKWARDS = frozenset({"nanochat"})
"""Model types that rotate in the opposite direction."""

LENGTH_INDEPENDENT = ("default", "linear", "llama3", "yarn", "proportional")
"""RoPE types whose frequencies are the same at every position and for every length."""

SCALED_AFTER = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Model types that scale each dimension of a key after its rotation, so that it cannot be rotated further."""

SCALED_BY_POSITION = ("beam",)
"""Model types that scale queries by their absolute position, although the config does not say so."""

WITH_KEYS = ("full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding")
WITHOUT_KEYS = ("linear_attention", "conv", "dummy", "moe", "mlp")

_SWITCHES: dict[str, Callable[[PretrainedConfig], bool]] = {
    "falcon": lambda config: not config.alibi,
    "granitemoehybrid": lambda config: config.position_embedding_type == "rope",
    "zamba2": lambda config: config.use_mem_rope,
}
"""Whether a model of this type rotates keys at all, for types whose config can switch it off."""

_LayerRule = Callable[[PretrainedConfig, int, str], bool]


def _where_theta_is_set(config: PretrainedConfig, index: int, layer_type: str) -> bool:
    return bool(listed_per_layer(config, "layer_rope_theta")[index])


def _in_windows_or_dense(config: PretrainedConfig, index: int, layer_type: str) -> bool:
    dense = listed_per_layer(config, "mlp_layer_types")[index] == "dense"
    return (dense and config.prefix_dense_sliding_window_pattern == 1) or layer_type == "sliding_attention"


_ROTATES: dict[str, _LayerRule] = {
    **dict.fromkeys(("afmoe", "cohere2", "flint"), lambda config, index, layer_type: layer_type == "sliding_attention"),
    **dict.fromkeys(
        ("exaone4", "exaone_moe", "kolibri1"),
        lambda config, index, layer_type: config.sliding_window is None or layer_type == "sliding_attention",
    ),
    # Despite its name, the list has a 1 for each layer that does rotate its keys.
    **dict.fromkeys(
        ("llama4_text", "smollm3"),
        lambda config, index, layer_type: bool(listed_per_layer(config, "no_rope_layers")[index]),
    ),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), _where_theta_is_set),
    "cohere2_moe": _in_windows_or_dense,
}
"""Whether a layer rotates its keys, for model types in which only some layers do."""


def rotaries(config: object, instead: str | None = None) -> list[Rotary | None]:
    """How each layer with a cache rotates its keys, in order.

    The frequencies equal those of the model's own code, to the last bit of float32. They are computed as for a model
    that is built or loaded in its dtype; `model.to(torch.bfloat16)` on a float32 model rounds the model's frequencies.

    Args:
        config: the model's config, or that of its text model.
        instead: what an error tells the caller to do. Default: what helps with a cache that moves tokens.

    Returns:
        A `Rotary` for each layer that rotates its keys (layers that rotate alike share one), and `None` for a layer
        that does not, or has no keys.

    Raises:
        ConfigError: `config` is not a model config, or it does not say enough to move keys of the model to another
            position; see the message.
    """
    decoder = decoder_config(config)
    specs = layer_specs(decoder)
    _check(decoder, specs, instead)
    sign = -1.0 if decoder.model_type in BACKWARDS else 1.0
    layout: Layout = "halves" if decoder.model_type in HALVES else "pairs"

    @functools.cache
    def made(frequencies: tuple[float, ...]) -> Rotary:
        return Rotary(sign * torch.tensor(frequencies, dtype=torch.float64, device="cpu"), layout)

    return [None if own is None else made(tuple(own.tolist())) for own in _layer_frequencies(decoder, specs)]


def rotates_keys(config: object) -> bool:
    """Whether the model rotates its keys by their positions. A model with its own code might, whatever its config says.

    Raises:
        ConfigError: `config` is not a model config.
    """
    decoder = decoder_config(config)
    return _has_own_code(decoder) or _has_rope(decoder)


PASS = (
    "pass rotary=kvlayers.rope.rotary.Rotary(inv_freq, layout), with the frequencies and the layout of the model's own "
    "code"
)
"""What helps a cache that moves tokens, if their positions are known."""


def _check(decoder: PretrainedConfig, specs: list[LayerSpec], instead: str | None) -> None:
    """Raise `ConfigError` with the most specific reason if keys of the model cannot be moved."""
    leave = instead or "use a cache that leaves tokens where they are"
    model_type = decoder.model_type
    if _has_own_code(decoder):
        raise _unknown(decoder, instead)
    if not _has_rope(decoder):
        raise ConfigError(f"'{model_type}' as configured does not rotate its keys by their positions (RoPE): {leave}.")
    # A model that supports sections has default ones if its config has none.
    known = [getattr(decoder, "ignore_keys_at_rope_validation", None) or (), *rope_parameters(decoder)]
    if any("mrope_section" in keys for keys in known):
        raise ConfigError(
            f"Positions of '{model_type}' have several axes (mrope_section) instead of one per token: "
            f"{instead or f'if it gets only text, {PASS}'}."
        )
    scaled_by_position = {
        "llama_4_scaling_beta": any(own.get("llama_4_scaling_beta") is not None for own in rope_parameters(decoder)),
        "its code": model_type in SCALED_BY_POSITION,
        "attn_temperature_tuning": model_type == "llama4_text"
        and decoder.attn_temperature_tuning
        and not all(listed_per_layer(decoder, "no_rope_layers")),
    }
    for by, is_scaled in scaled_by_position.items():
        if is_scaled:
            raise ConfigError(
                f"'{model_type}' scales queries by their absolute position ({by}), so tokens cannot be moved: switch "
                f"that off, or {leave}."
            )
    for own in rope_parameters(decoder):
        rope_type = own.get("rope_type", "default")
        if rope_type not in LENGTH_INDEPENDENT:
            raise ConfigError(
                f"The RoPE type must be the same for every length ({', '.join(LENGTH_INDEPENDENT)}), got "
                f"'{rope_type}': {leave}."
            )
    if model_type in SCALED_AFTER:
        raise ConfigError(
            f"'{model_type}' scales each dimension of a key after its rotation, so cached keys cannot be moved: "
            f"{leave}."
        )
    # By attribute, because configs have other names for some of these.
    if getattr(decoder, "qk_rope_head_dim", None) is not None:
        raise ConfigError(
            f"'{model_type}' has multi-head latent attention, which caches the rotated states as values: {leave}."
        )
    if model_type not in HALVES | PAIRS:
        raise _unknown(decoder, instead)
    unknown = sorted({spec.layer_type for spec in specs} - {*WITH_KEYS, *WITHOUT_KEYS})
    if unknown:
        raise ConfigError(
            f"Layers must attend to each token ({', '.join(WITH_KEYS)}) or have no keys, but '{model_type}' has "
            f"{', '.join(unknown)}: {leave}."
        )


def _has_own_code(decoder: PretrainedConfig) -> bool:
    """Whether the model is not one of transformers: such a model may use any name, and may do anything."""
    return not type(decoder).__module__.startswith("transformers.")


def _unknown(decoder: PretrainedConfig, instead: str | None) -> ConfigError:
    return ConfigError(
        f"kvlayers does not know the rotary layout of '{decoder.model_type}' ({type(decoder).__name__}): "
        f"{instead or PASS}."
    )


def _has_rope(decoder: PretrainedConfig) -> bool:
    if decoder.model_type in ("codegen", "gptj"):
        return decoder.rotary_dim is not None
    switch = _SWITCHES.get(decoder.model_type)
    parameters = list(rope_parameters(decoder))
    return any(own.get("rope_theta") is not None for own in parameters) and (switch is None or switch(decoder))


def depends_on_length(config: object) -> bool:
    """Whether the angles by which a key is rotated depend on the length of its sequence at that time.

    Raises:
        ConfigError: `config` is not a model config.
    """
    return frequencies_within(config, 1, sys.maxsize) is None


def frequencies_within(config: object, first: int, last: int) -> str | None:
    """A name of the frequencies by which keys are rotated while a sequence grows from `first` to `last` tokens.

    Sequences with the same name may be read in parts, and may be passed side by side: a pass has one set of
    frequencies, which follows from the longest sequence in it.

    Returns:
        The name; `None` if the frequencies change meanwhile, or might.

    Raises:
        ConfigError: `config` is not a model config.
    """
    decoder, names = decoder_config(config), []
    for own in rope_parameters(decoder):
        rope_type = own.get("rope_type", "default")
        if rope_type in LENGTH_INDEPENDENT:
            continue
        # The rope type decides between lengths that the model was trained on, and lengths beyond them.
        border = decoder.max_position_embeddings if rope_type in ("dynamic", "longrope") else 0
        if rope_type == "longrope":
            of_model = getattr(decoder, "original_max_position_embeddings", None)
            border = own.get("original_max_position_embeddings") or of_model or border
        # Beyond the border, dynamic NTK has other frequencies for every length.
        if last > border and not (rope_type == "longrope" and first > border):
            return None
        names.append("long" if last > border else "short")
    return " ".join(names) or "all"


def remembers_lengths(config: object) -> bool:
    """Whether the model's code goes on with the frequencies of a longer sequence, until it sees a short one.

    Raises:
        ConfigError: `config` is not a model config.
    """
    return any("dynamic" in own.get("rope_type", "default") for own in rope_parameters(decoder_config(config)))


def _layer_frequencies(decoder: PretrainedConfig, specs: list[LayerSpec]) -> Iterator[Tensor | None]:
    """Radians per token for the keys of each layer, float32 `[pairs]`; `None` for layers that do not rotate keys."""
    rotates = _ROTATES.get(decoder.model_type)
    shared, of_windows = _model_frequencies(decoder), rope_config_of_windows(decoder)
    for index, spec in enumerate(specs):
        if spec.layer_type in WITHOUT_KEYS or (rotates and not rotates(decoder, index, spec.layer_type)):
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
    # On the CPU, where models are built, even if the caller has set another default device.
    with torch.device("cpu"):
        embedding = _rotary_embedding(type(decoder).__module__)(decoder)
    return {name: buffer for name, buffer in embedding.named_buffers() if name.endswith("inv_freq")}


@functools.cache
def _rotary_embedding(config_module: str) -> Any:
    """The class that computes the angles of the text model, from the module next to that of the config."""
    name = config_module.replace(".configuration_", ".modeling_")
    (embedding,) = (
        found
        for _, found in inspect.getmembers(importlib.import_module(name), inspect.isclass)
        if found.__module__ == name and found.__name__.endswith("RotaryEmbedding") and "Vision" not in found.__name__
    )
    return embedding


def rope_parameters(decoder: PretrainedConfig) -> list[dict[str, Any]]:
    """RoPE parameters of a config by their names in transformers 5: one dict, or one for each kind of layer."""
    # By attribute, because configs have other names for some of these.
    if compat.ROPE_HAS_ONE_DICT:
        parameters = getattr(decoder, "rope_parameters", None) or {}
        nested = [own for own in parameters.values() if isinstance(own, dict)]
        return nested or ([parameters] if parameters else [])
    theta, of_windows = getattr(decoder, "rope_theta", None), rope_config_of_windows(decoder)
    if theta is None:
        return []
    scaling = getattr(decoder, "rope_scaling", None) or {}
    # Older configs call it "type".
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    own = [{**scaling, "rope_theta": theta, "rope_type": rope_type}]
    return own if of_windows is None else [*own, *rope_parameters(of_windows)]


def rope_config_of_windows(decoder: PretrainedConfig) -> PretrainedConfig | None:
    """The config for the rotary embedding of layers with windows, `None` if it is the same as for other layers."""
    if compat.ROPE_HAS_ONE_DICT:
        return None
    theta = getattr(decoder, "rope_local_base_freq", None)
    if theta is None and decoder.model_type == "olmo3" and decoder.rope_scaling is not None:
        # It scales only full attention.
        theta = decoder.rope_theta
    if theta is None:
        return None
    own = copy.copy(decoder)
    own.rope_theta, own.rope_scaling, own.rope_local_base_freq = theta, None, None
    return own


def config_fields(config: PretrainedConfig) -> dict[str, Any]:
    """All fields of a config. Those that states depend on have their names in transformers 5."""
    fields: dict[str, Any] = config.to_dict()
    if not compat.ROPE_HAS_ONE_DICT and fields.get("rope_theta") is not None:
        said = rope_parameters(config)
        kinds = ("full_attention", "sliding_attention")[: len(said)]
        fields["rope_parameters"] = said[0] if len(said) == 1 else dict(zip(kinds, said, strict=True))
        for name in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
            fields.pop(name, None)
    return fields
