"""Members of a layer that are called by hand name what they were given, and change nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import kvlayers
from agreement import step
from kvlayers.errors import KVLayersError, OptionError, RegistryError
from kvlayers.stores import DenseStore
from layer_kinds import KINDS
from matrix import once

NOT_NUMBERS: dict[str, Any] = {
    "nothing": None,
    "a text": "3",
    "a truth": True,
    "half": 1.5,
    "a list": [1],
    "no data": torch.tensor(1, device="meta"),
    "a truth of torch": torch.tensor(True),
}
NUMBERS = (
    *("truncate", "check_truncate", "nearest_restorable", "remove_newest", "check_removal"),
    *("row", "get_mask_sizes", "crop"),
)
OWN_KINDS = [kind for kind in KINDS if "another package" not in kind]
"""A layer of another package checks its own lengths."""
NOT_INDICES: dict[str, Any] = {
    "nothing": None,
    "a text": "3",
    "a number": 1,
    "halves": torch.tensor([0.5]),
    "beyond": torch.tensor([7]),
    "a table": torch.zeros(1, 1, dtype=torch.int64),
}


def filled(kind: str) -> Any:
    layer, _ = KINDS[kind]()
    torch.manual_seed(0)
    layer.update(torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8))
    return layer


def facts_and_tensors(layer: Any) -> tuple[object, dict[str, torch.Tensor]]:
    state = layer.state()
    return state.facts, state.tensors


def check_unchanged(layer: Any, before: tuple[object, dict[str, torch.Tensor]]) -> None:
    facts, tensors = facts_and_tensors(layer)
    assert facts == before[0]
    assert tensors.keys() == before[1].keys()
    assert all(torch.equal(tensors[name], own) for name, own in before[1].items())


@pytest.mark.parametrize(("kind", "number"), once(OWN_KINDS, NOT_NUMBERS))
@pytest.mark.parametrize("member", NUMBERS)
def test_what_is_no_number_is_named(kind: str, number: str, member: str) -> None:
    layer = filled(kind)
    before = facts_and_tensors(layer)
    with pytest.raises(KVLayersError, match="must be .* got "):
        getattr(layer, member)(NOT_NUMBERS[number])
    check_unchanged(layer, before)


@pytest.mark.parametrize(("kind", "indices"), once(OWN_KINDS, NOT_INDICES))
@pytest.mark.parametrize("member", ["select", "batch_select_indices", "reorder_cache"])
def test_what_are_no_indices_is_named(kind: str, indices: str, member: str) -> None:
    layer = filled(kind)
    before = facts_and_tensors(layer)
    with pytest.raises(kvlayers.errors.BatchIndexError, match=r"must .* got "):
        getattr(layer, member)(NOT_INDICES[indices])
    check_unchanged(layer, before)


@pytest.mark.parametrize("kind", KINDS)
def test_what_are_no_states_is_named(kind: str) -> None:
    """Also by the short ways of a token like the one before."""
    generator = torch.Generator().manual_seed(0)
    layer, oracle = KINDS[kind]()
    for tokens in (6, 1, 1):
        step(layer, oracle, tokens, generator)
    good = torch.zeros(2, 2, 1, 4)
    for wrong in ((None, good), (good, None), ("keys", "values"), ([1.0], good)):
        with pytest.raises(kvlayers.errors.StateMismatchError, match="must be tensors, got a"):
            layer.update(*wrong)
    step(layer, oracle, 1, generator)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("recall", "sliding", "sink", "evicting"))])
def test_padding_is_not_dropped_of_tokens_that_are_counted_beside_the_store(kind: str) -> None:
    """Pages and windows would stand at other tokens than before."""
    layer = filled(kind)
    with pytest.raises(
        kvlayers.errors.UnsupportedLayerError, match=r"`attention_mask` must have no padding for a .*Layer"
    ):
        kvlayers.Rows(
            kvlayers.Cache(layers=[layer]), torch.tensor([[1] * layer.length, [0] + [1] * (layer.length - 1)])
        )


TAKE_HINTS: dict[str, Callable[[Any], Any]] = {
    "DynamicLayer": lambda hint: kvlayers.DynamicLayer(length_hint=hint),
    "QuantizedLayer": lambda hint: kvlayers.QuantizedLayer(length_hint=hint),
    "RecallLayer": lambda hint: kvlayers.RecallLayer(length_hint=hint),
    "DenseStore": lambda hint: DenseStore(length_hint=hint),
    "DynamicCache": lambda hint: kvlayers.DynamicCache(length_hint=hint),
    "QuantizedCache": lambda hint: kvlayers.QuantizedCache(length_hint=hint),
    "dynamic": lambda hint: kvlayers.make_cache("dynamic", LlamaConfig(), length_hint=hint),
    "dynamic_full": lambda hint: kvlayers.make_cache("dynamic_full", LlamaConfig(), length_hint=hint),
    "static": lambda hint: kvlayers.make_cache("static", LlamaConfig(), length_hint=hint),
}


@pytest.mark.parametrize("hint", [-3, 1.5, True, "a few"])
@pytest.mark.parametrize("taker", TAKE_HINTS)
def test_a_hint_of_no_number_of_tokens_is_refused_where_it_is_taken(taker: str, hint: Any) -> None:
    with pytest.raises(OptionError, match="`length_hint` must be .* got "):
        TAKE_HINTS[taker](hint)
    assert TAKE_HINTS[taker]("1k") is not None


@pytest.mark.parametrize("base", [kvlayers.DynamicLayer, kvlayers.SlidingLayer, kvlayers.CacheLayer])
def test_what_a_kind_is_like_is_said_by_its_traits_alone(base: type) -> None:
    with pytest.raises(RegistryError, match=r"`traits` of .*Own must .* `keeps_every_token`.*LayerTraits\("):
        type("Own", (base,), {"keeps_every_token": False, "__qualname__": "Own"})
    own: Any = type("Own", (base,), {"traits": kvlayers.layers.LayerTraits(keeps_every_token=True)})
    assert own.traits.keeps_every_token
