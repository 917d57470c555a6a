"""Orders in which timed runs alternate."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

Entrant = TypeVar("Entrant")


@contextmanager
def quiet_clock() -> Iterator[None]:
    """Time without garbage collection, and without gradients."""
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        gc.enable()


def interleaved(entrants: Sequence[Entrant], turn: int) -> list[Entrant]:
    """The entrants, rotated so that each turn begins with the next one.

    Example:
        >>> interleaved(["a", "b", "c"], 4)
        ['b', 'c', 'a']
    """
    first = turn % len(entrants)
    return [*entrants[first:], *entrants[:first]]


def there_and_back(entrants: Sequence[Entrant], turn: int) -> list[Entrant]:
    """The entrants in their order, reversed every other turn.

    Example:
        >>> there_and_back(["a", "b", "c"], 1)
        ['c', 'b', 'a']
    """
    return list(reversed(entrants)) if turn % 2 else list(entrants)
