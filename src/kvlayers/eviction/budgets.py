"""How the tokens that are kept are divided among the KV heads of a sequence, and among the layers of a cache."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.errors import OptionError


class HeadBudgets(ABC):
    """Divides the tokens that a sequence keeps among its KV heads."""

    @abstractmethod
    def counts(self, scores: Tensor, keep: Tensor) -> Tensor:
        """How many tokens each head keeps.

        Args:
            scores: `[batch, kv_heads, tokens]`; infinite for tokens that are kept anyway, minus infinite for padding,
                finite for all others.
            keep: tokens that an average head of each sequence keeps, int64 `[batch]` on the host: at least the
                tokens that are kept anyway, and at most the tokens of the longest head.

        Returns:
            int64 `[batch, kv_heads]` on the host. A head that is given more than it has keeps all its tokens.
        """


@dataclass(frozen=True)
class EvenHeads(HeadBudgets):
    """Every head keeps the same number of tokens."""

    @override
    def counts(self, scores: Tensor, keep: Tensor) -> Tensor:
        return keep[:, None].expand(-1, scores.shape[1])


@dataclass(frozen=True)
class AdaptiveHeads(HeadBudgets):
    """Heads keep the tokens with the highest scores of all heads together, and each head a floor.

    Feng et al. 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference"
    (arXiv:2407.11550): heads whose attention is spread keep more tokens than heads that look at few.

    Args:
        floor: the part of an average head's tokens that every head keeps, from 0 to 1.

    Raises:
        OptionError: `floor` is not such a number.
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        if isinstance(self.floor, bool) or not isinstance(self.floor, int | float) or not 0 <= self.floor <= 1:
            raise OptionError(f"`floor` must be a number from 0 to 1, got {self.floor!r}.")

    @override
    def counts(self, scores: Tensor, keep: Tensor) -> Tensor:
        batch, heads, tokens = scores.shape
        safe = (keep * self.floor).long()
        guarded = scores.masked_fill(highest(scores, safe[:, None].expand(-1, heads)), torch.inf)
        chosen = highest(guarded.view(batch, 1, -1), (keep * heads)[:, None])
        return chosen.view(batch, heads, tokens).sum(-1).cpu()


def highest(scores: Tensor, counts: Tensor) -> Tensor:
    """Which scores of each row are among its highest. Of equal scores, the first ones are.

    Args:
        scores: `[batch, rows, tokens]`, without NaN.
        counts: int64 `[batch, rows]` on the host, how many of each row are wanted, from 0 to `tokens`.

    Returns:
        bool `[batch, rows, tokens]`, true for `counts` scores of each row.
    """
    largest = int(counts.max())
    if largest == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    wanted = counts.to(scores.device)[..., None]
    descending = scores.topk(largest, dim=-1).values
    lowest = descending.gather(-1, (wanted - 1).clamp(min=0))
    above = scores > lowest
    # topk may choose any of equal scores, and another one on each device.
    equal = scores == lowest
    short = wanted - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= short))) & (wanted > 0)


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
            f"got {layer_budgets!r}."
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
            f"`layer_budgets` must have a number for each of the {layers} layers that evict, got {len(layer_budgets)}."
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
