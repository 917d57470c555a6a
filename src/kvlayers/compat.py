"""All that depends on a version of transformers or torch. Nothing else in kvlayers asks which one is installed."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import transformers.cache_utils as upstream
from packaging.version import Version
from transformers import PreTrainedConfig

from .errors import ConfigError

TRANSFORMERS = Version(Version(transformers.__version__).base_version)

OPTIONS_ARE_PER_LAYER = Version("5.19")
"""From here on `get_layer_types_and_kwargs` returns options for each layer, for configs whose layers differ; before,
it returned one dict for all."""

BLOOM_MASKS_WHAT_IS_THERE = Version("5.21")
"""From here on BLOOM pads its mask to the length of a static cache only where it is compiled; before, always."""

TORCH = Version(Version(torch.__version__).base_version)

COMPILES_TENSOR_SUBCLASSES = Version("2.13") <= TORCH
"""From here on TorchDynamo is known to trace what `attention/single_query_compiled.py` asks of it."""

# torch 2.6 has them as current_device_idx and set_device_idx, which are deprecated from 2.7 on.
_NAMES_ITS_INDEX = Version("2.7") <= TORCH
current_device_index = (
    torch.accelerator.current_device_index if _NAMES_ITS_INDEX else torch.accelerator.current_device_idx
)
set_device_index = torch.accelerator.set_device_index if _NAMES_ITS_INDEX else torch.accelerator.set_device_idx

LINEAR_LAYER = upstream.LinearAttentionCacheLayerMixin
ATTENTION_LAYER = upstream.CacheLayerMixin
DUMMY_LAYER: tuple[type, ...] = (upstream.DummyLayer,) if hasattr(upstream, "DummyLayer") else ()
"""What stands for a layer that holds nothing, in versions that have one for each layer of a model."""


@dataclass(frozen=True)
class LayerSpec:
    """What a model config says of one layer: the type in transformers' own terms, and what its cache must know."""

    layer_type: str
    options: dict[str, Any]


def decoder_config(config: object) -> PreTrainedConfig:
    """The config of the decoder's text model, which is `config` itself for a plain language model.

    Raises:
        ConfigError: `config` is not a model config.
    """
    if not isinstance(config, PreTrainedConfig):
        raise ConfigError(
            f"expected a model config (a PreTrainedConfig), but saw a {type(config).__name__}: pass model.config."
        )
    decoder = config.get_text_config(decoder=True)
    # T5 has a name of its own for the layers of its decoder, which transformers overlooks.
    layers = vars(config).get("num_decoder_layers") if config.is_encoder_decoder else None
    if isinstance(layers, int) and decoder.num_hidden_layers != layers:
        decoder = copy.copy(decoder)
        decoder.num_hidden_layers = layers
    return decoder


def layer_specs(config: object) -> list[LayerSpec]:
    """One spec for each layer that has a cache, in order.

    Raises:
        ConfigError: `config` is no model config, or lacks a field that says how its layers attend.
    """
    decoder = decoder_config(config)
    try:
        layer_types, options = upstream.get_layer_types_and_kwargs(decoder)
    except AttributeError as missing:
        raise ConfigError(
            f"expected a config that describes its layers (num_hidden_layers, and layer_types, sliding_window or "
            f"attention_chunk_size where layers differ), but in {type(decoder).__name__} {missing}: pass the config of "
            "the model itself, or make the cache without a config."
        ) from missing
    per_layer = options if TRANSFORMERS >= OPTIONS_ARE_PER_LAYER else [options] * len(layer_types)
    return [LayerSpec(layer_type, dict(own)) for layer_type, own in zip(layer_types, per_layer, strict=True)]


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


def upstream_layer(spec: LayerSpec, max_cache_len: int | None = None) -> Any:
    """transformers' own layer for a type that kvlayers has no kind for; static where `max_cache_len` is given.

    Raises:
        ConfigError: transformers does not know the type either.
    """
    static = max_cache_len is not None
    mapping = upstream.STATIC_LAYER_TYPE_MAPPING if static else upstream.DYNAMIC_LAYER_TYPE_MAPPING
    if spec.layer_type not in mapping:
        raise ConfigError(
            f"expected a layer type that transformers {TRANSFORMERS} has a cache for ({', '.join(sorted(mapping))}), "
            f"but saw '{spec.layer_type}': import the module of the model that defines it first."
        )
    size = {"max_cache_len": max_cache_len} if static else {}
    return mapping[spec.layer_type](**size, **spec.options)


SCANS_FROM_ZERO = ("falcon_mamba", "jamba", "mamba", "zamba")
"""Model types whose scan over several tokens takes no state to begin from: behind others, tokens go one by one."""


HAS_RELATIVE_POSITIONS = ("bloom", "mpt")
"""Model types that take no position_ids, and need none: attention goes by how far tokens are apart (ALiBi)."""

SCALES_BY_SLOT = ("llama4_text",)
"""Model types that scale queries by the slots that they are in, whatever their position_ids."""

KEEPS_STATES_IN_MODULES = ("recurrent_gemma",)
"""Model types whose recurrent states are attributes of their modules, out of the reach of any cache."""


def tokens_at_once(config: object) -> int | None:
    """The most tokens that a model's recurrent layers can take in at once behind others, `None` for any number."""
    return 1 if decoder_config(config).model_type in SCANS_FROM_ZERO else None


def cache_argument(model: Any) -> str:
    """Name under which `model` takes its cache. transformers goes by the name of the class, and so must we."""
    return "cache_params" if "mamba" in type(model).__name__.lower() else "past_key_values"


def whole_length(generation_config: Any, attention_mask: torch.Tensor | None) -> int | None:
    """Tokens of the whole sequence that `generate()` was given, those that a cache has seen included, where known.

    It drops a mask without padding (transformers 5.23 and a few before), and notes its length.
    """
    return attention_mask.shape[1] if attention_mask is not None else vars(generation_config).get("_mask_length")


def default_generation_options() -> dict[str, Any]:
    """What each option of `generate()` is where nobody says anything.

    From transformers 5 on, a `GenerationConfig` has `None` for most, and their defaults are elsewhere.
    """
    from transformers import GenerationConfig

    defaults: dict[str, Any] = dict(vars(GenerationConfig()))
    if Version("5.0") <= TRANSFORMERS:
        defaults |= GenerationConfig._get_default_generation_params()
    return defaults


def replaces_cross_attention_cache(model: Any) -> bool:
    """Whether a model (t5gemma) makes another cache of the same class for cross-attention, from a config alone."""
    from transformers.generation.utils import GenerationMixin

    return bool(type(model)._prepare_cache_for_generation is not GenerationMixin._prepare_cache_for_generation)


def counts_on_the_whole_reservation(config: object) -> bool:
    """Whether the model's forward pass makes a bias for all slots of a static cache, so that no bucket fits it."""
    if not isinstance(config, PreTrainedConfig):
        return False
    return config.model_type == "bloom" or bool(vars(config).get("alibi"))


def makes_its_own_cache(model: Any, name: str) -> bool:
    """Whether the caches of a static name must be left to transformers for `model`.

    Either the model has code of its own that sizes them and knows more of its layers than its config says (the vision
    layers of mllama), or its forward pass counts on attention over the whole reservation (BLOOM's alibi, before 5.21).
    """
    # Late, as generate() takes long to import and not every use of a cache needs it.
    from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
    from transformers.generation.utils import GenerationMixin

    if name not in ALL_STATIC_CACHE_IMPLEMENTATIONS:
        return False
    overridden = type(model)._prepare_static_cache is not GenerationMixin._prepare_static_cache
    return overridden or (model.config.model_type == "bloom" and TRANSFORMERS < BLOOM_MASKS_WHAT_IS_THERE)
