"""Bytes that a whole cache would hold, on the device and on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlayers.caches.base import Cache
from kvlayers.caches.encoder_decoder import EncoderDecoderCache
from kvlayers.errors import UnsupportedLayerError
from kvlayers.planning.layer_bytes import LayerBytes, layer_bytes
from kvlayers.planning.shapes import LayerShape


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache.

    Attributes:
        staying: those that are always on the device.
        host: those that are at home on the host.
        staged: the most of these that are on the device at once: of the layer that is attended to, and of the next one.
    """

    staying: int
    host: int
    staged: int

    @property
    def held(self) -> int:
        """What `nbytes` of the cache says: each byte once, where it is at home."""
        return self.staying + self.host

    @property
    def device(self) -> int:
        """The most that the device must have room for."""
        return self.staying + self.staged


def cache_bytes(cache: Any, shapes: Sequence[LayerShape], tokens: int, encoder_length: int | None) -> CacheBytes:
    """Bytes of a cache that is made like an empty one, for `tokens` tokens, and takes them in at once.

    Args:
        cache: made with a length hint of `FOLLOWED`, or a pair of such.
        shapes: of the layers of the decoder.
        tokens: how many it is made for and takes in.
        encoder_length: tokens of the encoder's output, for a pair.

    Raises:
        UnsupportedLayerError: it is not known what it, or one of its layers, holds.
        CapacityError: a layer reserves a number of its own, which is smaller.
    """
    if not isinstance(cache, EncoderDecoderCache):
        return _sum(_of_layers(cache, shapes, tokens))
    own = _sum(_of_layers(cache.self_attention_cache, shapes, tokens))
    cross = _sum(_of_layers(cache.cross_attention_cache, shapes, encoder_length or 0))
    return CacheBytes(own.staying + cross.staying, own.host + cross.host, own.staged + cross.staged)


def _of_layers(cache: Any, shapes: Sequence[LayerShape], tokens: int) -> list[LayerBytes]:
    if not isinstance(cache, Cache):
        raise UnsupportedLayerError(
            f"expected a cache of kvlayers, whose bytes are known, but saw a {type(cache).__module__}."
            f"{type(cache).__name__}: leave it out of the names."
        )
    layers = cache.layers_for(len(shapes))
    return [layer_bytes(layer, shape, tokens) for layer, shape in zip(layers, shapes, strict=False)]


def _sum(layers: Sequence[LayerBytes]) -> CacheBytes:
    travelling = [layer.travelling for layer in layers if layer.travelling]
    # The first one follows the last, at the next token.
    following = [*travelling[1:], *travelling[:1]] if len(travelling) > 1 else [0] * len(travelling)
    staged = max((one + other for one, other in zip(travelling, following, strict=True)), default=0)
    return CacheBytes(sum(layer.staying for layer in layers), sum(travelling), staged)
