"""Bytes that a layer would hold: which tokens it keeps, and then what their store makes of them."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kvlayers.errors import CapacityError, UnsupportedLayerError
from kvlayers.layers import (
    DynamicLayer,
    HybridLayer,
    LinearAttentionLayer,
    OffloadedLayer,
    SinkLayer,
    SlidingLayer,
    StaticLayer,
    StaticSlidingLayer,
)
from kvlayers.layers.static_sliding import reserved_room
from kvlayers.planning.shapes import LayerShape
from kvlayers.planning.store_bytes import COUNTER_BYTES, Forms, Intake, pair_bytes, reservation_bytes, store_bytes
from kvlayers.upstream import compat


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer.

    Attributes:
        staying: those on the device.
        travelling: those that are at home on the host, and on the device while the layer is attended to.
    """

    staying: int = 0
    travelling: int = 0


@functools.singledispatch
def layer_bytes(layer: Any, shape: LayerShape, tokens: int) -> LayerBytes:
    """Bytes of a layer that is made like an empty one, for `tokens` tokens, and takes them in at once.

    Args:
        layer: of a cache that was made with a length hint of `FOLLOWED`.
        shape: what it holds of a token, and of a sequence.
        tokens: how many it is made for and takes in.

    Raises:
        UnsupportedLayerError: it is not known what it holds.
        CapacityError: it reserves a number of its own, which is smaller.
    """
    if isinstance(layer, compat.DUMMY_LAYER):
        return LayerBytes()
    if isinstance(layer, compat.INDEXED_LAYER):
        return LayerBytes(pair_bytes(shape.forms(), tokens) + tokens * shape.indexer_bytes())
    if isinstance(layer, compat.STATIC_INDEXED_LAYER):
        reserved = Intake(shape.forms(), tokens, tokens).following(layer.max_cache_len) or 0
        return LayerBytes(pair_bytes(shape.forms(), reserved) + reserved * shape.indexer_bytes())
    raise UnsupportedLayerError(
        f"expected layers of kvlayers, but saw a {type(layer).__name__}: register its arithmetic with "
        "kvlayers.planning.layer_bytes.layer_bytes.register, or leave the cache out of the names."
    )


@layer_bytes.register
def _dynamic(layer: DynamicLayer, shape: LayerShape, tokens: int) -> LayerBytes:
    return LayerBytes(store_bytes(layer.store, Intake(shape.forms(), tokens, tokens)))


@layer_bytes.register
def _static(layer: StaticLayer, shape: LayerShape, tokens: int) -> LayerBytes:
    intake = Intake(shape.forms(), tokens, tokens)
    _check_reserved(intake.following(layer.max_cache_len), layer.reserved.grow, tokens)
    return LayerBytes(store_bytes(layer.reserved, intake))


@layer_bytes.register
def _sliding(layer: SlidingLayer, shape: LayerShape, tokens: int) -> LayerBytes:
    held = tokens if tokens <= layer.room else layer.sliding_window - 1
    return LayerBytes(store_bytes(layer.store, Intake(shape.forms(), held, tokens)))


@layer_bytes.register
def _static_sliding(layer: StaticSlidingLayer, shape: LayerShape, tokens: int) -> LayerBytes:
    store, forms = layer.reserved, shape.forms()
    expected = Intake(forms, tokens, tokens).following(layer.max_cache_len) or 0
    slides_on = layer.token_limit is None or expected >= layer.sliding_window
    _check_reserved(expected, store.grow or slides_on, tokens)
    room = reserved_room(expected, layer.sliding_window, store.grow)
    return LayerBytes(reservation_bytes(store, forms, room))


@layer_bytes.register
def _sink(layer: SinkLayer, shape: LayerShape, tokens: int) -> LayerBytes:
    forms = shape.forms()
    held = tokens if tokens <= layer.room else layer.window_length - 1 - layer.num_sink_tokens
    window = store_bytes(layer.store, Intake(forms, held, tokens))
    return LayerBytes(window + _sink_bytes(layer, forms))


def _sink_bytes(layer: SinkLayer, forms: Forms) -> int:
    sinks = pair_bytes(forms, layer.num_sink_tokens)
    if layer.rotary is None:
        return sinks
    # What a turn mixes into their keys is kept wide, so that nothing is rounded twice.
    batch, kv_heads, head_dim, dtype, _ = forms[0]
    wide = torch.promote_types(dtype, torch.float32).itemsize
    return sinks + batch * kv_heads * layer.num_sink_tokens * head_dim * wide


@layer_bytes.register
def _linear(layer: LinearAttentionLayer, shape: LayerShape, tokens: int) -> LayerBytes:
    states = shape.recurrent_bytes()
    if not states:
        return LayerBytes()
    # One after the prompt, unless that is a single token.
    checkpoints = min(layer.checkpoints.most, 1) if tokens > 1 else 0
    return LayerBytes(states * (1 + checkpoints) + layer.number_of_states * COUNTER_BYTES)


@layer_bytes.register
def _hybrid(layer: HybridLayer, shape: LayerShape, tokens: int) -> LayerBytes:
    attention = layer_bytes(layer.attention, shape, tokens)
    return LayerBytes(attention.staying + _linear(layer.linear, shape, tokens).staying, attention.travelling)


@layer_bytes.register
def _offloaded(layer: OffloadedLayer, shape: LayerShape, tokens: int) -> LayerBytes:
    return LayerBytes(travelling=layer_bytes(layer.layer, shape, tokens).staying)


def _check_reserved(reserved: int | None, holds_more: bool, tokens: int) -> None:
    if reserved is not None and reserved < tokens and not holds_more:
        raise CapacityError(
            f"expected at most {reserved} tokens, as the cache reserves a number of its own, but saw {tokens}: plan a "
            "shorter context, or reserve more."
        )
