"""How much a model's predictions change if the keys or the values of one layer alone are quantized."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvlayers.caches.dynamic import DynamicCache
from kvlayers.layers import QuantizedLayer
from kvlayers.quantizers.contract import Side
from kvlayers.stores.packed_blocks import SIDES
from kvlayers.stores.quantization import Quantization
from kvlayers.tools.calibration.divergence import read
from kvlayers.tools.measuring.predictions import mean_divergence


@dataclass(frozen=True)
class Sensitivity:
    """KL divergence of the predictions if one side of one layer alone is quantized.

    Attributes:
        layer: index of the layer.
        side: `"keys"` or `"values"`.
        divergence: mean KL divergence from full precision in nats, by the number of bits.
    """

    layer: int
    side: Side
    divergence: dict[int, float]


def measure_sensitivities(
    model: Any,
    passages: Sequence[Tensor],
    layers: Sequence[int],
    quantization: Quantization,
    widths: Sequence[int],
    scored: int,
    tick: Callable[[], object],
) -> list[Sensitivity]:
    """Quantize one side of each layer at a time, and compare the predictions after it.

    The context of a passage is read once. Its states are then rounded in a fork of the cache, and only the newest
    tokens are read again, once for each layer, side and width.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens]`.
        layers: indices of the layers that are quantized.
        quantization: how states are quantized, apart from the bits.
        widths: numbers of bits to measure.
        scored: newest tokens of a passage, which are scored and not quantized.
        tick: called after each measurement.

    Returns:
        A sensitivity for each layer and side, layers in order and keys first.
    """
    total = {(layer, side, nbits): 0.0 for layer in layers for side in SIDES for nbits in widths}
    for ids in passages:
        context, newest = ids[:, :-scored], ids[:, -scored:]
        cache = DynamicCache(config=model.config)
        read(model, context, cache, 1)
        exact = read(model, newest, cache.fork(), scored)
        for layer in layers:
            for nbits in widths:
                rounded = _rounded(cache.layers[layer].parts[0], quantization, nbits)
                for side in SIDES:
                    probed = cache.fork()
                    setattr(probed.layers[layer].parts[0], side, rounded[side])
                    seen = read(model, newest, probed, scored)
                    total[layer, side, nbits] += mean_divergence(exact, seen) / len(passages)
                    tick()
    return [
        Sensitivity(layer, side, {nbits: total[layer, side, nbits] for nbits in widths})
        for layer in layers
        for side in SIDES
    ]


def _rounded(layer: Any, quantization: Quantization, nbits: int) -> dict[Side, Tensor]:
    """The states of a layer, quantized and dequantized."""
    quantized = QuantizedLayer(with_bits(quantization, nbits))
    quantized.update(layer.keys, layer.values)
    keys, values = quantized.keys, quantized.values
    if keys is None or values is None:
        raise RuntimeError("a quantized layer has no keys and values after an update")
    return {"keys": keys, "values": values}


def with_bits(quantization: Quantization, nbits: int) -> Quantization:
    """The same quantization with `nbits` bits for keys and values."""
    return dataclasses.replace(quantization, nbits=nbits, key_nbits=None, value_nbits=None)
