"""Refuses a prompt of `generate()` without new tokens."""

from typing import Protocol

from typing_extensions import Self

from kvlayers.errors import InterruptedPassError, StateMismatchError


class Counted(Protocol):
    """What a count of tokens needs to know of its cache."""

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
            f"expected more than the {held} tokens that the cache has seen already, but saw {given}: pass the whole "
            "sequence as input_ids, or new tokens alone with an attention_mask for all (a cache with a window needs no "
            "cropped input); or crop() or reset() the cache to begin another sequence."
        )


class SeenTokens(int):
    """The length of a cache, as the prefill of `generate()` is told it.

    The prefill subtracts it from the number of tokens that it was given, and takes the difference from their end. If no
    token is new, it would take all tokens, or tokens that the cache has seen.
    """

    cache: Counted

    @classmethod
    def of(cls, cache: Counted, seen: int) -> Self:
        """The length `seen` of a cache."""
        tokens = cls(seen)
        tokens.cache = cache
        return tokens

    def __rsub__(self, given: int) -> int:
        check_is_new(self.cache, int(self), given)
        return given - int(self)
