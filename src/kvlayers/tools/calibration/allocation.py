"""Which of several settings each part gets: a knapsack in which each part takes one."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

MOST_UNITS = 200_000
"""Units that a budget is counted in at most: finer ones would change nothing that can be measured, and take memory."""


@dataclass(frozen=True)
class PartChoice:
    """A setting that a part can have.

    Attributes:
        cost: bytes a token.
        loss: divergence that it makes, where all other parts are in full precision.
    """

    cost: Fraction
    loss: float


def least_losses(parts: Sequence[Sequence[PartChoice]], most: Fraction) -> list[tuple[int, ...]]:
    """For each number of bytes up to `most` at which less is lost, the choice of each part that loses least in sum.

    Exact where `most` is no more than `MOST_UNITS` of what all costs are whole multiples of, as it is but for odd
    head_dims in many layers; else costs are rounded up to the next of so many units, so that no answer is beyond its
    bytes. Dynamic programming over the parts.

    Args:
        parts: the choices of each part.
        most: bytes a token that all parts together may take.

    Returns:
        Indices of choices, the cheapest answer first; none where the cheapest choices, rounded up, are beyond `most`.
    """
    unit = max(_common_unit([choice.cost for part in parts for choice in part]), most / MOST_UNITS)
    costs = [[-(-choice.cost // unit) for choice in part] for part in parts]
    units = int(most // unit)
    best = np.zeros(units + 1)
    taken: list[npt.NDArray[np.int8]] = []
    for part, prices in zip(parts, costs, strict=True):
        totals = np.full((len(part), units + 1), np.inf)
        for index, (choice, price) in enumerate(zip(part, prices, strict=True)):
            if price <= units:
                totals[index, price:] = best[: units + 1 - price] + choice.loss
        taken.append(totals.argmin(0).astype(np.int8))
        best = totals.min(0)
    improves = np.isfinite(best) & np.r_[True, best[1:] < best[:-1]]
    return [_choices(taken, costs, int(budget)) for budget in np.flatnonzero(improves)]


def _common_unit(costs: Sequence[Fraction]) -> Fraction:
    denominator = int(np.lcm.reduce([cost.denominator for cost in costs]))
    return Fraction(int(np.gcd.reduce([int(cost * denominator) for cost in costs])), denominator)


def _choices(taken: Sequence[npt.NDArray[np.int8]], costs: Sequence[Sequence[int]], units: int) -> tuple[int, ...]:
    chosen = []
    for indices, prices in zip(reversed(taken), reversed(costs), strict=True):
        index = int(indices[units])
        chosen.append(index)
        units -= prices[index]
    return tuple(reversed(chosen))
