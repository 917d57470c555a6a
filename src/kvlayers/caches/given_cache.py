"""Notices that a model never updates the cache that a call of `generate()` was given.

A model that was written for an older version of transformers takes its cache by another name than `generate()` passes
it by. If it ignores arguments that it does not know, it decodes each token without those before it.
"""

import threading
import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from kvlayers.caches.forward_pass import PassStart
from kvlayers.errors import UnusedCacheError
from kvlayers.upstream import cache_argument


class Given(Protocol):
    """What is asked of a cache that `generate()` was given."""

    def newest_pass(self) -> PassStart | None:
        """Where the newest forward pass began, as far as it was not compiled; `None` before the first one."""

    def _token_count(self) -> int: ...


class GivenToGenerate:
    """A call of `generate()` that was given a cache.

    Until the first forward pass of the model has ended, a hook on torch's modules looks at what the pass returns.

    Args:
        cache: the cache.

    Attributes:
        is_measured: whether the call has asked for the length of the cache, which it does to find the new tokens.
    """

    def __init__(self, cache: Given) -> None:
        self.is_measured = False
        self._cache = weakref.ref(cache)
        self._began, self._seen = cache.newest_pass(), cache._token_count()
        self._thread = threading.get_ident()
        self._passes: dict[int, Any] = {}
        self._hook = register_module_forward_hook(self._after_module) if cache_argument.HAS_OLD_NAMES else None

    def __deepcopy__(self, memo: object) -> None:
        """Nothing: a copy was not given to the call."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def check_previous(self) -> None:
        """Raise `UnusedCacheError` if a model has not updated the cache since it was given."""
        if not self._is_updated():
            raise _unused()

    def end(self) -> None:
        """Look at no further pass."""
        if self._hook is not None:
            self._hook.remove()

    def _is_updated(self) -> bool:
        cache = self._cache()
        return cache is None or cache.newest_pass() is not self._began or cache._token_count() != self._seen

    # A draft model may run first. It decodes with one cache of its own, and returns the same one each time.
    def _after_module(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if not cache_argument.is_output_of_generator(module, output):
            return
        if self._is_updated():
            self.end()
            return
        returned = cache_argument.in_output(output)
        if id(module) in self._passes and (returned is None or returned is not self._passes[id(module)]):
            self.end()
            raise _unused()
        self._passes[id(module)] = returned


def _unused() -> UnusedCacheError:
    return UnusedCacheError(
        "`generate()` must be given a cache that the model updates, got a model that ignores it and sees no token "
        "before the newest: call kvlayers.install(), by which models written for another version of transformers get "
        "their cache. If an earlier call with this cache failed, reset() the cache."
    )
