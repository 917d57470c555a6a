"""Facts about models and their configs that do not depend on the version of transformers."""

import copy
import inspect
from typing import Any

import torch

# Transformers 5 spells it PreTrainedConfig, and keeps this name as well.
from transformers import PretrainedConfig

from kvlayers.errors import ConfigError
from kvlayers.upstream import compat

SCANS_FROM_ZERO = ("falcon_mamba", "jamba", "mamba", "zamba")
"""Model types whose scan over several tokens cannot start from a state: later tokens are passed one by one."""

DECODES_ONE_TOKEN = ("prophetnet", "xlm-prophetnet")
"""Model types that refuse several tokens behind others, since they have no mask for them."""

HAS_RELATIVE_POSITIONS = ("bloom", "mpt")
"""Model types without `position_ids`: their attention depends on the distance between tokens (ALiBi)."""

BIASED_BY_COLUMN = ("bloom", "mpt", "prophetnet", "xlm-prophetnet")
"""Model types that add a bias to the scores of attention, or hide tokens, by the column of a token in the cache."""

SCALES_BY_SLOT = ("llama4_text",)
"""Model types that scale queries by their slots in the sequence, whatever their `position_ids`."""


HAS_A_LAYER_FOR_EACH_TYPE = ("zamba", "zamba2")
"""Model types with as many layers as `layer_types` has entries, whatever `num_hidden_layers` says."""


def config_of(model_or_config: object) -> PretrainedConfig:
    """The config of a model, or the config itself.

    Raises:
        ConfigError: it is neither of them.
    """
    # By attribute, since a model that wraps another one (torch.compile) forwards it.
    found = (
        getattr(model_or_config, "config", None) if isinstance(model_or_config, torch.nn.Module) else model_or_config
    )
    if not isinstance(found, PretrainedConfig):
        from transformers import PreTrainedTokenizerBase

        seen = "tokenizer" if isinstance(found, PreTrainedTokenizerBase) else type(model_or_config).__name__
        raise ConfigError(
            f"`config` must be a model or its config (a PreTrainedConfig), got a {seen}: pass the model itself, or "
            "model.config."
        )
    return found


def decoder_config(model_or_config: object) -> PretrainedConfig:
    """The config of the decoder's text model. For a plain language model, this is its config.

    Raises:
        ConfigError: it is neither a model nor a config.
    """
    config = config_of(model_or_config)
    decoder = config.get_text_config(decoder=True)
    # T5 has another name for the number of its decoder layers, which transformers overlooks.
    layers = vars(config).get("num_decoder_layers") if config.is_encoder_decoder else None
    if decoder.model_type in HAS_A_LAYER_FOR_EACH_TYPE:
        layers = len(decoder.layers_block_type)
    if isinstance(layers, int) and decoder.num_hidden_layers != layers:
        decoder = copy.copy(decoder)
        decoder.num_hidden_layers = layers
    return decoder


def listed_per_layer(decoder: PretrainedConfig, field: str) -> list[Any]:
    """The entry of each layer in a field of a config that lists them.

    A list may have more entries than the model has layers, as if only the first layers of a checkpoint were loaded.

    Args:
        decoder: config of the decoder, see `decoder_config`.
        field: name of the field.

    Raises:
        ConfigError: the list has fewer entries than the model has layers.
    """
    listed, layers = getattr(decoder, field), decoder.num_hidden_layers
    if len(listed) < layers:
        raise ConfigError(
            f"`{field}` of {type(decoder).__name__} must have an entry for each of its {layers} layers "
            f"(num_hidden_layers), got {len(listed)}: set num_hidden_layers to at most {len(listed)}, or list "
            "the other layers too."
        )
    return list(listed[:layers])


def head_dims(config: object) -> tuple[int, int] | None:
    """head_dim of the keys and of the values that the model caches, `None` if its config does not say."""
    decoder = decoder_config(config)
    # By attribute, since configs map some of these to other names.
    if getattr(decoder, "qk_rope_head_dim", None) is not None:
        # Multi-head latent attention caches either the latent or the expanded states, depending on the model.
        return None
    try:
        head_dim = getattr(decoder, "head_dim", None)
    except Exception:
        # If layers differ in it (gemma4), the config refuses to return a single number.
        return None
    hidden_size, heads = getattr(decoder, "hidden_size", None), getattr(decoder, "num_attention_heads", None)
    if head_dim is None and isinstance(hidden_size, int) and isinstance(heads, int):
        head_dim = hidden_size // heads
    return (head_dim, head_dim) if isinstance(head_dim, int) else None


def most_positions(config: object) -> int | None:
    """The most tokens that a model has positions for, `None` if its config has no limit."""
    decoder = decoder_config(config)
    # transformers maps names such as n_positions to this one, but not in the dict of a config.
    field = decoder.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    found = decoder.to_dict().get(field)
    return found if isinstance(found, int) else None


def tokens_at_once(config: object) -> int | None:
    """The most tokens that a model can take in one pass behind earlier ones, `None` for any number."""
    return 1 if decoder_config(config).model_type in SCANS_FROM_ZERO or decodes_one_token(config) else None


def decodes_one_token(config: object) -> bool:
    """Whether a model attends differently to the same tokens if they come one by one, and takes them no other way."""
    return decoder_config(config).model_type in DECODES_ONE_TOKEN


def newest_logits_only(model: Any, tokens: int = 1) -> dict[str, int]:
    """Arguments of a model's forward pass that limit the logits to the newest tokens; empty if it has no such argument.

    Example:
        >>> import torch, transformers
        >>> with torch.device("meta"):
        ...     newest_logits_only(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1)))
        {'logits_to_keep': 1}
    """
    return {"logits_to_keep": tokens} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def replaces_cross_attention_cache(model: Any) -> bool:
    """Whether a model (t5gemma) replaces the cross-attention cache by one that it makes from a config."""
    from transformers.generation.utils import GenerationMixin

    return bool(type(model)._prepare_cache_for_generation is not GenerationMixin._prepare_cache_for_generation)


def goes_by_columns(config: object) -> bool:
    """Whether attention depends on the column of a token in the cache, so that no token before it may be missing."""
    decoder = decoder_config(config)
    fields = vars(decoder)
    return (
        decoder.model_type in BIASED_BY_COLUMN
        or bool(fields.get("alibi"))
        or "relative_attention_num_buckets" in fields
        or ("attention_layers" in fields and "local" in listed_per_layer(decoder, "attention_layers"))
    )


def caches_latents(config: object) -> bool:
    """Whether the cache gets the latents of multi-head latent attention, so that attention never reads its states."""
    return compat.CACHES_LATENTS and vars(decoder_config(config)).get("kv_lora_rank") is not None


def counts_on_the_whole_reservation(config: object) -> bool:
    """Whether the forward pass makes a bias for all slots of a static cache, so that buckets do not fit."""
    if not isinstance(config, PretrainedConfig):
        return False
    return config.model_type == "bloom" or bool(vars(config).get("alibi"))
