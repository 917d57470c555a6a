"""From which position on a layer holds every token as it came, of kinds that are not in the layer matrix.

The matrix compares it with the oracle of each kind at every step.
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


def test_recurrent_layers_and_those_with_both_parts_have_none() -> None:
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
