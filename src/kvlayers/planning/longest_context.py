"""The longest context that fits a budget."""

from collections.abc import Callable

NO_END = 2**40
"""Tokens that no context has: what holds so many in a budget holds any number."""


def longest_context(fits: Callable[[int], bool], guess: int = 1) -> int | None:
    """The most tokens that fit, 0 where not one does, `None` where there is no end.

    Args:
        fits: whether so many tokens do. Where some do, so do fewer.
        guess: where to begin: the nearer, the fewer are tried.

    Example:
        >>> longest_context(lambda tokens: tokens * 3 <= 1000)
        333
    """
    if fits(NO_END):
        return None
    least, most = 0, NO_END
    tokens, step = min(max(guess, 1), NO_END - 1), 1
    # From the guess outwards in steps that double, until what fits and what does not are on either side.
    while least < tokens < most:
        if fits(tokens):
            least, tokens = tokens, tokens + step
        else:
            most, tokens = tokens, tokens - step
        step *= 2
    while least + 1 < most:
        middle = (least + most) // 2
        if fits(middle):
            least = middle
        else:
            most = middle
    return least
