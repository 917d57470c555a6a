"""The layers of a model, as its config describes them to the caches of the installed version of transformers."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers.cache_utils as upstream
from packaging.version import Version
from torch import nn

# Transformers 5 spells it PreTrainedConfig, and keeps this name as well.
from transformers import PretrainedConfig

from kvlayers.errors import ConfigError
from kvlayers.upstream import model_types
from kvlayers.upstream.compat import (
    HAS_LINEAR_LAYERS,
    INDEXERS_DEPEND_ON_CHUNKS,
    LAYER_CLASSES_TAKE_CONFIG,
    STATES_BY_INDEX,
    TRANSFORMERS,
)
from kvlayers.upstream.model_types import decoder_config, listed_per_layer

INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""The layer type with an indexer, by the names of all versions."""


@dataclass(frozen=True)
class LayerSpec:
    """What a model config says about one layer.

    Attributes:
        layer_type: the type, by the name that transformers has for it.
        options: what the layer of a cache must know, as arguments of transformers' own layers.
        index: index of the layer in the model. Layers that a model runs again (Dory) have further ones in the cache.
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
"""Model types that need, or once needed, their own class of cache, and the version since which they take other caches
(`None` for not yet)."""

MODELS_WITH_OWN_CACHE = tuple(
    model_type for model_type, since in TAKES_CACHES_SINCE.items() if since is None or since > TRANSFORMERS
)
"""The types among them that need their own class of cache in this version, so that no other cache works."""


def layer_specs(config: object) -> list[LayerSpec]:
    """One spec for each layer that has a cache, in order.

    Raises:
        ConfigError: `config` is not a model config, or lacks a field that describes how its layers attend.
    """
    decoder = decoder_config(config)
    if decoder.model_type in MODELS_WITH_OWN_CACHE:
        since = TAKES_CACHES_SINCE[decoder.model_type]
        newer = "" if since is None else f", or use transformers {since} or newer"
        raise ConfigError(
            f"`config` must be of a model whose cache holds all of its states, got one of type '{decoder.model_type}': "
            f"on transformers {TRANSFORMERS} such models make a cache of their own: leave it to generate(){newer}."
        )
    try:
        if getattr(decoder, "layer_types", None) is not None:
            listed_per_layer(decoder, "layer_types")
        layer_types, options = _LAYER_TYPES_OF(decoder)
    except ConfigError:
        raise
    # Before 5.0, a config may have a word in the place of a number. Since 5.23, lists of layers that share keys and
    # values are compared with one another.
    except (AttributeError, TypeError, ValueError, IndexError) as wrong:
        raise ConfigError(
            "`config` must be one that describes its layers (num_hidden_layers, and layer_types, sliding_window or "
            f"attention_chunk_size if layers differ), got a {type(decoder).__name__} in which {wrong}: pass the config "
            "of the model itself, or make the cache without a config."
        ) from wrong
    options_of = options if isinstance(options, list) else [options] * len(layer_types)
    shared = {"config": decoder} if LAYER_CLASSES_TAKE_CONFIG else {}
    specs = [
        LayerSpec(
            layer_type,
            # In versions with one dict for all layers, it has the window of other ones.
            {name: own[name] for name in own if name != "sliding_window" or layer_type not in _WITHOUT_WINDOW} | shared,
            index,
        )
        # A config may list more layers than the model has.
        for index, (layer_type, own) in enumerate(
            zip(layer_types[: decoder.num_hidden_layers], options_of, strict=False)
        )
    ]
    # The loops of Dory behind the first one hold states of their own, behind those of all layers.
    if vars(decoder).get("recurrent_kv_cache_mode") == "per_loop":
        first = decoder.n_input_layers
        specs += specs[first : first + decoder.n_recurrent_layers] * (decoder.n_recurrent_loops - 1)
    return specs


_WITHOUT_WINDOW = ("full_attention", "linear_attention", "conv", "hybrid")
"""Layer types that attend to every token, or to none."""


def layer_configs(config: object) -> list[PretrainedConfig]:
    """The config of each layer of the decoder. Fields that differ between layers are single numbers in it."""
    decoder = decoder_config(config)
    # Since 5.14, a config can have other values for single layers.
    if STATES_BY_INDEX:
        return list(decoder.per_layer_config)
    return [decoder] * decoder.num_hidden_layers


def _described_layers(decoder: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The layer type of each layer and its options, from the config of an older version, in the names of today.

    Fields are read as attributes, since configs may map them to other names.
    """
    sliding_window = getattr(decoder, "sliding_window", None)
    chunk = getattr(decoder, "attention_chunk_size", None)
    found = getattr(decoder, "layer_types", None)
    if found is None:
        only_type = "full_attention" if sliding_window is chunk is None else "sliding_attention"
        found = [only_type] * decoder.num_hidden_layers
    # The last layers of some models read what earlier layers hold, unless all layers would.
    own_states = decoder.num_hidden_layers - (getattr(decoder, "num_kv_shared_layers", None) or 0)
    found = found[: own_states if own_states > 0 else decoder.num_hidden_layers]
    layer_types = [_OLD_LAYER_TYPES.get(layer_type, layer_type) for layer_type in found]
    window = {"sliding_window": sliding_window or chunk}
    options = [window if layer_type in ("sliding_attention", "chunked_attention") else {} for layer_type in layer_types]
    return layer_types, options


_OLD_LAYER_TYPES = {"attention": "full_attention", **dict.fromkeys(("mamba", "moe", "mlp"), "linear_attention")}
"""Layer types of before 5.14 in today's names. A layer that holds nothing is a recurrent layer that stays empty."""

# From 5.19 on, options come as one dict per layer if layers differ; before, as one dict for all.
_LAYER_TYPES_OF = upstream.get_layer_types_and_kwargs if STATES_BY_INDEX else _described_layers


def upstream_layer(spec: LayerSpec, max_cache_len: int | None = None) -> Any:
    """transformers' own layer for a type that kvlayers does not have; a static layer if `max_cache_len` is given.

    Raises:
        ConfigError: transformers does not know the type either.
    """
    makers = _layer_makers(spec, max_cache_len)
    if spec.layer_type not in makers:
        raise ConfigError(
            f"`layer_types` of the config must be types that transformers {TRANSFORMERS} has a cache for "
            f"({', '.join(sorted(makers))}), got '{spec.layer_type}': import the module of the model that defines it "
            "first, or leave the cache to generate() if the model makes its own."
        )
    return makers[spec.layer_type]()


def _layer_makers(spec: LayerSpec, max_cache_len: int | None) -> dict[str, Callable[[], Any]]:
    """For each layer type that transformers has a class for, what makes a layer of it with the options of a spec."""
    is_static = max_cache_len is not None
    size = {"max_cache_len": max_cache_len} if is_static else {}
    if STATES_BY_INDEX:
        classes = upstream.STATIC_LAYER_TYPE_MAPPING if is_static else upstream.DYNAMIC_LAYER_TYPE_MAPPING
        wrong = INDEXED if is_static and INDEXERS_DEPEND_ON_CHUNKS else ()
        return {
            name: functools.partial(layer_class, **size, **spec.options)
            for name, layer_class in classes.items()
            if name not in wrong
        }
    makers: dict[str, Callable[[], Any]] = {}
    if HAS_LINEAR_LAYERS:
        makers = {
            **dict.fromkeys(("linear_attention", "conv"), upstream.LinearAttentionLayer),
            "hybrid": upstream.LinearAttentionAndFullAttentionLayer,
        }
    if is_static and Version("5.12") <= TRANSFORMERS:
        # Besides the static layers of full and sliding attention, in 5.12 and 5.13.
        classes = upstream.LAYER_TYPE_STATIC_CACHE_MAPPING
        makers |= {name: functools.partial(layer_class, **size) for name, layer_class in classes.items()}
    if LAYER_CLASSES_TAKE_CONFIG and not is_static:
        config, classes = spec.options["config"], upstream.LAYER_TYPE_CACHE_MAPPING
        makers |= {name: functools.partial(layer_class, config) for name, layer_class in classes.items()}
    return makers


def layer_devices(model: Any) -> tuple[torch.device, ...]:
    """The device on which each layer of the decoder is computed; empty if all are on the model's device.

    Args:
        model: a model, which accelerate may have spread over devices (`device_map`), or its config.

    Weights that accelerate brings from elsewhere for each forward pass are on no device in between. Their layers count
    as layers of the model's device.
    """
    if not isinstance(model, nn.Module) or len(vars(model).get("hf_device_map", ())) < 2:
        return ()
    device, count = model_device(model), model_types.decoder_config(model).num_hidden_layers
    parts = model.get_decoder().modules()  # type: ignore[operator]
    lists = (part for part in parts if isinstance(part, nn.ModuleList))
    layers: Iterable[nn.Module] = next((layers for layers in lists if len(layers) == count), ())
    devices = tuple(_device(layer, device) for layer in layers)
    return devices if set(devices) - {device} else ()


def model_device(model: Any) -> torch.device:
    """The device of a model, also if accelerate keeps its first weights on disk, which are on no device."""
    device: torch.device = model.device
    return _device(model, device) if device.type == "meta" else device


def _device(layer: nn.Module, otherwise: torch.device) -> torch.device:
    devices = (weight.device for weight in layer.parameters())
    return next((device for device in devices if device.type != "meta"), otherwise)
