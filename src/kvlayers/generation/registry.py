"""Caches by name: who makes the cache that `cache_implementation="..."` asks for."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import transformers
from transformers import PretrainedConfig

from kvlayers.caches.aliases import (
    HybridCache,
    HybridChunkedCache,
    OffloadedCache,
    OffloadedStaticCache,
    SlidingWindowCache,
)
from kvlayers.caches.base import Cache
from kvlayers.caches.dynamic import DynamicCache
from kvlayers.caches.encoder_decoder import EncoderDecoderCache
from kvlayers.caches.from_config import every_token_layers
from kvlayers.caches.quantized import QuantizedCache
from kvlayers.caches.sink import SinkCache, left_padding_of
from kvlayers.caches.static import StaticCache
from kvlayers.errors import OptionError, RegistryError
from kvlayers.upstream import model_types
from kvlayers.utils import late
from kvlayers.utils.options import checked_device, checked_dtype
from kvlayers.utils.registry import Registry
from kvlayers.utils.units import tokens

ENTRY_POINT_GROUP = "kvlayers.caches"
"""Entry points in this group are factories that other packages offer, under the entry point's name."""


@dataclass(frozen=True)
class CacheRequest:
    """What a factory is told of the cache that is wanted.

    Attributes:
        config: config of the model.
        options: what the user passed as `cache_config`, or to `make_cache`.
        batch_size: sequences side by side, beams included, where known.
        length_hint: the most tokens that are expected, where known.
        device: device of the model, where known.
        dtype: dtype of the model, where known.
        encoder_length: tokens of the encoder's output, where there is an encoder and that is known.
        attention_mask: `[batch, tokens]` of the prompt, 0 for padding, where known.
    """

    config: PretrainedConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    length_hint: int | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    encoder_length: int | None = None
    attention_mask: torch.Tensor | None = None


CacheFactory = Callable[[CacheRequest], transformers.Cache]
Factory = TypeVar("Factory", bound=CacheFactory)

_factories: Registry[CacheFactory] = Registry("cache", ENTRY_POINT_GROUP, "unregister")
_listeners: list[Callable[[], None]] = []


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorator that makes a factory, `(request) -> Cache`, the maker of the caches called `name`.

    Raises:
        RegistryError: the name is empty or taken.

    Example:
        >>> import kvlayers
        >>> @kvlayers.register("roomy")
        ... def roomy(request):
        ...     return kvlayers.StaticCache(request.config, max_cache_len=4096, **request.options)
        >>> "roomy" in kvlayers.cache_names()
        True
        >>> kvlayers.unregister("roomy")
    """
    _factories.check_free(name)

    def keep(factory: Factory) -> Factory:
        _factories.add(name, factory)
        _tell_listeners()
        return factory

    return keep


def unregister(name: str) -> None:
    """Forget a name.

    Raises:
        RegistryError: there is no such name.
    """
    if not _factories.remove(name):
        raise unknown_name(name)
    _tell_listeners()


def cache_names() -> list[str]:
    """Every name that `make_cache` knows, those of other packages' entry points included."""
    return _factories.names()


def is_registered(name: str) -> bool:
    """Whether `make_cache` knows a name."""
    return name in _factories


def on_change(listener: Callable[[], None]) -> None:
    """Call `listener` whenever a name comes or goes."""
    _listeners.append(listener)


def make_cache(
    name: str,
    model_or_config: object,
    *,
    batch_size: int | None = None,
    length_hint: int | str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> transformers.Cache:
    """The cache called `name`, for a model.

    Args:
        name: one of `cache_names()`.
        model_or_config: the model that will use the cache, or its config.
        batch_size: sequences side by side, where known. (A static cache reserves for `max_batch_size`, an option.)
        length_hint: the most tokens that are expected, where known, such as 4096 or "4k". A static cache reserves so
            many.
        device: device of the model, where known.
        dtype: dtype of the states, or its name, where known.
        options: options of that cache, such as `max_cache_len`.

    Raises:
        RegistryError: there is no such name.
        OptionError: the cache has no such option, or needs one that is not given.
        ConfigError: the model's config does not describe its layers.

    Example:
        >>> import kvlayers, transformers
        >>> config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=4096)
        >>> kvlayers.make_cache("dynamic", config)
        DynamicCache(2 x SlidingLayer, 0 tokens, 0 B)
    """
    request = CacheRequest(
        model_types.config_of(model_or_config),
        options,
        batch_size,
        None if length_hint is None else tokens(length_hint, "length_hint"),
        checked_device(device) if isinstance(device, str) else device,
        None if dtype is None else checked_dtype(dtype),
    )
    return cache_for(name, request)


def cache_for(name: str, request: CacheRequest) -> transformers.Cache:
    """The cache called `name` that a request describes. Raises as `make_cache`."""
    options = request.options
    if not isinstance(options, Mapping) or "config" in options or not all(isinstance(key, str) for key in options):
        raise OptionError(
            f"expected the options of a cache by their names, without the config of the model, but saw {options!r}."
        )
    cache = _factory(name)(request)
    if not isinstance(cache, transformers.Cache):
        raise RegistryError(
            f"expected the factory of '{name}' to return a cache, but saw a {type(cache).__name__}: correct the "
            "factory."
        )
    if request.config.is_encoder_decoder and not isinstance(cache, transformers.EncoderDecoderCache):
        if isinstance(cache, Cache):
            return EncoderDecoderCache(cache, cache.for_cross_attention(request.encoder_length))
        return transformers.EncoderDecoderCache(cache, DynamicCache())
    return cache


def name_instead_of_cache(argument: str, arguments: dict[str, Any]) -> None:
    """Let a name that was passed to `generate()` in the place of a cache be its `cache_implementation`.

    Args:
        argument: the argument for a cache.
        arguments: of the call, which are changed.

    Raises:
        OptionError: there is another name in `cache_implementation`.
    """
    name = arguments.get(argument)
    if not isinstance(name, str):
        return
    other = arguments.get("cache_implementation")
    if other not in (None, name):
        raise OptionError(
            f"expected one cache, but saw {argument}={name!r} and cache_implementation={other!r}: pass one of them."
        )
    arguments["cache_implementation"] = name
    del arguments[argument]


def _factory(name: str) -> CacheFactory:
    factory = _factories.get(name)
    if factory is None:
        raise unknown_name(name)
    return factory


def unknown_name(name: object) -> RegistryError:
    """The error for a name that nobody registered, which lists those that there are."""
    near = difflib.get_close_matches(str(name).lower(), cache_names(), n=1)
    suggestion = f": did you mean {near[0]!r}?" if near else "."
    return RegistryError(f"expected the name of a cache ({', '.join(cache_names())}), but saw {name!r}{suggestion}")


def _tell_listeners() -> None:
    for listener in _listeners:
        listener()


def _sized(request: CacheRequest) -> dict[str, Any]:
    """Options for a static cache, whose size is the length hint unless it is given."""
    return {"max_cache_len": request.length_hint, **request.options}


@register("dynamic")
def _dynamic(request: CacheRequest) -> DynamicCache:
    return DynamicCache(config=request.config, **{"length_hint": request.length_hint, **request.options})


@register("dynamic_full")
def _dynamic_full(request: CacheRequest) -> Cache:
    """A cache that forgets nothing, whatever the model's windows, as the name meant until transformers 5.14."""
    options = {"length_hint": request.length_hint, "checkpoints": None, **request.options}
    unknown = sorted(options.keys() - {"length_hint", "checkpoints"})
    if unknown:
        raise OptionError(f"'dynamic_full' takes the options length_hint and checkpoints, but was given {unknown}.")
    hint = options["length_hint"]
    options["length_hint"] = None if hint is None else tokens(hint, "length_hint")
    return Cache(layers=every_token_layers(request.config, **options))


@register("static")
def _static(request: CacheRequest) -> StaticCache:
    return StaticCache(request.config, **_sized(request))


@register("sliding_window")
def _sliding_window(request: CacheRequest) -> SlidingWindowCache:
    return SlidingWindowCache(request.config, **_sized(request))


@register("hybrid")
def _hybrid(request: CacheRequest) -> HybridCache:
    return HybridCache(request.config, **_sized(request))


@register("hybrid_chunked")
def _hybrid_chunked(request: CacheRequest) -> HybridChunkedCache:
    return HybridChunkedCache(request.config, **_sized(request))


def _quantized_cache(request: CacheRequest, **preset: Any) -> QuantizedCache:
    for option, meant in preset.items():
        if request.options.get(option, meant) != meant:
            raise OptionError(
                f"expected {option}={meant!r}, as the name of the cache says, but saw {request.options[option]!r}: use "
                "the name 'quantized', or leave the option out."
            )
    return QuantizedCache(**{"length_hint": request.length_hint, **preset, **request.options, "config": request.config})


@register("quantized")
def _quantized(request: CacheRequest) -> QuantizedCache:
    return _quantized_cache(request)


@register("offloaded")
def _offloaded(request: CacheRequest) -> OffloadedCache:
    return OffloadedCache(config=request.config, **{"length_hint": request.length_hint, **request.options})


@register("offloaded_static")
def _offloaded_static(request: CacheRequest) -> OffloadedStaticCache:
    return OffloadedStaticCache(request.config, **_sized(request))


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
"""Tokens that a sink cache holds where none are asked for, as in transformers 4."""


@register("sink")
def _sink(request: CacheRequest) -> SinkCache:
    found = {} if request.attention_mask is None else {"left_padding": left_padding_of(request.attention_mask)}
    return SinkCache(**{"window_length": SINK_WINDOW, **found, **request.options, "config": request.config})


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
    # By its name, since planning makes caches by their names, and so is above this room.
    chosen: transformers.Cache = late.function("chosen_cache")(request)
    return chosen
