"""The longest context that fits a budget."""

from collections.abc import Callable

NO_END = 2**40
"""More tokens than any context has: if so many fit, any number fits."""


def longest_context(fits: Callable[[int], bool], guess: int = 1) -> int | None:
    """The most tokens that fit, 0 if not even one fits, `None` if any number fits.

    Args:
        fits: whether a number of tokens fits. If a number fits, so does any smaller one.
        guess: where the search begins: the nearer to the result, the shorter it is.

    Example:
        >>> longest_context(lambda tokens: tokens * 3 <= 1000)
        333
    """
    if fits(NO_END):
        return None
    least, most = 0, NO_END
    tokens, step = min(max(guess, 1), NO_END - 1), 1
    # Outwards from the guess in steps that double, until the result is between `least` and `most`.
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
