"""Cases of three parameters in which each two values meet, instead of every three."""

from collections.abc import Iterable


def in_turn(first: Iterable[str], second: Iterable[str], third: Iterable[str]) -> list[tuple[str, str, str]]:
    """Every two values of the first two, each pair with one value of the third: the next one in turn.

    The third must have no more values than either of the others, so that it meets each of theirs.
    """
    first, second, third = list(first), list(second), list(third)
    assert len(third) <= min(len(first), len(second)), "not every two of these values would meet"
    return [
        (one, other, third[(number + index) % len(third)])
        for number, one in enumerate(first)
        for index, other in enumerate(second)
    ]
