"""Empty caches of transformers that are passed to models: they get layers of kvlayers, and stay the same otherwise.

The cache remains the same object of the same class. Its methods are those of transformers and call its layers, so only
the layers need to be replaced. A cache that holds states is left alone. So are caches and layers that may behave
differently: subclasses, offloaded and quantized caches, and layer types that kvlayers does not have.
"""

import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import transformers
from transformers import cache_utils as upstream

from kvlayers.caches.from_config import fixed_layers, iter_fixed_layers, share_mask_extents
from kvlayers.generation.patching import ScopedValue
from kvlayers.layers import (
    DynamicLayer,
    LayerOperations,
    LinearAttentionLayer,
    SlidingLayer,
    StaticLayer,
    StaticSlidingLayer,
    TransformersLayer,
)
from kvlayers.upstream import model_layers, model_types
from kvlayers.upstream.compat import MODELS_PASS_COLUMNS

logger = logging.getLogger(__name__)

REPLACE = ScopedValue("replace_empty_caches", True)
"""The option `replace_empty_caches` of `install()`."""

_WITH_LAYERS = frozenset({transformers.DynamicCache, transformers.StaticCache})

CLASSES = _WITH_LAYERS | {transformers.EncoderDecoderCache}
"""Classes of caches that get layers of kvlayers. Their subclasses do not."""

_logged: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Filled caches that the log has mentioned."""


def replace_layers(cache: Any, model: Any) -> None:
    """Give a cache layers of kvlayers if it is empty.

    Args:
        cache: a cache of one of `CLASSES`. The two parts of a pair are treated separately.
        model: the model that the cache was passed to.
    """
    is_pair = type(cache) is transformers.EncoderDecoderCache
    for part in (cache.self_attention_cache, cache.cross_attention_cache) if is_pair else (cache,):
        if type(part) in _WITH_LAYERS:
            _replace_layers(part, model)


def leave_on_host(cache: Any, model: Any) -> None:
    """Turn off the offloading of a cache that transformers has made for a model on a CPU.

    Its states are on the host in any case, and transformers' offloading raises where there is no CUDA device.
    """
    if type(cache) in _WITH_LAYERS and cache.offloading and model.device.type == "cpu":
        cache.offloading = False


def _replace_layers(cache: Any, model: Any) -> None:
    layers = cache.layers
    if layers and isinstance(layers[0], LayerOperations):
        if type(cache) is transformers.StaticCache and not _is_linked(layers):
            _link(layers)
        return
    if cache.offloading or not REPLACE.get():
        return
    if not all(TransformersLayer(layer).is_empty for layer in layers):
        if cache not in _logged:
            _logged.add(cache)
            logger.info(
                "A %s keeps its layers of transformers, as it holds states: only empty caches get kvlayers' layers.",
                type(cache).__name__,
            )
    elif layers:
        if not _needs_transformers_layers(cache, model):
            layers[:] = _kvlayers_layers(layers, model)
            _link(layers)
    elif cache.layer_class_to_replicate is upstream.DynamicLayer:
        # A cache without a config holds every token in every layer, and still does so now.
        cache.layer_class_to_replicate = DynamicLayer


def _needs_transformers_layers(cache: Any, model: Any) -> bool:
    """Whether a model keeps states in its own cache, or attends to slots of a static cache that hold no token."""
    decoder = model_types.decoder_config(model.config)
    if type(cache) is transformers.StaticCache and model_types.counts_on_the_whole_reservation(decoder):
        return True
    return decoder.model_type in model_layers.MODELS_WITH_OWN_CACHE


def _kvlayers_layers(layers: list[Any], model: Any) -> list[Any]:
    """Layers of kvlayers in the place of `layers`. Layers of other types are returned as they are."""
    reserved = [layer.max_cache_len for layer in layers if type(layer) is upstream.StaticLayer]

    def static_window(layer: Any) -> StaticSlidingLayer:
        # transformers has capped the window at the reservation. It accepts more tokens unless another layer refuses.
        return StaticSlidingLayer(
            max_cache_len=max(reserved, default=layer.max_cache_len),
            sliding_window=layer.max_cache_len,
            token_limit=max(reserved, default=None),
        )

    makers: dict[type, Callable[[Any], Any]] = {
        upstream.DynamicLayer: lambda layer: DynamicLayer(),
        upstream.DynamicSlidingWindowLayer: lambda layer: SlidingLayer(layer.sliding_window),
        upstream.StaticLayer: lambda layer: StaticLayer(layer.max_cache_len),
        upstream.StaticSlidingWindowLayer: static_window,
    }
    # If a scan starts from zero, kvlayers' layers refuse several tokens at once, which transformers' methods pass.
    if MODELS_PASS_COLUMNS and model_types.tokens_at_once(model.config) is None:
        makers[upstream.LinearAttentionLayer] = lambda layer: LinearAttentionLayer(layer.number_of_states)
    return [makers[type(layer)](layer) if type(layer) in makers else layer for layer in layers]


def _link(layers: list[Any]) -> None:
    """Let the static layers of a cache agree on what attention reads, as in a `kvlayers.StaticCache`.

    A mask is made by asking the first layer of a kind, which must then ask the others to make room.
    """
    share_mask_extents(layers)
    for is_sliding in (False, True):
        same_kind = [layer for layer in fixed_layers(layers) if layer.is_sliding == is_sliding]
        if same_kind:
            same_kind[0].followers = tuple(same_kind[1:])


def _is_linked(layers: list[Any]) -> bool:
    """Whether static layers know one another. In a copy of the cache, which transformers makes, they do not."""
    # At each forward pass, so only as many layers are looked at as tell.
    modes = [layer.reserved.mask_extent.mode for layer in itertools.islice(iter_fixed_layers(layers), 2)]
    return all(mode is modes[0] for mode in modes)
