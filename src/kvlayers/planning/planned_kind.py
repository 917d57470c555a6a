"""A cache that was made to be planned: by its name, through the registry, like any other, and never used."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlayers.caches.encoder_decoder import EncoderDecoderCache
from kvlayers.errors import OptionError
from kvlayers.generation.registry import CacheRequest, cache_for
from kvlayers.layers import SinkLayer, TokenLayer
from kvlayers.planning.cache_bytes import CacheBytes, cache_bytes
from kvlayers.planning.shapes import LayerShape
from kvlayers.planning.store_bytes import FOLLOWED, bits_of_packed
from kvlayers.stores import DenseStore, QuantizedStore, StaticStore

EXACT, ROUNDED, EVICTING = "exact", "rounded", "evicting"
"""What a kind does to the states: keeps those that the model attends to, keeps them in a few bits, or forgets some."""


@dataclass(frozen=True)
class PlannedKind:
    """What a name stands for, for one model.

    Attributes:
        name: of the cache.
        fidelity: `EXACT`, `ROUNDED` or `EVICTING`.
        bits: of a state in the layers that hold the least, scales and zeros included.
        cache: an empty cache, made with a length hint of `FOLLOWED`.
        shapes: of the layers of the model.
        encoder_length: tokens of the encoder's output, where there is one.
    """

    name: str
    fidelity: str
    bits: float
    cache: Any
    shapes: Sequence[LayerShape]
    encoder_length: int | None

    def bytes_for(self, tokens: int) -> CacheBytes:
        """Bytes of the cache when it is made for so many tokens and has seen them. Raises as `cache_bytes`."""
        return cache_bytes(self.cache, self.shapes, tokens, self.encoder_length)


def planned_kind(name: str, request: CacheRequest, shapes: Sequence[LayerShape]) -> PlannedKind:
    """The kind of a name.

    Raises:
        RegistryError: there is no such name.
        OptionError: it sizes its layers neither by the length hint nor by a number of its own.
        ConfigError, UnsupportedLayerError: there is no such cache for the model.
    """
    cache = cache_for(name, replace(request, length_hint=FOLLOWED))
    longer = cache_for(name, replace(request, length_hint=FOLLOWED + 1))
    for size, size_if_longer in zip(_sizes(cache), _sizes(longer), strict=True):
        if size != size_if_longer and (size, size_if_longer) != (FOLLOWED, FOLLOWED + 1):
            raise OptionError(
                f"expected '{name}' to size its layers by the length hint, or by a number of its own, but saw {size} "
                f"for {FOLLOWED} token and {size_if_longer} for {FOLLOWED + 1}: pass request.length_hint on as it is."
            )
    return PlannedKind(name, fidelity_of(cache), _bits(cache, shapes), cache, shapes, request.encoder_length)


def _token_layers(cache: Any) -> Iterator[tuple[int, TokenLayer]]:
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    for index, layer in enumerate(own.adapted_layers()):
        held = layer.parts[0].unwrapped
        if isinstance(held, TokenLayer):
            yield index, held


def _sizes(cache: Any) -> list[int | None]:
    """The numbers that the stores of a cache were made with."""
    stores = [layer.store for _, layer in _token_layers(cache)]
    return [_size(store) for store in stores if isinstance(store, DenseStore | StaticStore | QuantizedStore)]


def _size(store: DenseStore | StaticStore | QuantizedStore) -> int | None:
    return store.capacity if isinstance(store, StaticStore) else store.length_hint


def fidelity_of(cache: Any) -> str:
    """What a cache of kvlayers does to the states: `EXACT`, `ROUNDED` or `EVICTING`."""
    layers = [layer for _, layer in _token_layers(cache)]
    if any(isinstance(layer, SinkLayer) for layer in layers):
        return EVICTING
    return ROUNDED if any(isinstance(layer.store, QuantizedStore) for layer in layers) else EXACT


def _bits(cache: Any, shapes: Sequence[LayerShape]) -> float:
    packed = (
        bits_of_packed(layer.store, shapes[index].forms())
        for index, layer in _token_layers(cache)
        if isinstance(layer.store, QuantizedStore)
    )
    return min([8.0 * shapes[0].dtype.itemsize, *packed])
