"""Empty caches of transformers that models are given: they get layers of kvlayers, and stay what they are besides.

The cache is the same object of the same class. Its methods are those of transformers, which call its layers, so that
layers are all that is replaced. A cache that holds states is left alone, and so are caches and layers that may do
something of their own: subclasses, offloading, quantized caches, and layers that kvlayers has no kind for.
"""

import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import transformers
from transformers import cache_utils as upstream

from kvlayers.caches.from_config import share_readings
from kvlayers.generation import install_options
from kvlayers.layers import (
    DynamicLayer,
    LayerOperations,
    LinearAttentionLayer,
    SlidingLayer,
    StaticLayer,
    StaticSlidingLayer,
    TransformersLayer,
)
from kvlayers.upstream import compat, model_types

logger = logging.getLogger(__name__)

_WITH_LAYERS = frozenset({transformers.DynamicCache, transformers.StaticCache})

KINDS = _WITH_LAYERS | {transformers.EncoderDecoderCache}
"""Classes of caches that are looked at, without their subclasses."""

_left_alone: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Filled caches that were logged."""


def give_layers(cache: Any, model: Any) -> None:
    """Let a cache of one of `KINDS` have layers of kvlayers, if it is empty.

    Args:
        cache: the cache, or a pair of which each part is looked at.
        model: the model that was given it.
    """
    pair = type(cache) is transformers.EncoderDecoderCache
    for part in (cache.self_attention_cache, cache.cross_attention_cache) if pair else (cache,):
        if type(part) in _WITH_LAYERS:
            _give_layers(part, model)


def holds_layers_of_kvlayers(cache: Any) -> bool:
    """Whether a cache of one of `KINDS` has layers of kvlayers."""
    own = cache.self_attention_cache if type(cache) is transformers.EncoderDecoderCache else cache
    return type(own) in _WITH_LAYERS and any(isinstance(layer, LayerOperations) for layer in own.layers)


def _give_layers(cache: Any, model: Any) -> None:
    layers = cache.layers
    if layers and isinstance(layers[0], LayerOperations):
        if type(cache) is transformers.StaticCache and not _is_linked(layers):
            _link(layers)
        return
    if cache.offloading or not install_options.current().replace_empty_caches:
        return
    if not all(TransformersLayer(layer).is_empty for layer in layers):
        if cache not in _left_alone:
            _left_alone.add(cache)
            logger.info(
                "A %s keeps its layers of transformers, as it holds states: kvlayers gives its own to empty caches.",
                type(cache).__name__,
            )
    elif layers:
        if not _has_states_elsewhere(cache, model):
            layers[:] = _replaced(layers, model)
            _link(layers)
    elif cache.layer_class_to_replicate is upstream.DynamicLayer:
        # Without a config all layers hold every token, and so they do here.
        cache.layer_class_to_replicate = DynamicLayer


def _has_states_elsewhere(cache: Any, model: Any) -> bool:
    """Whether a model has states in a cache of its own, or attends to slots of a static cache without tokens."""
    decoder = model_types.decoder_config(model.config)
    if type(cache) is transformers.StaticCache and model_types.counts_on_the_whole_reservation(decoder):
        return True
    return decoder.model_type in compat.MAKE_THEIR_OWN_CACHES


def _replaced(layers: list[Any], model: Any) -> list[Any]:
    reserved = [layer.max_cache_len for layer in layers if type(layer) is upstream.StaticLayer]

    def static_window(layer: Any) -> StaticSlidingLayer:
        # transformers has reduced it to what is reserved, and goes on beyond that where no other layer refuses to.
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
    # Where a scan begins from zero, kvlayers' layers refuse tokens that transformers' methods would pass them at once.
    if compat.MODELS_PASS_COLUMNS and model_types.tokens_at_once(model.config) is None:
        makers[upstream.LinearAttentionLayer] = lambda layer: LinearAttentionLayer(layer.number_of_states)
    return [makers[type(layer)](layer) if type(layer) in makers else layer for layer in layers]


def _link(layers: list[Any]) -> None:
    """Let the static layers of a cache agree on what attention reads, as those of a `kvlayers.StaticCache` do.

    Masks are made by asking the first layer of a kind, which must ask the others to make room.
    """
    share_readings(layers)
    for kind in (StaticLayer, StaticSlidingLayer):
        of_kind = [layer for layer in layers if isinstance(layer, kind)]
        if of_kind:
            of_kind[0].followers = tuple(of_kind[1:])


def _is_linked(layers: list[Any]) -> bool:
    """Whether static layers know one another. Those of a copy of the cache, which nobody here makes, do not."""
    fixed = (layer for layer in layers if isinstance(layer, StaticLayer | StaticSlidingLayer))
    modes = [layer.reserved.reading.mode for layer in itertools.islice(fixed, 2)]
    return all(mode is modes[0] for mode in modes)
