"""Cases of three parameters that cover every pair of values, rather than every combination."""

from collections.abc import Iterable
from typing import TypeVar

First, Second, Third = TypeVar("First"), TypeVar("Second"), TypeVar("Third")


def in_turn(
    first: Iterable[First], second: Iterable[Second], third: Iterable[Third]
) -> list[tuple[First, Second, Third]]:
    """Every combination of the first two, each with one value of the third: the values take turns.

    The third must have no more values than either of the others. Then each of its values meets each of theirs.
    """
    ones, others, thirds = list(first), list(second), list(third)
    assert len(thirds) <= min(len(ones), len(others)), "some pairs of values would never meet"
    return [
        (one, other, thirds[(number + index) % len(thirds)])
        for number, one in enumerate(ones)
        for index, other in enumerate(others)
    ]
