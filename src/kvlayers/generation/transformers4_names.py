"""What transformers 4 had and later versions lack, put where old code looks for it: classes by name, and methods.

Only what is missing is put there, and what has a name and no use; all of it is taken back.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import transformers
from torch import Tensor

from kvlayers.caches import legacy_api, nested_tuples
from kvlayers.caches.aliases import (
    HQQQuantizedCache,
    HybridCache,
    HybridChunkedCache,
    HybridMambaAttentionDynamicCache,
    MambaCache,
    OffloadedCache,
    OffloadedStaticCache,
    QuantoQuantizedCache,
    SlidingWindowCache,
)
from kvlayers.caches.legacy_api import LegacySurface
from kvlayers.caches.quantized import QuantizedCacheConfig
from kvlayers.caches.sink import SinkCache
from kvlayers.errors import OptionError
from kvlayers.generation.legacy_tuples import tuples_of, view_of
from kvlayers.generation.presence import Presence
from kvlayers.upstream import compat
from kvlayers.upstream.deprecation import warn_of_old_use
from kvlayers.upstream.first_import import AS_FIRST_IMPORTED

CLASSES: dict[str, type] = {
    old.__name__: old
    for old in (
        HQQQuantizedCache,
        HybridCache,
        HybridChunkedCache,
        HybridMambaAttentionDynamicCache,
        MambaCache,
        OffloadedCache,
        OffloadedStaticCache,
        QuantizedCacheConfig,
        QuantoQuantizedCache,
        SinkCache,
        SlidingWindowCache,
    )
}
"""Old classes that kvlayers has."""

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
"""Modules from which old code imports them, and which of them."""

_homes: list["_Home"] = []
_methods: list["_Attribute"] = []


def check_wanted(legacy_names: object) -> None:
    """Raise `OptionError` where `legacy_names` is neither true nor false."""
    if not isinstance(legacy_names, bool):
        raise OptionError(f"expected legacy_names to be True or False, but saw {legacy_names!r}.")


def _put() -> None:
    if _homes:
        return
    # Before anything is changed: it takes long, and may be interrupted.
    modules = {module: importlib.import_module(module) for module in HOMES}
    for module, names in HOMES.items():
        _homes.append(_Home(modules[module], names))
    if AS_FIRST_IMPORTED is not modules["transformers"]:
        _homes.append(_Home(AS_FIRST_IMPORTED, HOMES["transformers"]))
    for owner, attributes in _old_attributes().items():
        for name, value in attributes.items():
            _methods.append(_Attribute(owner, name, value))


def _take_back() -> None:
    for home in _homes:
        home.take_back()
    for method in _methods:
        method.take_back()
    _homes.clear()
    _methods.clear()


PRESENCE = Presence(_put, _take_back)
"""Whether the old names are in place."""


class _Home:
    """A module that is asked for old names. It answers by `__getattr__`, so that an import can say what to write.

    Args:
        module: the module, which may import what it has when it is first asked, as transformers does.
        names: names of old classes.
    """

    def __init__(self, module: ModuleType, names: tuple[str, ...]) -> None:
        self._module = module
        there = set(dir(module)).difference(compat.HOLLOW_CACHE_NAMES)
        self._names = {name for name in names if name not in there}
        held = vars(module)
        self._hidden = {name: held.pop(name) for name in self._names if name in held}
        self._before: Callable[[str], Any] | None = held.get("__getattr__")
        held["__getattr__"] = self

    def __call__(self, name: str) -> Any:
        if name in self._names:
            warn_of_old_use(f"{self._module.__name__}.{name}", f"write 'from kvlayers import {name}'")
            return CLASSES[name]
        if self._before is not None:
            return self._before(name)
        raise AttributeError(f"module '{self._module.__name__}' has no attribute '{name}'", name=name, obj=self._module)

    def take_back(self) -> None:
        held = vars(self._module)
        self._names = set()
        held.update({name: value for name, value in self._hidden.items() if name not in held})
        # Where another library has put one of its own over ours, ours stays underneath, and knows nothing.
        if held.get("__getattr__") is self:
            if self._before is None:
                del held["__getattr__"]
            else:
                held["__getattr__"] = self._before


class _Attribute:
    """An attribute that a class of transformers has for a while."""

    def __init__(self, owner: type, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value
        self._own = name in vars(owner)
        self._before = vars(owner).get(name)
        setattr(owner, name, value)

    def take_back(self) -> None:
        # Where another library has put one of its own over ours, that one stays.
        if vars(self._owner).get(self._name) is not self._value:
            return
        if self._own:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)


class _OldValue:
    """A value to read. What somebody assigns instead is what is read: caches of model repositories have their own.

    Args:
        name: of the value.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, cache: Any, owner: type | None = None) -> Any:
        if cache is None:
            return self
        own = vars(cache)
        return own[self._name] if self._name in own else getattr(view_of(cache), self._name)

    def __set__(self, cache: Any, value: Any) -> None:
        vars(cache)[self._name] = value

    def __delete__(self, cache: Any) -> None:
        if self._name not in vars(cache):
            raise AttributeError(f"'{type(cache).__name__}' has no {self._name} of its own", name=self._name, obj=cache)
        del vars(cache)[self._name]


class _OldStates(_OldValue):
    """The states of all layers as a list. One that is assigned goes into the layers, where there are any."""

    def __set__(self, cache: Any, value: Any) -> None:
        if vars(cache).get("layers"):
            setattr(view_of(cache), self._name, value)
        else:
            super().__set__(cache, value)


def _old_attributes() -> dict[type, dict[str, Any]]:
    """What the caches of the installed version of transformers lack."""
    cache: dict[str, Any] = {
        "__getitem__": lambda self, layer_idx: view_of(self)[layer_idx],
        "key_cache": _OldStates("key_cache"),
        "value_cache": _OldStates("value_cache"),
        **{name: _OldValue(name) for name in ("seen_tokens", "max_batch_size", "max_cache_len")},
        "get_max_cache_shape": lambda self, layer_idx=None: view_of(self).get_max_cache_shape(layer_idx),
        "get_usable_length": lambda self, new_seq_length, layer_idx=0: view_of(self).get_usable_length(
            new_seq_length, layer_idx
        ),
    }
    attributes = {
        transformers.Cache: cache,
        transformers.DynamicCache: {
            "to_legacy_cache": tuples_of,
            "from_legacy_cache": classmethod(_dynamic_from_tuples),
        },
        transformers.EncoderDecoderCache: {
            "to_legacy_cache": tuples_of,
            "from_legacy_cache": classmethod(_encoder_decoder_from_tuples),
        },
    }
    missing = {
        owner: {name: value for name, value in old.items() if not _has(owner, name)}
        for owner, old in attributes.items()
    }
    if compat.CROPS_BY_COUNT_ALONE:
        missing[transformers.Cache]["crop"] = _cropping_to_a_length(transformers.Cache.crop)
    # Old code takes the -1 of today for a maximum.
    missing[transformers.Cache]["get_max_length"] = _max_length_or_none
    missing[LegacySurface] = {"get_max_length": _max_length_or_none}
    if compat.RENAMED_MAXIMA:
        # It asks for the other one.
        missing[transformers.Cache]["get_max_cache_shape"] = cache["get_max_cache_shape"]
    if not compat.ITERATES_AS_PAIRS:
        for owner in (transformers.DynamicCache, transformers.EncoderDecoderCache):
            missing[owner]["__iter__"] = lambda self: iter(view_of(self))
    return missing


def _has(owner: type, name: str) -> bool:
    return any(name in vars(base) for base in owner.__mro__)


def _cropping_to_a_length(original: Callable[..., None]) -> Callable[..., None]:
    def crop(self: Any, tokens_to_remove: int | None = None, *, max_length: int | None = None) -> None:
        number = legacy_api.crop_argument(tokens_to_remove, max_length)
        if number <= 0:
            original(self, number)
        elif number < self.get_seq_length():
            original(self, number - self.get_seq_length())

    return crop


def _max_length_or_none(self: Any, layer_idx: int | None = None) -> int | None:
    most = view_of(self).most_tokens(layer_idx)
    return None if most < 0 else most


def _dynamic_from_tuples(cls: Callable[[], Any], past_key_values: object = None) -> Any:
    cache = cls()
    _fill(cache, () if past_key_values is None else nested_tuples.check_tuples(past_key_values, width=(2,)))
    return cache


def _encoder_decoder_from_tuples(cls: Callable[..., Any], past_key_values: object = None) -> Any:
    states = () if past_key_values is None else nested_tuples.check_tuples(past_key_values, width=(2, 4))
    own, cross = transformers.DynamicCache(), transformers.DynamicCache()
    _fill(own, [layer[:2] for layer in states])
    _fill(cross, [layer[2:] for layer in states if layer[2:]])
    # It looks at what cross-attention holds to say which layers are updated.
    return cls(own, cross)


def _fill(cache: Any, pairs: "nested_tuples.LegacyStates | list[tuple[Tensor, ...]]") -> None:
    for index, pair in enumerate(pairs):
        nested_tuples.check_is_whole(pair, index)
        cache.update(*pair, index)
