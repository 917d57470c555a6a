"""Budgets of layers: their mean is the one that was asked for, within bounds."""

import math

import pytest
import transformers

from kvlayers import EvictingCache, OptionError
from kvlayers.eviction.options import layer_keeps, layer_tokens

KINDS = ["uniform", "pyramid", [5, 1, 1, 0.5], [1e-9, 1e9, 1, 1], [1e308, 1e308, 1e308, 1e307]]


@pytest.mark.parametrize("keep", [0.01, 0.25, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_mean_of_all_layers_is_what_was_asked_for(kind: str | list[float], keep: float) -> None:
    found = layer_keeps(kind, 4, keep)
    assert math.isclose(sum(found) / 4, keep, abs_tol=1e-9)
    assert all(0 < one <= 1 for one in found)


@pytest.mark.parametrize("budget", [68, 69, 100, 1000, 12345])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_of_all_layers_are_as_many_as_were_asked_for(kind: str | list[float], budget: int) -> None:
    found = layer_tokens(kind, 4, budget, least=68)
    assert sum(found) == 4 * budget
    assert min(found) >= 68


@pytest.mark.parametrize(
    ("kind", "keep", "expected"),
    [
        ("uniform", 0.5, [0.5] * 3),
        # It falls by the same amount, and one layer is the average.
        ("pyramid", 0.3, [0.3]),
        ("pyramid", 0.5, [0.975, 0.7375, 0.5, 0.2625, 0.025]),
        ("pyramid", 0.25, [0.4875, 0.36875, 0.25, 0.13125, 0.0125]),
        ("pyramid", 0.75, [1.0, 0.875, 0.75, 0.625, 0.5]),
        ("pyramid", 1.0, [1.0] * 5),
        # Weights are ratios until a layer keeps all: the others share the rest in their ratios.
        ([4, 2, 1, 1], 0.25, [0.5, 0.25, 0.125, 0.125]),
        ([100, 2, 1, 1], 0.5, [1.0, 0.5, 0.25, 0.25]),
    ],
)
def test_what_each_layer_keeps(kind: str | list[float], keep: float, expected: list[float]) -> None:
    assert layer_keeps(kind, len(expected), keep) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "budget", "expected"),
    [("uniform", 100, [100] * 3), ("pyramid", 77, [77]), ("pyramid", 256, [444, 319, 193, 68])],
)
def test_tokens_of_each_layer(kind: str, budget: int, expected: list[int]) -> None:
    assert layer_tokens(kind, len(expected), budget, least=68) == expected


@pytest.mark.parametrize(
    "wrong",
    ["Pyramid", "", None, 3, [], [1, 2], [1, 2, 3, 4, 5], [1, 1, 1, 0], [1, 1, 1, -1], [1, 1, 1, math.nan],
     [1, 1, 1, math.inf], [1, 1, 1, 10**400], [1, 1, 1, True], [1, 1, 1, "a"], {1: 2}],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_named(wrong: object) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=4)
    with pytest.raises(OptionError, match="layer_budgets"):
        EvictingCache(config, keep=0.5, layer_budgets=wrong)  # type: ignore[arg-type]
