"""Notices that a model never updates the cache that a call of `generate()` was given."""

from dataclasses import dataclass

from kvlayers.caches.forward_pass import PassStart
from kvlayers.errors import UnusedCacheError

MOST_QUESTIONS = 4
"""How often `generate()` may ask whether it can compile around a cache before the model updates it, or makes a mask for
it. It asks once for the call and once for each token."""


@dataclass(slots=True)
class GivenToGenerate:
    """What a cache knows of the call of `generate()` that it was given to.

    Attributes:
        began: the newest forward pass before the call.
        seen: tokens seen before the call.
        questions: how often it was asked in a row whether the model can be compiled around it.
        is_measured: whether the call has asked for its length, which it does to find the new tokens.
    """

    began: PassStart | None
    seen: int
    questions: int = 0
    is_measured: bool = False

    def is_updated(self, began: PassStart | None, seen: int) -> bool:
        """Whether the model has updated the cache.

        Args:
            began: the newest forward pass now. It is not known of passes that were compiled.
            seen: tokens seen now.
        """
        return began is not self.began or seen != self.seen

    def count_question(self, began: PassStart | None) -> None:
        """Count a question that `generate()` asks for each token.

        Raises:
            UnusedCacheError: there were too many of them for a model that uses the cache.
        """
        self.questions += 1
        if self.questions > MOST_QUESTIONS and began is self.began:
            raise unused_cache()


def unused_cache() -> UnusedCacheError:
    """The error for a cache that was passed to `generate()`, and that the model has not updated."""
    return UnusedCacheError(
        "`generate()` was given this cache, but the model has not updated it, so the tokens are those of a model that "
        "sees one token at a time, or of one that has no cache: call kvlayers.install(), by which models written for "
        "another version of transformers get their cache, or update the model's code. If the call ended by an error "
        "of its own, reset() the cache."
    )
