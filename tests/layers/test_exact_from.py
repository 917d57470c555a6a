"""From which position on a layer holds every token as it came, of kinds that are not in the layer matrix.

The matrix compares it with the oracle of each kind at every step.
"""

import pytest
import torch

import kvlayers
from kvlayers.errors import UnsupportedLayerError
from oracle import states
from other_package import SteppedStore


def test_recurrent_layers_and_those_with_both_parts_have_none() -> None:
    recurrent = kvlayers.LinearAttentionLayer()
    assert recurrent.exact_from == kvlayers.HybridLayer(kvlayers.QuantizedLayer(), recurrent).exact_from == 0


class RoundingStore(SteppedStore):
    fidelity = "rounded"


class SilentStore(SteppedStore):
    fidelity = kvlayers.stores.TokenStore.fidelity


def test_a_kind_that_does_not_say_is_not_taken_for_exact() -> None:
    rounding, silent = (kvlayers.DynamicLayer(store=kind(64)) for kind in (RoundingStore, SilentStore))
    for layer in (rounding, silent):
        layer.update(*states(1, 1, torch.Generator()))
    assert rounding.exact_from is None
    with pytest.raises(UnsupportedLayerError, match="has no `fidelity`"):
        silent.exact_from  # noqa: B018
