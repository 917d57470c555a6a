"""Classes and methods of transformers 4 that later versions lack, restored where old code looks for them.

Only missing ones are added, and ones that exist in name only. All of them can be removed again.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import transformers

from kvlayers.core import arguments, legacy_api
from kvlayers.core.cache import CACHE_CLASSES
from kvlayers.generation.legacy_tuples import kvlayers_view, to_tuples
from kvlayers.generation.patching import Activation, Patch
from kvlayers.quantized.quantized_cache import QuantizedCacheConfig
from kvlayers.upstream import compat
from kvlayers.upstream.callers import warn_of_old_use
from kvlayers.upstream.first_import import AS_FIRST_IMPORTED

_CACHES = (
    "HQQQuantizedCache",
    "HybridCache",
    "HybridChunkedCache",
    "HybridMambaAttentionDynamicCache",
    "MambaCache",
    "OffloadedCache",
    "OffloadedStaticCache",
    "QuantoQuantizedCache",
    "SinkCache",
    "SlidingWindowCache",
)
CLASSES: dict[str, type] = {
    "QuantizedCacheConfig": QuantizedCacheConfig,
    **{name: found for name in _CACHES if (found := CACHE_CLASSES.get(name)) is not None},
}
"""Classes of transformers 4 that kvlayers has, by name."""

HOMES: dict[str, tuple[str, ...]] = {
    "transformers": tuple(CLASSES),
    "transformers.cache_utils": tuple(CLASSES),
    **dict.fromkeys(
        (
            "transformers.models.mamba",
            "transformers.models.mamba.modeling_mamba",
            "transformers.models.falcon_mamba.modeling_falcon_mamba",
        ),
        ("MambaCache",),
    ),
    **dict.fromkeys(
        (
            "transformers.models.bamba.modeling_bamba",
            "transformers.models.granitemoehybrid.modeling_granitemoehybrid",
            "transformers.models.jamba.modeling_jamba",
        ),
        ("HybridMambaAttentionDynamicCache",),
    ),
}
"""Names of these classes, by the module from which old code imports them."""

_undo: list[Callable[[], object]] = []
"""What takes the changes back, in their order."""


def _apply() -> None:
    if _undo:
        return
    # Before anything is changed: imports take long, and may be interrupted.
    modules = {importlib.import_module(module): names for module, names in HOMES.items()}
    modules[AS_FIRST_IMPORTED] = HOMES["transformers"]
    for module, names in modules.items():
        missing = set(names) - (set(dir(module)) - set(compat.HOLLOW_CACHE_NAMES))
        attributes = vars(module)
        for name in missing & attributes.keys():
            # Out of the way meanwhile, and put back unless somebody has set another one.
            _undo.append(functools.partial(attributes.setdefault, name, attributes.pop(name)))
        _replace(module, "__getattr__", functools.partial(_providing, module, missing))
    for owner, old in _old_attributes().items():
        for name, value in old.items():
            _replace(owner, name, functools.partial(lambda value, replaced: value, value))


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    patch = Patch(owner, name, wrap)
    _undo.append(patch.remove)
    patch.apply()


def _remove() -> None:
    while _undo:
        _undo.pop()()


ACTIVATION = Activation(_apply, _remove)
"""When the old names are in place."""


def _providing(module: ModuleType, names: set[str], before: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """What a module is asked for names that it lacks, so that each import of an old one can be warned about.

    Args:
        module: the module, which may import its names lazily, as transformers does.
        names: names of old classes.
        before: what it was asked before, if anything.
    """

    def find(name: str) -> Any:
        # If another library has wrapped this function, it stays, and provides no names once they are taken back.
        if name in names and _undo:
            warn_of_old_use(f"{module.__name__}.{name}", f"write 'from kvlayers import {name}'")
            return CLASSES[name]
        if before is not None:
            return before(name)
        raise AttributeError(f"module '{module.__name__}' has no attribute '{name}'", name=name, obj=module)

    return find


class _OldValue:
    """An old attribute of caches. An assigned value takes precedence: caches of model repositories assign their own.

    Args:
        name: name of the attribute.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, cache: Any, owner: type | None = None) -> Any:
        return self if cache is None else getattr(kvlayers_view(cache), self._name)


class _OldStates(_OldValue):
    """The states of all layers as a list. An assigned list is written to the layers, if there are any."""

    def __get__(self, cache: Any, owner: type | None = None) -> Any:
        assigned = {} if cache is None else vars(cache)
        return assigned[self._name] if self._name in assigned else super().__get__(cache, owner)

    def __set__(self, cache: Any, value: Any) -> None:
        if vars(cache).get("layers"):
            setattr(kvlayers_view(cache), self._name, value)
        else:
            vars(cache)[self._name] = value

    def __delete__(self, cache: Any) -> None:
        del vars(cache)[self._name]


def _old_attributes() -> dict[type, dict[str, Any]]:
    """The attributes that the caches of the installed version of transformers lack, by class and name."""
    cache: dict[str, Any] = {
        "__getitem__": lambda self, layer_idx: kvlayers_view(self)[layer_idx],
        "key_cache": _OldStates("key_cache"),
        "value_cache": _OldStates("value_cache"),
        **{name: _OldValue(name) for name in ("seen_tokens", "max_batch_size", "max_cache_len")},
        "get_max_cache_shape": lambda self, layer_idx=None: kvlayers_view(self).get_max_cache_shape(layer_idx),
        "get_usable_length": lambda self, new_seq_length, layer_idx=0: kvlayers_view(self).get_usable_length(
            new_seq_length, layer_idx
        ),
    }
    attributes = {
        transformers.Cache: cache,
        transformers.DynamicCache: {
            "to_legacy_cache": to_tuples,
            "from_legacy_cache": classmethod(_dynamic_from_tuples),
        },
        transformers.EncoderDecoderCache: {
            "to_legacy_cache": to_tuples,
            "from_legacy_cache": classmethod(_encoder_decoder_from_tuples),
        },
    }
    missing = {
        owner: {name: value for name, value in old.items() if not any(name in vars(base) for base in owner.__mro__)}
        for owner, old in attributes.items()
    }
    if compat.CROPS_BY_COUNT_ALONE:
        missing[transformers.Cache]["crop"] = _cropping_to_a_length(transformers.Cache.crop)
    # Old code would take the -1 of later versions, which means "no maximum", for a length.
    missing[transformers.Cache]["get_max_length"] = _max_length_or_none
    missing[legacy_api.LegacySurface] = {"get_max_length": _max_length_or_none}
    if compat.RENAMED_MAXIMA:
        # It calls `get_max_length`, which is replaced here.
        missing[transformers.Cache]["get_max_cache_shape"] = cache["get_max_cache_shape"]
    if not compat.ITERATES_AS_PAIRS:
        for owner in (transformers.DynamicCache, transformers.EncoderDecoderCache):
            missing[owner]["__iter__"] = lambda self: iter(kvlayers_view(self))
    return missing


def _cropping_to_a_length(original: Callable[..., None]) -> Callable[..., None]:
    def crop(self: Any, tokens_to_remove: int | None = None, *, max_length: int | None = None) -> None:
        number = arguments.crop_argument(tokens_to_remove, max_length)
        if number <= 0:
            original(self, number)
        elif number < self.get_seq_length():
            original(self, number - self.get_seq_length())

    return crop


def _max_length_or_none(self: Any, layer_idx: int | None = None) -> int | None:
    most = kvlayers_view(self).most_tokens(layer_idx)
    return None if most < 0 else most


def _dynamic_from_tuples(cls: Callable[[], Any], past_key_values: object = None) -> Any:
    cache = cls()
    states = () if past_key_values is None else legacy_api.check_tuples(past_key_values, width=(2,))
    for index, pair in enumerate(states):
        legacy_api.check_is_whole(pair, index)
        cache.update(*pair, index)
    return cache


def _encoder_decoder_from_tuples(cls: Callable[..., Any], past_key_values: object = None) -> Any:
    states = () if past_key_values is None else legacy_api.check_tuples(past_key_values, width=(2, 4))
    parts = [layer[:2] for layer in states], [layer[2:] for layer in states if layer[2:]]
    # The pair reads from the cross-attention cache which layers are updated.
    return cls(*(_dynamic_from_tuples(transformers.DynamicCache, part) for part in parts))
