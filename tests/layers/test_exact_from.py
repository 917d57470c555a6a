"""From which position on a layer holds every token as it came: counted by hand.

The layer matrix compares it with the oracles of every kind, after every operation.
"""

import pytest
import torch

import kvlayers
from oracle import states
from other_package import SteppedStore


def positions(layer: kvlayers.CacheLayer, updates: list[int]) -> list[int | None]:
    """`exact_from` after updates of so many tokens."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for tokens in updates:
        layer.update(*states(1, tokens, generator))
        found.append(layer.exact_from)
    return found


def test_packed_tokens_and_the_sinks_before_them_count() -> None:
    quantization = kvlayers.Quantization(nbits=4, q_group_size=4, residual_length=100, sink_tokens=10)
    layer = kvlayers.QuantizedLayer(quantization)
    # 10 sinks, 100 tokens of the residual and a block of 64 tokens that is not full yet stay as they came.
    assert positions(layer, [174, 1, 63, 1, 300]) == [0, 10 + 64, 10 + 64, 10 + 2 * 64, 10 + 6 * 64]
    layer.crop(150)
    assert layer.exact_from == 150
    layer.crop(10)
    assert layer.exact_from == 0


def test_tokens_between_sinks_and_window_count() -> None:
    layer = kvlayers.SinkLayer(window_length=16, num_sink_tokens=4, rotary=None)
    # The 16th token takes the place of the token behind the sinks in the next query's window.
    assert positions(layer, [15, 1, 1, 10]) == [0, 5, 6, 16]


def test_the_window_of_a_model_does_not_count_until_it_is_packed() -> None:
    assert positions(kvlayers.SlidingLayer(8), [5, 20, 1]) == [0, 0, 0]
    quantization = kvlayers.Quantization(nbits=4, q_group_size=4, residual_length=0, sink_tokens=0)
    packed = kvlayers.SlidingLayer(100, kvlayers.stores.QuantizedStore(quantization))
    assert positions(packed, [64, 1, 60, 10]) == [0, 64, 64, 128]


def test_exact_kinds_have_none() -> None:
    for layer in (kvlayers.DynamicLayer(), kvlayers.StaticLayer(64), kvlayers.StaticSlidingLayer(64, 8)):
        assert positions(layer, [20, 1]) == [0, 0]
    assert kvlayers.LinearAttentionLayer().exact_from == 0
    hybrid = kvlayers.HybridLayer(kvlayers.QuantizedLayer(), kvlayers.LinearAttentionLayer())
    assert hybrid.exact_from == 0


class RoundingStore(SteppedStore):
    fidelity = "rounded"


class SilentStore(SteppedStore):
    fidelity = kvlayers.stores.TokenStore.fidelity


def test_a_kind_that_does_not_say_is_not_taken_for_exact() -> None:
    assert positions(kvlayers.DynamicLayer(store=RoundingStore(64)), [1]) == [None]
    with pytest.raises(kvlayers.errors.UnsupportedLayerError, match="has no `fidelity`"):
        positions(kvlayers.DynamicLayer(store=SilentStore(64)), [1])
