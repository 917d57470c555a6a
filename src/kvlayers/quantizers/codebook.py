"""Codes that look up a level in a codebook: the level nearest to each state, in units of the scale of its group."""

import functools
import itertools
import math

import torch
from torch import Tensor

from kvlayers.quantizers.contract import CodeFormat, QuantizedGroups
from kvlayers.quantizers.grouping import smallest_positive, ungrouped


def nearest_levels(groups: Tensor, scale: Tensor, code_format: CodeFormat) -> QuantizedGroups:
    """The codes of the nearest levels.

    Args:
        groups: float32 states by groups, as `grouped` gives them.
        scale: of each group, in the dtype of the states, with the last dimensions `[1, groups, 1]` of `groups`.
        code_format: the format, with its levels in rising order.
    """
    levels = torch.tensor(code_format.levels, dtype=torch.float32, device=groups.device)
    # A group of zeros has the scale 0, which takes all levels to 0.
    units = groups / scale.float().clamp(min=smallest_positive(torch.float32))
    codes = torch.bucketize(units.contiguous(), (levels[1:] + levels[:-1]) / 2)
    return QuantizedGroups(ungrouped(codes.to(torch.uint8)), scale.squeeze(-1).squeeze(-2), None)


@functools.cache
def gaussian_levels(bits: int) -> tuple[float, ...]:
    """The levels with the least mean squared error for a standard normal number, by Lloyd's and Max's method.

    Each level becomes the mean of the numbers that are nearest to it, until none moves.
    """
    count = 1 << bits
    levels = [4 * (index + 0.5) / count - 2 for index in range(count)]
    for _ in range(5000):
        borders = [-math.inf, *((low + high) / 2 for low, high in itertools.pairwise(levels)), math.inf]
        moved = [_mean_between(low, high) for low, high in itertools.pairwise(borders)]
        change = max(abs(old - new) for old, new in zip(levels, moved, strict=True))
        levels = moved
        if change < 1e-9:
            break
    return tuple(levels)


def _mean_between(low: float, high: float) -> float:
    """Mean of a standard normal number between two borders."""

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    probability = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
    return (density(low) - density(high)) / probability
