"""The kinds of layers and caches that are made from what a file says: two tables, and no name leads elsewhere."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlayers.caches.aliases import (
    HQQQuantizedCache,
    HybridCache,
    HybridChunkedCache,
    HybridMambaAttentionDynamicCache,
    MambaCache,
    OffloadedCache,
    OffloadedStaticCache,
    QuantoQuantizedCache,
    SlidingWindowCache,
)
from kvlayers.caches.base import Cache
from kvlayers.caches.dynamic import DynamicCache
from kvlayers.caches.from_config import Reservation, dynamic_layers, quantized_layers, sink_layers, static_layers
from kvlayers.caches.quantized import QuantizedCache, bare_layers
from kvlayers.caches.sink import SinkCache
from kvlayers.caches.static import StaticCache
from kvlayers.errors import CacheFileError
from kvlayers.layers import DynamicLayer, QuantizedLayer, SinkLayer, SlidingLayer, StaticLayer, StaticSlidingLayer
from kvlayers.layers.quantized import quantized_layer
from kvlayers.layers.sink import SinkConfig
from kvlayers.layers.sinks import check_sinks, padding_of
from kvlayers.layers.sliding import window_room
from kvlayers.persistence.format import CacheRecord, LayerRecord, Options
from kvlayers.rope.rotary import Rotary
from kvlayers.stores import Buckets, Quantization, QuantizedStore, TokenStore
from kvlayers.stores.layerwise_quantization import quantization_of_layers

Layers = list[Any] | None


@dataclass(frozen=True)
class Made:
    """What layers are made from beside their own records.

    Attributes:
        options: those of the cache.
        rotaries: how keys are rotated, by fingerprint.
        config: config of the model, where it was given.
    """

    options: Options
    rotaries: Mapping[str, Rotary] = field(default_factory=dict)
    config: object | None = None

    @property
    def reservation(self) -> Reservation:
        """What the layers of a static cache reserve."""
        buckets = self.options["buckets"]
        return Reservation(
            self.options["max_cache_len"],
            self.options["max_batch_size"],
            None if buckets is None else Buckets(**buckets),
            self.options["grow"],
        )

    def quantization(self) -> Quantization | None:
        """How the cache quantizes, where it does."""
        facts = self.options["quantization"]
        return None if facts is None else Quantization(**facts)

    def rotary(self, fingerprint: object) -> Rotary | None:
        """The rotation of that fingerprint."""
        return None if fingerprint is None else self.rotaries[str(fingerprint)]


def _quantization(record: LayerRecord) -> Quantization | None:
    if "backend" not in record.facts:
        return None
    options: dict[str, Any] = {name: record.facts[name] for name in Quantization().facts()}
    return Quantization(**options)


def _store(record: LayerRecord, length_hint: int | None = None) -> TokenStore | None:
    quantization = _quantization(record)
    return None if quantization is None else QuantizedStore(quantization, length_hint)


def _dynamic(record: LayerRecord, made: Made) -> DynamicLayer:
    return DynamicLayer(store=_store(record))


def _quantized(record: LayerRecord, made: Made) -> QuantizedLayer:
    return quantized_layer(_quantization(record))


def _sliding(record: LayerRecord, made: Made) -> SlidingLayer:
    window = _number(record, "sliding_window")
    return SlidingLayer(window, _store(record, window_room(window)))


def _sink(record: LayerRecord, made: Made) -> SinkLayer:
    window, sinks = _number(record, "window_length"), _number(record, "num_sink_tokens")
    return SinkLayer(window, sinks, made.rotary(record.facts["rotary"]), _store(record, window_room(window)))


def _reserved(record: LayerRecord, made: Made) -> dict[str, Any]:
    """What a static layer reserves: its own count of tokens, or, where it grows, that which it began with."""
    reserved = made.reservation.options() if "max_cache_len" in made.options else {"grow": False}
    own = record.facts["max_cache_len"]
    return reserved if own is None else {**reserved, "max_cache_len": own}


def _static(record: LayerRecord, made: Made) -> StaticLayer:
    return StaticLayer(**_reserved(record, made))


def _static_sliding(record: LayerRecord, made: Made) -> StaticSlidingLayer:
    limit: Any = record.facts["token_limit"]
    window = _number(record, "sliding_window")
    return StaticSlidingLayer(sliding_window=window, token_limit=limit, **_reserved(record, made))


def _number(record: LayerRecord, name: str) -> Any:
    return record.facts[name]


LAYERS: dict[str, Callable[[LayerRecord, Made], Any]] = {
    "DynamicLayer": _dynamic,
    "QuantizedLayer": _quantized,
    "SinkLayer": _sink,
    "SlidingLayer": _sliding,
    "StaticLayer": _static,
    "StaticSlidingLayer": _static_sliding,
}
"""How a layer of each kind is made. Layers with recurrent states, and those of transformers, need a config."""


PREFIXED = ("DynamicLayer", "StaticLayer")
"""Kinds whose first tokens lie apart in a file from those that follow, unless they are packed."""


def _bare(cache: Cache, made: Made, layers: Layers) -> Callable[[], Any] | None:
    return None


def _growing(cache: Cache, made: Made, layers: Layers) -> Callable[[], Any] | None:
    return DynamicLayer


def _reserving(cache: Any, made: Made, layers: Layers) -> Callable[[], Any] | None:
    cache._reservation = made.reservation
    cache._grows = made.reservation.grow
    return None


def _quantizing(cache: Any, made: Made, layers: Layers) -> Callable[[], Any] | None:
    cache.quantization = quantization_of_layers(made.options["quantization"])
    return bare_layers(cache.quantization)[1]


def _sinking(cache: Any, made: Made, layers: Layers) -> Callable[[], Any] | None:
    cache.window_length, cache.num_sink_tokens = made.options["window_length"], made.options["num_sink_tokens"]
    check_sinks(cache.window_length, cache.num_sink_tokens)
    cache.quantization = made.quantization()
    cache._padding = padding_of(made.options["left_padding"])
    cache._rotary = made.rotary(made.options["rotary"])
    make_layer: Callable[[], Any] = cache._layer_without_config
    return make_layer


@dataclass(frozen=True)
class CacheKind:
    """A class of caches: how one is made ready for its layers, and which layers a config gives it.

    Attributes:
        cls: the class.
        prepare: sets what the class has beside its layers; returns what makes a layer when one more is used.
        from_config: the layers of a cache for a model.
    """

    cls: type[Cache]
    prepare: Callable[[Any, Made, Layers], Callable[[], Any] | None]
    from_config: Callable[[CacheRecord, Made], list[Any]]

    def make(self, made: Made, layers: list[Any]) -> Cache:
        """An empty cache with these layers, and with more where it makes them as they are needed."""
        cache = self.cls.__new__(self.cls)
        make_layer = self.prepare(cache, made, layers)
        grows = made.options["grows"] and make_layer is not None
        placement = made.options["offloading"], made.options["only_non_sliding"]
        Cache.__init__(cache, None if grows else layers, make_layer if grows else None, *placement)
        if grows:
            cache.layers = cache.layers_for(len(layers))
        if isinstance(cache, StaticCache):
            cache.compiled = bool(made.options["compiled"]) and torch.accelerator.is_available()
        return cache


def _dynamic_for(record: CacheRecord, made: Made) -> list[Any]:
    return dynamic_layers(made.config)


def _static_for(record: CacheRecord, made: Made) -> list[Any]:
    return static_layers(made.config, made.reservation)


def _quantized_for(record: CacheRecord, made: Made) -> list[Any]:
    windows = any(layer.kind == "SlidingLayer" and "backend" in layer.facts for layer in record.layers)
    return quantized_layers(made.config, quantization_of_layers(made.options["quantization"]), windows)


def _sinks_for(record: CacheRecord, made: Made) -> list[Any]:
    window, sinks = made.options["window_length"], made.options["num_sink_tokens"]
    return sink_layers(made.config, SinkConfig(window, sinks, made.quantization()), made.rotary(made.options["rotary"]))


def _kinds(prepare: Any, from_config: Any, *classes: type[Cache]) -> dict[str, CacheKind]:
    return {cls.__name__: CacheKind(cls, prepare, from_config) for cls in classes}


CACHES: dict[str, CacheKind] = {
    **_kinds(_bare, _dynamic_for, Cache),
    **_kinds(_growing, _dynamic_for, DynamicCache, OffloadedCache, MambaCache, HybridMambaAttentionDynamicCache),
    **_kinds(
        _reserving, _static_for, StaticCache, HybridCache, HybridChunkedCache, SlidingWindowCache, OffloadedStaticCache
    ),
    **_kinds(_quantizing, _quantized_for, QuantizedCache, QuantoQuantizedCache, HQQQuantizedCache),
    **_kinds(_sinking, _sinks_for, SinkCache),
}
"""The classes of caches that a file may be of; a pair is made of two of them."""


def check_remakeable(cache: Cache) -> None:
    """Raise `CacheFileError` where `load_cache` could not make a cache of this class, but only fill a given one."""
    if type(cache).__name__ not in CACHES:
        raise CacheFileError(
            f"expected a cache that can be made from a file ({', '.join(CACHES)}), but saw a {type(cache).__name__}: "
            "save it yourself, and load it with into=."
        )
