"""Models that were written for an older name of the cache argument, and would never see what `generate()` passes them.

Their forward passes get the cache by the name that they take (`model_call.py`). Classes with a method of their own that
prepares the inputs of a forward pass get it there as well, in place of a name that the method does not know.
"""

import functools
import inspect
import threading
from typing import Any

from transformers.generation.utils import GenerationMixin

from kvlayers.generation.patching import Method, Patch
from kvlayers.upstream import cache_argument

METHOD = "prepare_inputs_for_generation"

_lock = threading.Lock()
_patches: dict[type, Patch] = {}


def hand_over_cache(model: Any) -> None:
    """Let a model that keeps an old name get the cache of `generate()`, until `remove_patches`."""
    owner = type(model)
    if not cache_argument.keeps_an_old_name(model) or getattr(owner, METHOD) is getattr(GenerationMixin, METHOD):
        return
    with _lock:
        if owner not in _patches:
            _patches[owner] = Patch(owner, METHOD, functools.partial(_respelling, cache_argument.name_for(model)))
        _patches[owner].apply()


def remove_patches() -> None:
    """Undo `hand_over_cache` for all classes."""
    with _lock:
        for patch in _patches.values():
            patch.remove()
        _patches.clear()


def _respelling(old: str, original: Method) -> Method:
    @functools.wraps(original)
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **cache_argument.respelled(self, kwargs))

    # transformers reads in the signature what a call of generate() may pass.
    signature = inspect.signature(original)
    new = cache_argument.usual_name()
    parameters = [each.replace(name=new) if each.name == old else each for each in signature.parameters.values()]
    prepare_inputs.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return prepare_inputs
