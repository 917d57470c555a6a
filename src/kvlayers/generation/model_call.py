"""The forward pass of a model while kvlayers is installed: it takes caches, cache names and legacy tuples.

`PreTrainedModel.__call__` is patched because every forward pass of every model goes through it, and because the patch
costs next to nothing per token.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.generation import empty_caches, known_ids, legacy_tuples, registry
from kvlayers.upstream import cache_argument

is_active: Callable[[], bool] | None = None
"""Whether kvlayers is to handle a forward pass, asked in the thread of that pass. `install` sets it, and resets it to
`None` when it is no longer in place: another library may still call the replacement underneath its own."""


def forward_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `PreTrainedModel.__call__`: looks at the caches that models are given."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Read once: another thread may uninstall kvlayers meanwhile.
        is_active_now = is_active
        if is_active_now is None:
            return original(self, *args, **kwargs)
        kwargs = cache_argument.respelled(self, kwargs)
        past = kwargs.get(cache_argument.name_for(self))
        # Eager code prepares caches before a model is compiled.
        is_compiling = torch.compiler.is_compiling()
        if not args and isinstance(past, Cache) and (is_compiling or not _is_prompt(kwargs.get("input_ids"))):
            return original(self, *args, **kwargs)
        if isinstance(past, tuple | list):
            return legacy_tuples.forward_with_tuples(original, self, args, kwargs)
        for argument in args:
            if isinstance(argument, tuple | list):
                return legacy_tuples.forward_with_tuples(original, self, args, kwargs)
        if past is None or is_compiling or not is_active_now():
            return original(self, *args, **kwargs)
        return _forward_with_cache(functools.partial(original, self), self, past, args, kwargs)

    return call


def _forward_with_cache(
    forward: Callable[..., Any], model: Any, past: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if type(past) in empty_caches.CLASSES:
        empty_caches.replace_layers(past, model)
    elif isinstance(past, str):
        kwargs = {**kwargs, cache_argument.name_for(model): registry.make_cache(past, model)}
    else:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if _is_prompt(ids) and isinstance(past, Cache):
            return known_ids.record_forward(past, ids, functools.partial(forward, *args, **kwargs))
    return forward(*args, **kwargs)


def _is_prompt(ids: Any) -> TypeGuard[Tensor]:
    """Whether token ids are to be recorded: those of a prompt, since a decode loop would pay for it at each token."""
    return isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > 1
