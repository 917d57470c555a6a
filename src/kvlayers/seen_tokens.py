"""How many tokens a cache has seen, beside how many `generate()` was given."""

from .errors import StateMismatchError


def check_is_new(held: int, given: int) -> None:
    """Raise `StateMismatchError` if a sequence of `given` tokens does not go on from the `held` ones of a cache.

    transformers takes the new tokens by counting from the end of what it is given, and would take other tokens.
    """
    if given <= held and held:
        raise StateMismatchError(
            f"expected the whole sequence, of which the cache has seen {held} tokens already, but saw {given}: pass "
            "all of it as input_ids, or new tokens alone with an attention_mask for all (a cache with a window needs "
            "no cropped input), or crop() or reset() the cache."
        )


class SeenTokens(int):
    """The length of a cache, as the prefill of `generate()` is told it.

    The prefill subtracts it from the number of tokens that it was given, and takes so many from their end. If no token
    is new, it would take all of them, or some that the cache has seen.
    """

    def __rsub__(self, given: int) -> int:
        check_is_new(int(self), given)
        return given - int(self)
