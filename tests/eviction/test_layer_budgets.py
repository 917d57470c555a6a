"""Budgets of layers: their mean is the one that was asked for, within bounds."""

import itertools
import math

import pytest
import transformers

from kvlayers import EvictingCache
from kvlayers.errors import OptionError
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


def test_uniform_layers_are_equal_and_a_pyramid_of_one_layer_is_the_average() -> None:
    assert layer_keeps("uniform", 3, 0.5) == [0.5, 0.5, 0.5]
    assert layer_tokens("uniform", 3, 100) == [100, 100, 100]
    assert layer_keeps("pyramid", 1, 0.3) == [0.3]
    assert layer_tokens("pyramid", 1, 77) == [77]


@pytest.mark.parametrize(
    ("keep", "first", "last"), [(0.5, 0.975, 0.025), (0.25, 0.4875, 0.0125), (0.75, 1.0, 0.5), (1.0, 1.0, 1.0)]
)
def test_a_pyramid_falls_by_the_same_amount(keep: float, first: float, last: float) -> None:
    found = layer_keeps("pyramid", 5, keep)
    assert math.isclose(found[0], first, abs_tol=1e-12)
    assert math.isclose(found[-1], last, abs_tol=1e-12)
    steps = [one - next_one for one, next_one in itertools.pairwise(found)]
    assert all(math.isclose(step, steps[0], abs_tol=1e-12) for step in steps)


def test_a_pyramid_of_tokens_ends_at_the_least() -> None:
    found = layer_tokens("pyramid", 4, 256, least=68)
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (444, 68)


def test_weights_are_ratios_until_a_layer_keeps_all() -> None:
    assert [round(keep, 9) for keep in layer_keeps([4, 2, 1, 1], 4, 0.25)] == [0.5, 0.25, 0.125, 0.125]
    # The first layer would keep more than all: the others share the rest in their ratios.
    assert [round(keep, 9) for keep in layer_keeps([100, 2, 1, 1], 4, 0.5)] == [1.0, 0.5, 0.25, 0.25]


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
