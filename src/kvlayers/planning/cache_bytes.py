"""Bytes that a whole cache would hold, on the device and on the host."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import OptionError, UnsupportedLayerError
from kvlayers.layers import LayerOperations
from kvlayers.layers.shape import LayerShape, PlannedBytes
from kvlayers.layers.upstream_adapter.adapter import adapted
from kvlayers.stores.contract import Fidelity, least_faithful

SAMPLE_HINT = 1
"""The length hint of the cache that a plan asks for bytes. Another one, made for one token more, shows which layers
follow the hint."""


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache.

    Attributes:
        resident: bytes that are always on the device.
        host: bytes that are kept on the host, with what the allocator of pinned memory rounds up to.
        staged: the most of the host's bytes that are on the device at once: those of the layer that is attended to, and
            of the next one, and the pages that layers with recall leave there.
    """

    resident: int
    host: int
    staged: int

    def __add__(self, other: "CacheBytes") -> "CacheBytes":
        return CacheBytes(self.resident + other.resident, self.host + other.host, self.staged + other.staged)

    @property
    def total(self) -> int:
        """The `nbytes` of the cache: each byte once, where it is kept."""
        return self.resident + self.host

    @property
    def device(self) -> int:
        """The most bytes that the device must have room for."""
        return self.resident + self.staged


@dataclass(frozen=True)
class _SampleLayer:
    """A layer of a sample, which is empty, and the shape of the model's layer.

    Attributes:
        layer: the layer.
        shape: what the model's layer holds.
        follows_hint: whether the layer makes room for as many tokens as the length hint says.
    """

    layer: LayerOperations
    shape: LayerShape
    follows_hint: bool

    def nbytes(self, tokens: int) -> PlannedBytes:
        sized_for = tokens if self.follows_hint else self.layer.sized_for
        return self.layer.planned_nbytes(self.shape, tokens, sized_for)


class CacheArithmetic:
    """Bytes, bits and fidelity of the caches that a factory makes, for any number of tokens.

    Two small caches are made, and never used.

    Args:
        make: makes a cache for a model from a length hint.
        shapes: shapes of the layers of the model's decoder.
        encoder_length: tokens of the encoder's output, if the model has an encoder.
        devices: device of each layer, empty if all are on one device.

    Raises:
        OptionError: the layers' sizes are neither the length hint nor independent of it.
        UnsupportedLayerError: the cache is of another package.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        shapes: Sequence[LayerShape],
        encoder_length: int | None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        sample, longer = make(SAMPLE_HINT), make(SAMPLE_HINT + 1)
        self._encoder_length = encoder_length or 0
        self._devices = devices
        self._decoder = _sample_layers(_decoder_part(sample), _decoder_part(longer), shapes)
        self._cross: list[_SampleLayer] = []
        if _is_pair(sample):
            self._cross = _sample_layers(sample.cross_attention_cache, longer.cross_attention_cache, shapes)

    @property
    def fidelity(self) -> Fidelity:
        """What the caches do to the states that the model attends to."""
        return least_faithful(sample.layer.fidelity for sample in self._decoder + self._cross)

    @property
    def bits(self) -> float:
        """Bits of one number of a key or value, scales and zeros included, in the layers with the fewest."""
        return min(sample.layer.planned_bits(sample.shape) for sample in self._decoder)

    def nbytes(self, tokens: int) -> CacheBytes:
        """Bytes of a cache that is made for `tokens` tokens, after it took them in at once.

        Raises:
            UnsupportedLayerError: it is not known what a layer holds.
            CapacityError: a layer reserves a number of its own, which is smaller.
        """
        return sum(self.nbytes_by_device(tokens).values(), CacheBytes(0, 0, 0))

    def nbytes_by_device(self, tokens: int) -> dict[torch.device | None, CacheBytes]:
        """As `nbytes`, for each device by itself; the device is `None` if all layers are on one."""
        found: dict[torch.device | None, CacheBytes] = {}
        for samples, held in ((self._decoder, tokens), (self._cross, self._encoder_length)):
            by_device: dict[torch.device | None, list[PlannedBytes]] = {}
            for index, sample in enumerate(samples):
                # Layers that the model does not list, such as extra prediction layers, count for its last device.
                device = self._devices[min(index, len(self._devices) - 1)] if self._devices else None
                by_device.setdefault(device, []).append(sample.nbytes(held))
            for device, layers in by_device.items():
                found[device] = found.get(device, CacheBytes(0, 0, 0)) + _summed(layers)
        return found


def fidelity_of(cache: Any) -> Fidelity:
    """What a cache of kvlayers does to the states that the model attends to.

    Raises:
        UnsupportedLayerError: the class of a layer does not say.
    """
    parts = (cache.self_attention_cache, cache.cross_attention_cache) if _is_pair(cache) else (cache,)
    return least_faithful(layer.fidelity for part in parts for layer in part.adapted_layers())


def _is_pair(cache: Any) -> bool:
    return isinstance(cache, Cache) and cache.is_pair


def _decoder_part(cache: Any) -> Any:
    return cache.self_attention_cache if _is_pair(cache) else cache


def _sample_layers(cache: Any, longer: Any, shapes: Sequence[LayerShape]) -> list[_SampleLayer]:
    layers, longer_layers = (_adapted_layers(each, len(shapes)) for each in (cache, longer))
    return [
        _SampleLayer(layer, shape, _follows_hint(cache, layer.sized_for, other.sized_for))
        for layer, other, shape in zip(layers, longer_layers, shapes, strict=False)
    ]


def _adapted_layers(cache: Any, count: int) -> Iterator[LayerOperations]:
    if not isinstance(cache, Cache):
        raise UnsupportedLayerError(
            f"A `{type(cache).__module__}.{type(cache).__name__}` is not a cache of kvlayers, whose bytes are known: "
            "leave it out of the names."
        )
    for layer in cache.layers_for(count):
        yield adapted(layer)


def _follows_hint(cache: Any, size: int | None, size_if_longer: int | None) -> bool:
    if size == size_if_longer:
        return False
    if (size, size_if_longer) != (SAMPLE_HINT, SAMPLE_HINT + 1):
        raise OptionError(
            f"The factory of this `{type(cache).__name__}` makes layers for {size} tokens if `length_hint` is "
            f"{SAMPLE_HINT}, and for {size_if_longer} tokens if it is {SAMPLE_HINT + 1}: pass `request.length_hint` on "
            "as it is, or use a fixed number."
        )
    return True


def _summed(layers: Sequence[PlannedBytes]) -> CacheBytes:
    travelling = [layer.host for layer in layers if layer.host]
    # The first layer follows the last one, at the next token.
    following = [*travelling[1:], *travelling[:1]] if len(travelling) > 1 else [0] * len(travelling)
    staged = max((one + other for one, other in zip(travelling, following, strict=True)), default=0)
    host = sum(layer.host + layer.spare for layer in layers)
    resident = sum(layer.device + layer.resident for layer in layers)
    return CacheBytes(resident, host, staged + sum(layer.copies for layer in layers))
