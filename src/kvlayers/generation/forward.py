"""The forward pass of a model while kvlayers is installed: the cache, name or tuples that it is given.

`PreTrainedModel.__call__` is what is replaced: it is the one method that every forward pass of every model goes
through, and it costs next to nothing at each token.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from kvlayers.caches.base import Cache
from kvlayers.generation import empty_caches, known_ids, legacy_tuples, registry
from kvlayers.generation.replacement import Replacement

_is_wanted: Callable[[], bool] | None = None


def accept(is_wanted: Callable[[], bool]) -> None:
    """From now on, look at the caches that models are given.

    Args:
        is_wanted: whether a forward pass goes by kvlayers, asked in its own thread.
    """
    global _is_wanted
    _is_wanted = is_wanted
    _replacement.put()


def refuse() -> None:
    """Take `accept` back."""
    global _is_wanted
    _is_wanted = None
    _replacement.take_back()


def _looking_at_caches(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Read once: another thread may uninstall kvlayers meanwhile.
        is_wanted = _is_wanted
        if is_wanted is None:
            return original(self, *args, **kwargs)
        past = kwargs.get(legacy_tuples.ARGUMENT)
        if past is None:
            past = kwargs.get("cache_params")
        if isinstance(past, tuple | list):
            return legacy_tuples.call(original, self, args, kwargs)
        for argument in args:
            if isinstance(argument, tuple | list):
                return legacy_tuples.call(original, self, args, kwargs)
        # Caches are prepared by eager code, before a model is compiled.
        if past is None or torch.compiler.is_compiling() or not is_wanted():
            return original(self, *args, **kwargs)
        return _with_cache(functools.partial(original, self), self, past, args, kwargs)

    return call


_replacement = Replacement(PreTrainedModel, "__call__", _looking_at_caches)


def _with_cache(
    forward: Callable[..., Any], model: Any, past: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if type(past) in empty_caches.KINDS:
        empty_caches.give_layers(past, model)
    elif isinstance(past, str):
        kwargs = {**kwargs, legacy_tuples.ARGUMENT: registry.make_cache(past, model)}
    else:
        ids = kwargs.get("input_ids", args[0] if args else None)
        # Not at each token of a loop.
        if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > 1 and isinstance(past, Cache):
            return known_ids.remember(past, ids, functools.partial(forward, *args, **kwargs))
    return forward(*args, **kwargs)
