"""Notices that a model does not update the cache that a call of `generate()` was given.

A model that was written for an older version of transformers takes its cache by another name than `generate()` passes
it by. If it ignores arguments that it does not know, it decodes each token without those before it.
"""

import threading
import weakref
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from kvlayers.caches.forward_pass import PassStart
from kvlayers.errors import UnusedCacheError
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
