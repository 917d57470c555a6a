"""How many single tokens come between two evictions. Other tests of layers with a budget let fewer of them come."""

import torch

from kvlayers import EvictingLayer


def test_a_layer_evicts_when_it_holds_64_tokens_more_than_its_budget() -> None:
    layer = EvictingLayer("knorm", budget=48, sink_tokens=4, recent_tokens=16, per_head=False)
    layer.update(*torch.randn(2, 1, 2, 100, 8))
    held = [layer.held_tokens]
    for _ in range(130):
        layer.update(*torch.randn(2, 1, 2, 1, 8))
        held.append(layer.held_tokens)
    assert held == [*range(48, 112), *range(48, 112), 48, 49, 50]
