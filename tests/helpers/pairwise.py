"""Cases of three parameters that cover every pair of values, rather than every combination."""

from collections.abc import Iterable


def in_turn(first: Iterable[str], second: Iterable[str], third: Iterable[str]) -> list[tuple[str, str, str]]:
    """Every combination of the first two, each with one value of the third: the values take turns.

    The third must have no more values than either of the others. Then each of its values meets each of theirs.
    """
    first, second, third = list(first), list(second), list(third)
    assert len(third) <= min(len(first), len(second)), "some pairs of values would never meet"
    return [
        (one, other, third[(number + index) % len(third)])
        for number, one in enumerate(first)
        for index, other in enumerate(second)
    ]
