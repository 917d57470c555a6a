"""How the tokens that are kept are divided among the layers of a cache."""

import math
import sys
from collections.abc import Sequence

from kvlayers.errors import OptionError

LayerBudgets = str | Sequence[float]
""""uniform", "pyramid", or a weight for each layer."""

NAMES = ("uniform", "pyramid")

STEEPNESS = 20
"""The part of an average layer's tokens that the last layer of a pyramid keeps is 1 / this number."""


def layer_keeps(layer_budgets: LayerBudgets, layers: int, keep: float) -> list[float]:
    """The part of its tokens that each layer keeps. Their mean is `keep`.

    Args:
        layer_budgets: "uniform" for the same part in each layer; "pyramid" for fewer tokens from layer to layer, as in
            Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"
            (arXiv:2406.02069); or a positive weight for each layer, of which only the ratios matter, as far as no layer
            can keep more than all.
        layers: layers that evict.
        keep: part of the tokens that an average layer keeps, above 0 and at most 1.

    Raises:
        OptionError: `layer_budgets` has another value, or not as many weights as layers.
    """
    return _shares(layer_budgets, layers, keep, 0.0, 1.0)


def layer_tokens(layer_budgets: LayerBudgets, layers: int, budget: int, least: int = 1) -> list[int]:
    """How many tokens each layer keeps. Their mean is `budget`.

    Args:
        layer_budgets: as for `layer_keeps`.
        layers: layers that evict.
        budget: tokens that an average layer keeps, not below `least`.
        least: tokens that every layer keeps.

    Raises:
        OptionError: as for `layer_keeps`.
    """
    shares = _shares(layer_budgets, layers, budget, least, math.inf)
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(layers), key=lambda layer: counts[layer] - shares[layer])
    for layer in by_remainder[: budget * layers - sum(counts)]:
        counts[layer] += 1
    return counts


def check_layer_budgets(layer_budgets: object) -> None:
    """Raise `OptionError` if this is not a way to divide tokens among layers, of whatever number."""
    if isinstance(layer_budgets, str) and layer_budgets in NAMES:
        return
    weights = layer_budgets if isinstance(layer_budgets, Sequence) and not isinstance(layer_budgets, str) else ()
    if not weights or not all(_is_positive(weight) for weight in weights):
        raise OptionError(
            f"`layer_budgets` must be {' or '.join(map(repr, NAMES))}, or positive numbers with one for each layer, "
            f"got {layer_budgets!r}: pass one of these."
        )


def _is_positive(weight: object) -> bool:
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    return is_number and 0 < weight <= sys.float_info.max  # type: ignore[operator]


def _shares(layer_budgets: LayerBudgets, layers: int, average: float, least: float, most: float) -> list[float]:
    """The share of each layer, from `least` to `most`. Their mean is `average`."""
    check_layer_budgets(layer_budgets)
    if layer_budgets == "uniform":
        return [average] * layers
    if isinstance(layer_budgets, str):
        return _pyramid(layers, average, least, most)
    if len(layer_budgets) != layers:
        raise OptionError(
            f"`layer_budgets` must have a number for each of the {layers} layers that evict, got {len(layer_budgets)}: "
            "pass as many."
        )
    return _weighted(list(layer_budgets), average, least, most)


def _pyramid(layers: int, average: float, least: float, most: float) -> list[float]:
    """Shares that fall by the same amount from layer to layer."""
    highest = min(2 * average - max(average / STEEPNESS, least), most)
    lowest = 2 * average - highest
    if layers == 1:
        return [average]
    step = (highest - lowest) / (layers - 1)
    # Rounding errors do not lead out of the bounds.
    return [min(max(highest - layer * step, least), most) for layer in range(layers)]


def _weighted(weights: list[float], average: float, least: float, most: float) -> list[float]:
    """Shares in the ratios of the weights. What a bound takes from a layer, or gives to it, the others share."""
    # The sum of the shares grows with the factor, so halving finds the one that gives the average.
    total, low, high = average * len(weights), 0.0, 1.0
    largest = max(weights)

    def shares(factor: float) -> list[float]:
        return [min(max(weight / largest * factor, least), most) for weight in weights]

    while sum(shares(high)) < total and high < 1e300:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if sum(shares(middle)) < total:
            low = middle
        else:
            high = middle
    return shares(low)
