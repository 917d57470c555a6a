"""One setting for each part: a multiple-choice knapsack problem."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

MOST_UNITS = 200_000
"""The most units into which a budget is divided. Finer units would change nothing measurable, and take memory."""


@dataclass(frozen=True)
class PartChoice:
    """A setting that a part can have.

    Attributes:
        cost: bytes per token.
        loss: KL divergence if all other parts are in full precision.
    """

    cost: Fraction
    loss: float


def least_losses(parts: Sequence[Sequence[PartChoice]], most: Fraction) -> list[tuple[int, ...]]:
    """Choose a setting for each part so that the sum of losses is least, for every budget up to `most` that matters.

    A budget matters if it allows a smaller loss than every smaller budget. Dynamic programming over the parts finds
    them, in units of the greatest common divisor of all costs. If `most` is more than `MOST_UNITS` such units (which
    takes odd head_dims in many layers), the unit is larger and costs are rounded up to it, so that no result exceeds
    its budget.

    Args:
        parts: the choices of each part.
        most: bytes per token that all parts together may take.

    Returns:
        For each budget that matters, the smallest first, the index of each part's choice. Empty if even the cheapest
        choices, rounded up, exceed `most`.
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
