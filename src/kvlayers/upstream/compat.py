"""All that depends on a version of transformers or torch. Nothing else in kvlayers asks which one is installed."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import transformers
from packaging.version import Version

from kvlayers.errors import ConfigError
from kvlayers.upstream.supported import check_supported

TRANSFORMERS = check_supported("transformers", transformers.__version__)
TORCH = check_supported("torch", torch.__version__)

# Only now, as a version that is not supported may lack what these are imported for.
import transformers.cache_utils as upstream  # noqa: E402

# Transformers 5 spells it PreTrainedConfig, and has this name as well.
from transformers import PretrainedConfig  # noqa: E402

from kvlayers.upstream.model_types import decoder_config  # noqa: E402

MASKS_BY_CACHE_POSITION = Version("5.4") > TRANSFORMERS
"""Until then models made masks and positions of `cache_position`, `[query_length]`, which they made of a cache's length
where it was not given, and asked a layer for its mask sizes with it; then with how many queries there are."""

UPDATES_BY_CACHE_POSITION = Version("5.4") > TRANSFORMERS
"""Until then static layers were told in `cache_kwargs` which slots to write."""

LOOPS_COUNT_CACHE_POSITION = Version("5.4") > TRANSFORMERS
"""Until then loops of `generate()` were given the `cache_position` of the prompt, and counted it on token by token."""

CHUNKS_BEGIN_AT_ZERO = Version("5.21") > TRANSFORMERS
"""Until then a prefill in chunks read the whole sequence, whatever the given cache had seen of it."""

SLICES_BY_CACHE_POSITION = Version("5.3") > TRANSFORMERS
"""Until then `prepare_inputs_for_generation` took the newest tokens by `cache_position`; then by their number."""

KNOWS_FIRST_ITERATION = Version("5.0") <= TRANSFORMERS
"""From here on `prepare_inputs_for_generation` is told whether it is called for the first time."""

HAS_LINEAR_LAYERS = Version("5.5") <= TRANSFORMERS
"""From here on recurrent states are held by layers of a cache; before, in a cache of each model's own."""

STATES_BY_INDEX = Version("5.14") <= TRANSFORMERS
"""From here on a layer has several recurrent states, asked for by their index, and a config's layer types and their
options come from one function."""

MODELS_PASS_COLUMNS = Version("5.15") <= TRANSFORMERS
"""From here on models pass a layer the columns of new tokens, and how many its convolution keeps. Layers of kvlayers
with recurrent states are of this kind, and serve no model of before."""

CACHES_LATENTS = Version("5.15") <= TRANSFORMERS
"""From here on multi-head latent attention caches the latent and the rotated part of a key; before, what all heads make
of the two."""

INDEXERS_CACHE_LATENTS = Version("5.18") <= TRANSFORMERS
"""The same of models whose latent attention has an indexer (deepseek_v32)."""

LAYERS_SAY_WHAT_THEY_CAN_CROP = Version("5.17") <= TRANSFORMERS
"""From here on layers of transformers' own know whether they can be rolled back; before, no recurrent one can."""

INDEXED = "deepseek_sparse_attention"
INDEXERS_DEPEND_ON_CHUNKS = Version("5.17") > TRANSFORMERS
"""Until then (5.12 is known to, 5.17 not to) what layers of the type above attend to depended on which tokens came at
once, and their static layers chose among slots without tokens."""

LAYER_CLASSES_TAKE_CONFIG = Version("5.8") <= TRANSFORMERS < Version("5.14")
"""In these versions classes of layers are listed by layer type, and are made from the config of the model."""

RECORDS_BEFORE_DRAFTS = Version("5.14") <= TRANSFORMERS
"""From here on assisted decoding lets a cache record its past, that of a draft model from 5.15 on; before, it used one
that forgets nothing."""

CROPS_DRAFTS_TO_LENGTHS = Version("5.15") > TRANSFORMERS
"""Until then assisted decoding cropped the cache of a draft model to a length, which may be zero."""

PREFILLS_APART = Version("5.0") <= TRANSFORMERS
"""From here on `generate()` has a method for the first forward pass, `_prefill`."""

PREFILL_SUBTRACTS_LENGTHS = Version("5.4") <= TRANSFORMERS
"""From here on that method takes as many of the newest tokens as there are more than the cache has seen: all of them
where that is none. Before, it took them by their positions, and found none."""

RESERVES_AHEAD = Version("5.13") <= TRANSFORMERS
"""From here on a model says what states a static cache is reserved for."""

ROPE_HAS_ONE_DICT = Version("5.0") <= TRANSFORMERS
"""From here on a config has all that it says of RoPE in `rope_parameters`; before, in `rope_theta`, `rope_scaling` and,
where windows rotate by other angles, `rope_local_base_freq`."""

RESERVES_FOR_KEYS_AND_VALUES = Version("5.0") <= TRANSFORMERS
"""From here on a layer is told the form of values as well as that of keys."""

SAYS_WHAT_RESERVES = Version("5.13") <= TRANSFORMERS
"""From here on layers of transformers' own say whether they can reserve memory before the first states."""

RENAMED_MAXIMA = Version("5.13") <= TRANSFORMERS
"""From here on `get_max_cache_shape`, `max_cache_len` and `max_batch_size` of caches are old names of `get_max_length`
and `batch_size`. Before, they are the only ones, and transformers calls them."""

CROPS_BY_COUNT_ALONE = Version("5.15") <= TRANSFORMERS
"""From here on a positive argument of `crop` warns, and from 5.20 on is refused; before, it is a length."""

CONVERTS_TO_TUPLES = Version("5.0") > TRANSFORMERS
"""Until then `generate()` returned tuples where a config said `return_legacy_cache`."""

PASTS_NEED_DECODER_MASKS = Version("5.4") <= TRANSFORMERS
"""From here on `generate()` takes all ids of a decoder for new ones where no mask says how long the whole is."""

ITERATES_AS_PAIRS = Version("5.0") > TRANSFORMERS
"""Until then caches are iterated as keys and values; then with the window of each layer besides."""

_HOLLOW = {"SinkCache": Version("5.0") > TRANSFORMERS, "SlidingWindowCache": Version("5.6") <= TRANSFORMERS}
HOLLOW_CACHE_NAMES = tuple(name for name, is_hollow in _HOLLOW.items() if is_hollow)
"""Old names of caches that transformers has, and that are no such cache: a class that only raises, or `StaticCache`."""

NAME_FOR_DRAFTS = "dynamic_full" if Version("5.15") > TRANSFORMERS else None
"""The name that assisted decoding asks a draft model's cache by; until then, that of one that forgets nothing."""

HAS_GGUF_CONFIG = Version("5.17") <= TRANSFORMERS
"""From here on a GGUF file may be read as it is quantized."""

HAS_EXPORTERS = Version("5.14") <= TRANSFORMERS
"""From here on transformers has exporters, which take caches apart to make them inputs of a program."""

TELLS_OF_LOADING = Version("5.4") <= TRANSFORMERS
"""From here on transformers' progress bars can be told to somebody else (`set_tqdm_hook`)."""

MAKES_STATIC_CACHE = "_prepare_static_cache" if Version("5.1") <= TRANSFORMERS else "_get_cache"
"""Name of the method that makes caches of a static name."""

BLOOM_MASKS_WHAT_IS_THERE = Version("5.21")
"""From here on BLOOM pads its mask to the length of a static cache only where it is compiled; before, always."""

COMPILES_TENSOR_SUBCLASSES = Version("2.13") <= TORCH
"""From here on TorchDynamo is known to trace what `attention/single_query_compiled.py` asks of it."""

# torch 2.6 has them as current_device_idx and set_device_idx, which are deprecated from 2.7 on.
_NAMES_ITS_INDEX = Version("2.7") <= TORCH
current_device_index = (
    torch.accelerator.current_device_index if _NAMES_ITS_INDEX else torch.accelerator.current_device_idx
)
set_device_index = torch.accelerator.set_device_index if _NAMES_ITS_INDEX else torch.accelerator.set_device_idx

TELLS_EXPORTING = Version("2.7") <= TORCH
"""From here on torch says whether code is traced to be exported, rather than compiled."""


def is_exporting() -> bool:
    """Whether code is traced to be exported. Before torch 2.7 a strict export cannot be told from compiling: false."""
    if TELLS_EXPORTING:
        return torch.compiler.is_exporting()
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


_OF_GENERATE = os.path.join(os.path.dirname(transformers.__file__), "generation", "utils.py")


def is_prefill_of_generate(code: CodeType) -> bool:
    """Whether `code` is that of the first forward pass of `generate()`, which subtracts the length of the cache."""
    return code.co_name == "_prefill" and PREFILL_SUBTRACTS_LENGTHS and code.co_filename == _OF_GENERATE


def may_be_exporting() -> bool:
    """Whether code may be traced to be exported, so that what it reads must serve any number of tokens."""
    return torch.compiler.is_exporting() if TELLS_EXPORTING else torch.compiler.is_compiling()


class _NoLinearLayer:
    """Stands for the base of layers with recurrent states, where transformers has none."""


LINEAR_LAYER: type = upstream.LinearAttentionCacheLayerMixin if HAS_LINEAR_LAYERS else _NoLinearLayer
ATTENTION_LAYER = upstream.CacheLayerMixin
DUMMY_LAYER: tuple[type, ...] = (upstream.DummyLayer,) if Version("5.23") <= TRANSFORMERS else ()
"""What stands for a layer that holds nothing, in versions that have one for each layer of a model."""

STATIC_LAYER: Any = upstream.StaticLayer
QUANTO_LAYER: type = upstream.QuantoQuantizedLayer
HQQ_LAYER: type = upstream.HQQQuantizedLayer


class _NoFp8Layer:
    """Stands for transformers' fp8 layer, in versions that have none."""


FP8_LAYER: type = upstream.Fp8QuantizedLayer if Version("5.23") <= TRANSFORMERS else _NoFp8Layer

QUANTIZED_LAYERS = (QUANTO_LAYER, HQQ_LAYER, FP8_LAYER)
"""transformers' layers that round states."""

_HAS_INDEXERS = Version("5.11") <= TRANSFORMERS
INDEXED_LAYER: tuple[Any, ...] = (upstream.DynamicIndexedLayer,) if _HAS_INDEXERS else ()
"""A layer of full attention that caches the keys of an indexer besides, in versions that have one."""
STATIC_INDEXED_LAYER: tuple[Any, ...] = (upstream.StaticIndexedLayer,) if _HAS_INDEXERS else ()
"""The same with a reservation."""


@dataclass(frozen=True)
class LayerSpec:
    """What a model config says of one layer: the type in transformers' own terms, and what its cache must know.

    Attributes:
        layer_type: as transformers calls it.
        options: what its cache must know, as arguments of transformers' own layers.
        index: which of the layers of the cache it is.
    """

    layer_type: str
    options: dict[str, Any]
    index: int


TAKES_CACHES_SINCE: dict[str, Version | None] = {
    **dict.fromkeys(
        ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2",
         "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba", "zamba2"),
        Version("5.5"),
    ),
    "olmo_hybrid": Version("5.15"),
    **dict.fromkeys(("minimax", "reformer", "xlstm"), None),
}  # fmt: skip
"""Model types that once made, or make to this day (`None`), a cache of a class of their own for what no other holds."""

MAKE_THEIR_OWN_CACHES = tuple(
    model_type for model_type, since in TAKES_CACHES_SINCE.items() if since is None or since > TRANSFORMERS
)
"""Those of them that do so in this version, so that no cache of ours can be theirs."""


def layer_specs(config: object) -> list[LayerSpec]:
    """One spec for each layer that has a cache, in order.

    Raises:
        ConfigError: `config` is no model config, or lacks a field that says how its layers attend.
    """
    decoder = decoder_config(config)
    if decoder.model_type in MAKE_THEIR_OWN_CACHES:
        since = TAKES_CACHES_SINCE[decoder.model_type]
        newer = "" if since is None else f", or use transformers {since} or newer"
        raise ConfigError(
            f"expected a model whose cache holds all of its states, but on transformers {TRANSFORMERS} models of type "
            f"'{decoder.model_type}' make a cache of their own: leave it to generate(){newer}."
        )
    try:
        layer_types, options = _LAYER_TYPES_OF(decoder)
    # Before 5.0 nothing keeps a config from naming a word where a number belongs.
    except (AttributeError, TypeError) as missing:
        raise ConfigError(
            f"expected a config that describes its layers (num_hidden_layers, and layer_types, sliding_window or "
            f"attention_chunk_size where layers differ), but in {type(decoder).__name__} {missing}: pass the config of "
            "the model itself, or make the cache without a config."
        ) from missing
    per_layer = options if isinstance(options, list) else [options] * len(layer_types)
    told = {"config": decoder} if LAYER_CLASSES_TAKE_CONFIG else {}
    return [
        LayerSpec(layer_type, {**_without_window(layer_type, own), **told}, index)
        for index, (layer_type, own) in enumerate(zip(layer_types, per_layer, strict=True))
    ]


def _without_window(layer_type: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a layer without what only others of its model have, where one dict was for all."""
    all_tokens = layer_type in ("full_attention", "linear_attention", "conv", "hybrid")
    return {name: value for name, value in options.items() if not (all_tokens and name == "sliding_window")}


def layer_configs(config: object) -> list[PretrainedConfig]:
    """The config of each layer of the decoder, in which fields are one number where layers differ in them."""
    decoder = decoder_config(config)
    # Since 5.14 a config may say of some layers what is otherwise for them.
    if STATES_BY_INDEX:
        return list(decoder.per_layer_config)
    return [decoder] * decoder.num_hidden_layers


def _described_layers(decoder: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The layer type of each layer and its options, as a config says them, in words of today.

    By attribute, as configs have other names for some of these.
    """
    sliding_window = getattr(decoder, "sliding_window", None)
    chunk = getattr(decoder, "attention_chunk_size", None)
    found = getattr(decoder, "layer_types", None)
    if found is None:
        kind = "full_attention" if sliding_window is chunk is None else "sliding_attention"
        found = [kind] * decoder.num_hidden_layers
    # The last layers of some models read what earlier ones hold.
    found = found[: len(found) - (getattr(decoder, "num_kv_shared_layers", None) or 0)]
    layer_types = [_TYPES_BEFORE.get(layer_type, layer_type) for layer_type in found]
    windowed = {"sliding_window": sliding_window or chunk}
    options = [windowed if kind in ("sliding_attention", "chunked_attention") else {} for kind in layer_types]
    return layer_types, options


_TYPES_BEFORE = {"attention": "full_attention", **dict.fromkeys(("mamba", "moe", "mlp"), "linear_attention")}
"""Layer types of before 5.14. What holds nothing at all is made as a recurrent layer, which stays empty."""

# From 5.19 on the options come for each layer, for configs whose layers differ; before, one dict for all.
_LAYER_TYPES_OF = upstream.get_layer_types_and_kwargs if STATES_BY_INDEX else _described_layers


def upstream_layer(spec: LayerSpec, max_cache_len: int | None = None) -> Any:
    """transformers' own layer for a type that kvlayers has no kind for; static where `max_cache_len` is given.

    Raises:
        ConfigError: transformers does not know the type either.
    """
    make = _layer_makers(max_cache_len)
    if spec.layer_type not in make:
        raise ConfigError(
            f"expected a layer type that transformers {TRANSFORMERS} has a cache for ({', '.join(sorted(make))}), but "
            f"saw '{spec.layer_type}': import the module of the model that defines it first, or, where its model "
            "makes a cache of its own, leave it to generate()."
        )
    return make[spec.layer_type](spec.options)


def _layer_makers(max_cache_len: int | None) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """For each layer type that transformers has a class for, what makes its layer from the options of a `LayerSpec`."""
    static = max_cache_len is not None
    size = {"max_cache_len": max_cache_len} if static else {}
    if STATES_BY_INDEX:
        listed = upstream.STATIC_LAYER_TYPE_MAPPING if static else upstream.DYNAMIC_LAYER_TYPE_MAPPING
        wrong = {INDEXED} if static and INDEXERS_DEPEND_ON_CHUNKS else set()
        return {name: functools.partial(_of_options, kind, size) for name, kind in listed.items() if name not in wrong}
    recurrent: dict[str, Any] = {}
    if HAS_LINEAR_LAYERS:
        alone, beside_attention = upstream.LinearAttentionLayer, upstream.LinearAttentionAndFullAttentionLayer
        recurrent = {"linear_attention": alone, "conv": alone, "hybrid": beside_attention}
    makers: dict[str, Callable[[dict[str, Any]], Any]] = {
        name: functools.partial(_alone, kind, {}) for name, kind in recurrent.items()
    }
    if static:
        makers |= {name: functools.partial(_alone, kind, size) for name, kind in _own_static_layers().items()}
    if LAYER_CLASSES_TAKE_CONFIG and not static:
        listed = upstream.LAYER_TYPE_CACHE_MAPPING
        makers |= {name: functools.partial(_of_config, kind) for name, kind in listed.items()}
    return makers


def _of_options(kind: Any, size: dict[str, Any], options: dict[str, Any]) -> Any:
    return kind(**size, **options)


def _alone(kind: Any, size: dict[str, Any], options: dict[str, Any]) -> Any:
    return kind(**size)


def _of_config(kind: Any, options: dict[str, Any]) -> Any:
    return kind(options["config"])


def _own_static_layers() -> dict[str, Any]:
    """Classes of static layers besides those of full and sliding attention, from 5.12 to 5.13."""
    return dict(upstream.LAYER_TYPE_STATIC_CACHE_MAPPING) if Version("5.12") <= TRANSFORMERS else {}


def whole_length(generation_config: Any, attention_mask: torch.Tensor | None) -> int | None:
    """Tokens of the whole sequence that `generate()` was given, those that a cache has seen included, where known.

    It drops a mask without padding (transformers 5.23 and a few before), and notes its length.
    """
    return attention_mask.shape[1] if attention_mask is not None else vars(generation_config).get("_mask_length")


def counted_on(model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What a loop of `generate()` knows of a prompt once it has decoded some tokens, except for what a cache has seen.

    Args:
        model: the model that generates.
        input_ids: the prompt, `[batch, tokens]`.
        model_kwargs: arguments of the model for the prompt.
        tokens: how many were decoded.
    """
    from transformers.generation.utils import GenerationMixin
    from transformers.utils import ModelOutput

    if LOOPS_COUNT_CACHE_POSITION:
        model_kwargs = model._get_initial_cache_position(input_ids.shape[1], input_ids.device, model_kwargs)
    # One at a time, as the loop does it: what it repeats is the last entry.
    for _ in range(tokens):
        model_kwargs = GenerationMixin._update_model_kwargs_for_generation(
            model, ModelOutput(), model_kwargs, is_encoder_decoder=model.config.is_encoder_decoder
        )
    # The loop that is entered now makes it for all tokens.
    return {name: value for name, value in model_kwargs.items() if name != "cache_position"}


def dequantizing_gguf() -> dict[str, Any]:
    """Arguments of `from_pretrained` that read a GGUF file in full precision: since 5.17 that must be said."""
    return {"quantization_config": transformers.GgufConfig(dequantize=True)} if HAS_GGUF_CONFIG else {}


def most_tokens(generation_config: Any, max_cache_length: int) -> int:
    """Tokens that a call of `generate()` makes room for, of which a config may ask more since transformers 5.13."""
    return max(max_cache_length, vars(generation_config).get("max_cache_len") or 0)


def default_generation_options() -> dict[str, Any]:
    """What each option of `generate()` is where nobody says anything.

    From transformers 5 on, a `GenerationConfig` has `None` for most, and their defaults are elsewhere.
    """
    from transformers import GenerationConfig

    defaults: dict[str, Any] = dict(vars(GenerationConfig()))
    if Version("5.0") <= TRANSFORMERS:
        defaults |= GenerationConfig._get_default_generation_params()
    return defaults


def static_shape(model: Any) -> tuple[Any, Any] | None:
    """kv_heads and head_dim of the states that a static cache of a model is for, where the model says so."""
    shape: tuple[Any, Any] | None = model._get_static_cache_init_shape() if RESERVES_AHEAD else None
    return shape


def model_inputs(model: Any, input_ids: torch.Tensor, new_tokens: int, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a model's `prepare_inputs_for_generation` makes of the last `new_tokens` of `input_ids`, behind others."""
    told: dict[str, Any] = {"is_first_iteration": False} if KNOWS_FIRST_ITERATION else {}
    if SLICES_BY_CACHE_POSITION:
        end = input_ids.shape[1]
        told["cache_position"] = torch.arange(end - new_tokens, end, device=input_ids.device)
    else:
        told["next_sequence_length"] = new_tokens
    inputs: dict[str, Any] = type(model).prepare_inputs_for_generation(model, input_ids, **told, **model_kwargs)
    return inputs


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
    overridden = getattr(type(model), MAKES_STATIC_CACHE) is not getattr(GenerationMixin, MAKES_STATIC_CACHE)
    return overridden or masks_the_whole_reservation(model)


def masks_the_whole_reservation(model: Any) -> bool:
    """Whether `generate()` makes masks of a model for all slots of a static cache, in eager code as well."""
    return bool(model.config.model_type == "bloom" and TRANSFORMERS < BLOOM_MASKS_WHAT_IS_THERE)
