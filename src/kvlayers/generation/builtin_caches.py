"""The caches that kvlayers registers under a name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
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
from kvlayers.generation.registry import CacheFactory, CacheRequest, register
from kvlayers.layers import Recall
from kvlayers.utils import late
from kvlayers.utils.units import tokens


def _factory(
    kind: Callable[..., Cache],
    hint: str = "",
    defaults: Mapping[str, Any] = MappingProxyType({}),
    fixed: Mapping[str, Any] = MappingProxyType({}),
    general: str = "",
) -> CacheFactory:
    """A factory: which class makes the cache, and with which options.

    Args:
        kind: the class.
        hint: the option that is the length hint unless the request says otherwise; "" for a class without one.
        defaults: options that the request may change.
        fixed: options that the name says, so that the request must not say otherwise.
        general: the name of a cache of this class whose options are all free.
    """

    def make(request: CacheRequest) -> Cache:
        for option, value in fixed.items():
            if request.options.get(option, value) != value:
                raise OptionError(
                    f"`{option}` is {value!r} for a cache of this name, got {request.options[option]!r}: use the name "
                    f"{general!r}, or leave the option out."
                )
        options = {**defaults, **fixed}
        if hint:
            options[hint] = request.length_hint
        if kind in (SinkCache, EvictingCache) and request.attention_mask is not None:
            options["left_padding"] = left_padding_of(request.attention_mask)
        return kind(**{**options, **request.options, "config": request.config})

    return make


def _quantized(**fixed: Any) -> CacheFactory:
    return _factory(QuantizedCache, "length_hint", fixed=fixed, general="quantized")


SINK_WINDOW = 256
"""The window length of a sink cache if the options give none, as in transformers 4."""

_OFFLOADED_STATIC = _factory(OffloadedStaticCache, "max_cache_len")

_BUILTINS: dict[str, CacheFactory] = {
    "dynamic": _factory(DynamicCache, "length_hint"),
    "recall": _factory(DynamicCache, "length_hint", {"recall": Recall()}),
    "static": _factory(StaticCache, "max_cache_len"),
    "sliding_window": _factory(SlidingWindowCache, "max_cache_len"),
    "hybrid": _factory(HybridCache, "max_cache_len"),
    "hybrid_chunked": _factory(HybridChunkedCache, "max_cache_len"),
    "offloaded": _factory(OffloadedCache, "length_hint"),
    "offloaded_static": _OFFLOADED_STATIC,
    "offloaded_hybrid": _OFFLOADED_STATIC,
    "offloaded_hybrid_chunked": _OFFLOADED_STATIC,
    "sink": _factory(SinkCache, defaults={"window_length": SINK_WINDOW}),
    "evicting": _factory(EvictingCache),
    # A rule of another package has no such name, which might be that of a cache: it is an option of "evicting".
    **{rule: _factory(EvictingCache, fixed={"rule": rule}, general="evicting") for rule in BUILTIN_RULES},
    "quantized": _factory(QuantizedCache, "length_hint"),
    "offloaded_quantized": _quantized(offloading=True),
    "fp8": _quantized(backend="fp8"),
    "int8": _quantized(nbits=8),
    "int4": _quantized(nbits=4),
    "int2": _quantized(nbits=2),
}

for _name, _made_by in _BUILTINS.items():
    register(_name)(_made_by)


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


@register("auto")
def _auto(request: CacheRequest) -> transformers.Cache:
    # Called by name, since planning makes caches by name, and so depends on this module.
    chosen: transformers.Cache = late.function("chosen_cache")(request)
    return chosen
