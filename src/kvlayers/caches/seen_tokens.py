"""Refuses a prompt of `generate()` without new tokens."""

import weakref
from typing import Protocol

from typing_extensions import Self

from kvlayers.errors import InterruptedPassError, StateMismatchError


class Counted(Protocol):
    """What a count of tokens needs to know of its cache."""

    def forget_call(self) -> None:
        """Take the call of `generate()` that the cache was given to for one that ended."""

    def interruption(self) -> InterruptedPassError | None:
        """The error for layers that have seen different numbers of tokens, `None` if they have seen as many."""


def check_is_new(cache: Counted, held: int, given: int) -> None:
    """Check that a sequence is longer than what a cache has seen.

    transformers finds the new tokens by counting from the end of the sequence. Without new tokens it would take others.

    Args:
        cache: the cache.
        held: tokens that the cache has seen.
        given: tokens of the sequence.

    Raises:
        InterruptedPassError: no token is new, and an earlier forward pass was interrupted.
        StateMismatchError: no token is new.
    """
    if given <= held and held:
        interruption = cache.interruption()
        if interruption is not None:
            raise interruption
        raise StateMismatchError(
            f"The cache has seen {held} tokens, and a prompt of {given} has no new ones. Pass the whole text with the "
            "new tokens at its end (or these alone, with an attention_mask for all), or crop() or reset() the cache "
            "first."
        )


class SeenTokens(int):
    """Tokens that a cache has seen: an `int` that can tell what is left of a sequence from a number of new tokens.

    `generate()` subtracts it from the length of a sequence, and slices the new tokens from the end of the sequence by
    the negative of the difference. If no token is new, such a slice has all tokens, or tokens that the cache has seen.
    """

    cache: "weakref.ref[Counted]"

    @classmethod
    def of(cls, cache: Counted, seen: int) -> Self:
        """The length `seen` of a cache, to which it refers weakly."""
        tokens = cls(seen)
        tokens.cache = weakref.ref(cache)
        return tokens

    def __rsub__(self, given: int) -> int:
        new = given - int(self)
        return new if new > 0 else NoNewTokens.of(self, given)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class NoNewTokens(int):
    """What is left of a sequence of which a cache has seen every token: not positive, and no end of a slice."""

    seen: SeenTokens
    given: int

    @classmethod
    def of(cls, seen: SeenTokens, given: int) -> Self:
        """The difference of the length of a sequence, `given`, and of the tokens that a cache has seen."""
        none = cls(given - int(seen))
        none.seen, none.given = seen, given
        return none

    def __neg__(self) -> int:
        cache = self.seen.cache()
        if cache is not None:
            cache.forget_call()
            check_is_new(cache, int(self.seen), self.given)
        return -int(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
