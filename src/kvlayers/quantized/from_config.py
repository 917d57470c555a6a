"""Layers with packed tokens from a model's config."""

import dataclasses
from typing import Any

from kvlayers.core.dynamic_layer import DynamicLayer
from kvlayers.core.from_config import WINDOWED, AttentionMaker, CheckpointOptions, Factory, layers_of
from kvlayers.core.sliding_layer import SlidingLayer, window_room
from kvlayers.quantized.quantization import Quantization, QuantizationOfLayers, check_count
from kvlayers.quantized.quantized_layer import quantized_layer
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.upstream import model_layers
from kvlayers.upstream.model_layers import LayerSpec


def packed_attention_layer(
    quantization: Quantization, length_hint: int | None = None, recall: AttentionMaker | None = None
) -> DynamicLayer:
    """As `full_attention_layer`, with most tokens in packed codes."""
    if recall is None:
        return quantized_layer(quantization, length_hint)
    return recall.layer(length_hint, QuantizedStore(quantization, length_hint))


def quantized_layers(
    config: object,
    quantization: QuantizationOfLayers,
    quantize_sliding: bool,
    length_hint: int | None = None,
    checkpoints: CheckpointOptions = None,
    recall: AttentionMaker | None = None,
) -> list[Any]:
    """As `dynamic_layers`, with full attention quantized, and windows too if `quantize_sliding` is true.

    Raises:
        OptionError: bits were given for another number of layers.
    """
    check_count(quantization, len(model_layers.layer_specs(config)))

    def window(spec: LayerSpec) -> SlidingLayer:
        return SlidingLayer(spec.options["sliding_window"])

    def quantized_window(spec: LayerSpec) -> SlidingLayer:
        # A window drops its oldest tokens, so no token could stay as a sink.
        in_window = dataclasses.replace(quantization.of_layer(spec.index), sink_tokens=0)
        window = spec.options["sliding_window"]
        return SlidingLayer(window, QuantizedStore(in_window, window_room(window)))

    kinds: dict[str, Factory] = {
        "full_attention": lambda spec: packed_attention_layer(quantization.of_layer(spec.index), length_hint, recall),
        **dict.fromkeys(WINDOWED, quantized_window if quantize_sliding else window),
    }
    return layers_of(config, kinds, checkpoints)
