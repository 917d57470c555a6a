"""Notices that a model does not update the cache that a call of `generate()` was given.

A model that was written for an older version of transformers takes its cache by another name than `generate()` passes
it by. If it ignores arguments that it does not know, it decodes each token without those before it.
"""

import threading
import weakref
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from typing_extensions import Self

from kvlayers.caches.forward_pass import PassStart
from kvlayers.errors import InterruptedPassError, StateMismatchError, UnusedCacheError
from kvlayers.upstream import cache_argument


class Given(Protocol):
    """What is asked of a cache that `generate()` was given."""

    @property
    def is_compileable(self) -> bool:
        """Whether the forward pass may be compiled."""

    def newest_pass(self) -> PassStart | None:
        """Where the newest forward pass began, as far as it was not compiled; `None` before the first one."""


class GivenToGenerate:
    """A call of `generate()` that was given a cache.

    Args:
        cache: the cache.

    Attributes:
        is_measured: whether the call has asked for the length of the cache, which it does to find the new tokens.
    """

    def __init__(self, cache: Given) -> None:
        self.is_measured = False
        self._cache = weakref.ref(cache)
        self._hooks: list[Any] = []
        self._thread = 0
        self._began: PassStart | None = None
        self._model: nn.Module | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of the cache was not given to the call.
        return type(None), ()

    def measure(self) -> None:
        """Note that the call has asked for the length: the next model to be called takes in the prompt.

        That one pass is looked at by hooks on torch's modules. Compiled code would see them, so such passes are not.
        """
        self.is_measured = True
        cache = self._cache()
        if cache is None or not cache_argument.HAS_OLD_NAMES or cache.is_compileable:
            return
        self._thread, self._began = threading.get_ident(), cache.newest_pass()
        self._hooks = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
        ]

    def end(self) -> None:
        """Look at no further pass."""
        while self._hooks:
            self._hooks.pop().remove()

    def _before_module(self, module: nn.Module, args: object) -> None:
        if self._model is None and threading.get_ident() == self._thread and cache_argument.is_generator(module):
            self._model = module

    def _after_module(self, module: nn.Module, args: object, output: object) -> None:
        if module is not self._model or threading.get_ident() != self._thread:
            return
        self.end()
        cache, self._model = self._cache(), None
        # A pass that failed has no output.
        if output is not None and cache is not None and cache.newest_pass() is self._began:
            raise UnusedCacheError(
                "`generate()` must be given a cache that the model updates, got one that "
                f"{type(module).__name__} ignores, so that no token would see those before it: call "
                "kvlayers.install(), by which models written for another version of transformers get their cache."
            )


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
