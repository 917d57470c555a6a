"""What each layer's keys, and its values, make of a model's predictions when they alone are quantized."""

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
    """What quantizing one side of one layer does to the predictions.

    Attributes:
        layer: index of the layer.
        side: `"keys"` or `"values"`.
        divergence: mean KL divergence from full precision in nats, by bits.
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
    """Quantize the states of each layer, side by side, and compare what follows.

    A passage is read once. Its states are then rounded where they lie, and only its newest tokens are read again, once
    for each layer, side and width.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens]`.
        layers: indices of the layers that are quantized.
        quantization: how, but for the bits.
        widths: bits to measure.
        scored: newest tokens of a passage that count, and that are not quantized.
        tick: called after each measurement.

    Returns:
        One for each layer and side, layers in order and keys first.
    """
    total = {(layer, side, nbits): 0.0 for layer in layers for side in SIDES for nbits in widths}
    for ids in passages:
        context, newest = ids[:, :-scored], ids[:, -scored:]
        held = DynamicCache(config=model.config)
        read(model, context, held, 1)
        exact = read(model, newest, held.fork(), scored)
        for layer in layers:
            for nbits in widths:
                rounded = _rounded(held.layers[layer].parts[0], quantization, nbits)
                for side in SIDES:
                    probed = held.fork()
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
    """The states of a layer as a quantized one would hold them."""
    quantized = QuantizedLayer(with_bits(quantization, nbits))
    quantized.update(layer.keys, layer.values)
    keys, values = quantized.keys, quantized.values
    if keys is None or values is None:
        raise RuntimeError("a layer that has taken in states holds none")
    return {"keys": keys, "values": values}


def with_bits(quantization: Quantization, nbits: int) -> Quantization:
    """The same quantization with so many bits for keys and values."""
    return dataclasses.replace(quantization, nbits=nbits, key_nbits=None, value_nbits=None)
