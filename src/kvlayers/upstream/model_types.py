"""What models of some type are like on every version of transformers, as far as caches must know."""

import copy
from typing import Any

import torch

# Transformers 5 spells it PreTrainedConfig, and has this name as well.
from transformers import PretrainedConfig

from kvlayers.errors import ConfigError

SCANS_FROM_ZERO = ("falcon_mamba", "jamba", "mamba", "zamba")
"""Model types whose scan over several tokens takes no state to begin from: behind others, tokens go one by one."""

HAS_RELATIVE_POSITIONS = ("bloom", "mpt")
"""Model types that take no position_ids, and need none: attention goes by how far tokens are apart (ALiBi)."""

SCALES_BY_SLOT = ("llama4_text",)
"""Model types that scale queries by the slots that they are in, whatever their position_ids."""

KEEPS_STATES_IN_MODULES = ("recurrent_gemma",)
"""Model types whose recurrent states are attributes of their modules, out of the reach of any cache."""


def config_of(model_or_config: object) -> PretrainedConfig:
    """The config of a model, or the config itself.

    Raises:
        ConfigError: it is neither.
    """
    # By attribute, as a model that wraps another one (torch.compile) answers with its config.
    found = (
        getattr(model_or_config, "config", None) if isinstance(model_or_config, torch.nn.Module) else model_or_config
    )
    if not isinstance(found, PretrainedConfig):
        raise ConfigError(
            f"expected a model, or a model config (a PreTrainedConfig), but saw a {type(model_or_config).__name__}: "
            "pass the model itself, or model.config."
        )
    return found


def decoder_config(model_or_config: object) -> PretrainedConfig:
    """The config of the decoder's text model, which is the config itself for a plain language model.

    Raises:
        ConfigError: neither a model nor a model config.
    """
    config = config_of(model_or_config)
    decoder = config.get_text_config(decoder=True)
    # T5 has a name of its own for the layers of its decoder, which transformers overlooks.
    layers = vars(config).get("num_decoder_layers") if config.is_encoder_decoder else None
    if isinstance(layers, int) and decoder.num_hidden_layers != layers:
        decoder = copy.copy(decoder)
        decoder.num_hidden_layers = layers
    return decoder


def head_dims(config: object) -> tuple[int, int] | None:
    """head_dim of the keys and of the values that the model caches, `None` where its config does not say."""
    decoder = decoder_config(config)
    # By attribute, as configs have other names for some of these.
    if getattr(decoder, "qk_rope_head_dim", None) is not None:
        # Multi-head latent attention caches what it expands to, or what it expands from: the model's own affair.
        return None
    try:
        head_dim = getattr(decoder, "head_dim", None)
    except Exception:
        # Where layers differ in it (gemma4), a config refuses to name one number for all.
        return None
    hidden_size, heads = getattr(decoder, "hidden_size", None), getattr(decoder, "num_attention_heads", None)
    if head_dim is None and isinstance(hidden_size, int) and isinstance(heads, int):
        head_dim = hidden_size // heads
    return (head_dim, head_dim) if isinstance(head_dim, int) else None


def most_positions(config: object) -> int | None:
    """The most tokens that a model has positions for, `None` where its config names no limit."""
    decoder = decoder_config(config)
    # transformers maps names as n_positions to this one, but not in what a config says as a dict.
    field = decoder.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    found = decoder.to_dict().get(field)
    return found if isinstance(found, int) else None


def tokens_at_once(config: object) -> int | None:
    """The most tokens that a model's recurrent layers can take in at once behind others, `None` for any number."""
    return 1 if decoder_config(config).model_type in SCANS_FROM_ZERO else None


def cache_argument(model: Any) -> str:
    """Name under which `model` takes its cache. transformers goes by the name of the class, and so must we."""
    return "cache_params" if "mamba" in type(model).__name__.lower() else "past_key_values"


def replaces_cross_attention_cache(model: Any) -> bool:
    """Whether a model (t5gemma) makes another cache of the same class for cross-attention, from a config alone."""
    from transformers.generation.utils import GenerationMixin

    return bool(type(model)._prepare_cache_for_generation is not GenerationMixin._prepare_cache_for_generation)


def counts_on_the_whole_reservation(config: object) -> bool:
    """Whether the model's forward pass makes a bias for all slots of a static cache, so that no bucket fits it."""
    if not isinstance(config, PretrainedConfig):
        return False
    return config.model_type == "bloom" or bool(vars(config).get("alibi"))
