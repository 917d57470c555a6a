"""The caches that kvlayers registers under a name."""

from collections.abc import Mapping
from typing import Any

import transformers

from kvlayers.caches.aliases import (
    HybridCache,
    HybridChunkedCache,
    OffloadedCache,
    OffloadedStaticCache,
    SlidingWindowCache,
)
from kvlayers.caches.base import Cache
from kvlayers.caches.dynamic import DynamicCache
from kvlayers.caches.evicting import EvictingCache
from kvlayers.caches.from_config import every_token_layers
from kvlayers.caches.preparation import left_padding_of
from kvlayers.caches.quantized import QuantizedCache
from kvlayers.caches.sink import SinkCache
from kvlayers.caches.static import StaticCache
from kvlayers.errors import OptionError
from kvlayers.eviction import BUILTIN_RULES
from kvlayers.generation.registry import CacheRequest, register
from kvlayers.layers import Recall
from kvlayers.utils import late
from kvlayers.utils.units import tokens


def _static_options(request: CacheRequest) -> dict[str, Any]:
    """Options of a static cache, which reserves as many tokens as the length hint unless they say otherwise."""
    return {"max_cache_len": request.length_hint, **request.options}


@register("dynamic")
def _dynamic(request: CacheRequest) -> DynamicCache:
    return DynamicCache(config=request.config, **{"length_hint": request.length_hint, **request.options})


@register("recall")
def _recall(request: CacheRequest) -> DynamicCache:
    options = {"length_hint": request.length_hint, "recall": Recall(), **request.options}
    return DynamicCache(config=request.config, **options)


@register("dynamic_full")
def _dynamic_full(request: CacheRequest) -> Cache:
    """A cache that keeps every token, even if the model attends within windows, as in transformers before 5.14."""
    options = {"length_hint": request.length_hint, "checkpoints": None, **request.options}
    unknown = sorted(options.keys() - {"length_hint", "checkpoints"})
    if unknown:
        raise OptionError(f"the cache 'dynamic_full' takes the options length_hint and checkpoints, got {unknown}.")
    hint = options["length_hint"]
    options["length_hint"] = None if hint is None else tokens(hint, "length_hint")
    return Cache(layers=every_token_layers(request.config, **options))


@register("static")
def _static(request: CacheRequest) -> StaticCache:
    return StaticCache(request.config, **_static_options(request))


@register("sliding_window")
def _sliding_window(request: CacheRequest) -> SlidingWindowCache:
    return SlidingWindowCache(request.config, **_static_options(request))


@register("hybrid")
def _hybrid(request: CacheRequest) -> HybridCache:
    return HybridCache(request.config, **_static_options(request))


@register("hybrid_chunked")
def _hybrid_chunked(request: CacheRequest) -> HybridChunkedCache:
    return HybridChunkedCache(request.config, **_static_options(request))


def _check_preset(request: CacheRequest, preset: Mapping[str, Any], general: str) -> None:
    """Raise `OptionError` if an option has another value than the name of the cache says.

    Args:
        request: the request, with its options.
        preset: the options that the name says, with their values.
        general: the name of a cache of this kind with any options.
    """
    for option, value in preset.items():
        if request.options.get(option, value) != value:
            raise OptionError(
                f"`{option}` is {value!r} for a cache of this name, got {request.options[option]!r}: use the name "
                f"{general!r}, or leave the option out."
            )


def _quantized_cache(request: CacheRequest, **preset: Any) -> QuantizedCache:
    _check_preset(request, preset, "quantized")
    return QuantizedCache(**{"length_hint": request.length_hint, **preset, **request.options, "config": request.config})


@register("quantized")
def _quantized(request: CacheRequest) -> QuantizedCache:
    return _quantized_cache(request)


@register("offloaded")
def _offloaded(request: CacheRequest) -> OffloadedCache:
    return OffloadedCache(config=request.config, **{"length_hint": request.length_hint, **request.options})


@register("offloaded_static")
def _offloaded_static(request: CacheRequest) -> OffloadedStaticCache:
    return OffloadedStaticCache(request.config, **_static_options(request))


@register("offloaded_hybrid")
def _offloaded_hybrid(request: CacheRequest) -> OffloadedStaticCache:
    return _offloaded_static(request)


@register("offloaded_hybrid_chunked")
def _offloaded_hybrid_chunked(request: CacheRequest) -> OffloadedStaticCache:
    return _offloaded_static(request)


@register("offloaded_quantized")
def _offloaded_quantized(request: CacheRequest) -> QuantizedCache:
    return _quantized_cache(request, offloading=True)


SINK_WINDOW = 256
"""The window length of a sink cache if the options give none, as in transformers 4."""


@register("sink")
def _sink(request: CacheRequest) -> SinkCache:
    mask = request.attention_mask
    padding = {} if mask is None else {"left_padding": left_padding_of(mask)}
    return SinkCache(**{"window_length": SINK_WINDOW, **padding, **request.options, "config": request.config})


def _evicting_cache(request: CacheRequest, **preset: Any) -> EvictingCache:
    _check_preset(request, preset, "evicting")
    mask = request.attention_mask
    padding = {} if mask is None else {"left_padding": left_padding_of(mask)}
    return EvictingCache(**{**padding, **preset, **request.options, "config": request.config})


@register("evicting")
def _evicting(request: CacheRequest) -> EvictingCache:
    return _evicting_cache(request)


def _register_rule(name: str) -> None:
    """Register the caches whose tokens are evicted by a rule of kvlayers under the rule's name.

    A rule of another package has no such name, which might be that of a cache: it is an option of "evicting".
    """

    @register(name)
    def evicting_by_rule(request: CacheRequest) -> EvictingCache:
        return _evicting_cache(request, rule=name)


for _name in BUILTIN_RULES:
    _register_rule(_name)


@register("fp8")
def _fp8(request: CacheRequest) -> QuantizedCache:
    return _quantized_cache(request, backend="fp8")


@register("int8")
def _int8(request: CacheRequest) -> QuantizedCache:
    return _quantized_cache(request, nbits=8)


@register("int4")
def _int4(request: CacheRequest) -> QuantizedCache:
    return _quantized_cache(request, nbits=4)


@register("int2")
def _int2(request: CacheRequest) -> QuantizedCache:
    return _quantized_cache(request, nbits=2)


@register("auto")
def _auto(request: CacheRequest) -> transformers.Cache:
    # Called by name, since planning makes caches by name, and so depends on this module.
    chosen: transformers.Cache = late.function("chosen_cache")(request)
    return chosen
