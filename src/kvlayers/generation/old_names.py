"""What transformers 4 had and later versions lack, put where old code looks for it: classes by name, and methods.

Only what is missing is put there, and what has a name and no use; all of it is taken back.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import transformers
from torch import Tensor

from .. import compat, legacy
from ..deprecation import warn_of_old_use
from ..errors import OptionError
from ..mamba_cache import HybridMambaAttentionDynamicCache, MambaCache
from ..offloaded_cache import OffloadedCache, OffloadedStaticCache
from ..quantized_cache import HQQQuantizedCache, QuantizedCacheConfig, QuantoQuantizedCache
from ..sink_cache import SinkCache
from ..static_cache import HybridCache, HybridChunkedCache, SlidingWindowCache
from .tuples import tuples_of, view_of

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

_lock = threading.RLock()
_homes: list["_Home"] = []
_methods: list["_Attribute"] = []
_explicit = False
_blocks = 0


def check_wanted(legacy_names: object) -> None:
    """Raise `OptionError` where `legacy_names` is neither true nor false."""
    if not isinstance(legacy_names, bool):
        raise OptionError(f"expected legacy_names to be True or False, but saw {legacy_names!r}.")


def offer() -> None:
    """Put the old names in place, until `withdraw`."""
    global _explicit
    with _lock:
        _explicit = True
        _put()


def withdraw() -> None:
    """Take the old names back, also inside of an `offered()` block."""
    global _explicit, _blocks
    with _lock:
        _explicit, _blocks = False, 0
        _take_back()


@contextmanager
def offered() -> Iterator[None]:
    """`offer()` for the length of a `with` block. Blocks nest and overlap: the last one to end withdraws."""
    global _blocks
    with _lock:
        _blocks += 1
        _put()
    try:
        yield
    finally:
        with _lock:
            _blocks = max(_blocks - 1, 0)
            if not _explicit and not _blocks:
                _take_back()


def _put() -> None:
    if _homes:
        return
    for module in HOMES:
        importlib.import_module(module)
    _homes.extend(_Home(sys.modules[module], names) for module, names in HOMES.items())
    if transformers is not sys.modules["transformers"]:
        # What models import executes transformers once more, as another module of that name; some have the first one.
        _homes.append(_Home(transformers, HOMES["transformers"]))
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
    """A value to read. Not a property: caches of model repositories assign attributes of these names.

    Args:
        read: makes it of a cache.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __get__(self, cache: Any, owner: type | None = None) -> Any:
        return self if cache is None else self._read(cache)


def _old_attributes() -> dict[type, dict[str, Any]]:
    """What the caches of the installed version of transformers lack."""
    cache: dict[str, Any] = {
        "__getitem__": lambda self, layer_idx: view_of(self)[layer_idx],
        "key_cache": _OldValue(lambda self: view_of(self).key_cache),
        "value_cache": _OldValue(lambda self: view_of(self).value_cache),
        "seen_tokens": _OldValue(lambda self: view_of(self).seen_tokens),
        "max_batch_size": _OldValue(lambda self: view_of(self).max_batch_size),
        "max_cache_len": _OldValue(lambda self: view_of(self).max_cache_len),
        "get_max_length": lambda self, layer_idx=None: view_of(self).get_max_length(layer_idx),
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
    if not compat.ITERATES_AS_PAIRS:
        for owner in (transformers.DynamicCache, transformers.EncoderDecoderCache):
            missing[owner]["__iter__"] = lambda self: iter(view_of(self))
    return missing


def _has(owner: type, name: str) -> bool:
    return any(name in vars(base) for base in owner.__mro__)


def _cropping_to_a_length(original: Callable[..., None]) -> Callable[..., None]:
    def crop(self: Any, tokens_to_remove: int) -> None:
        if tokens_to_remove <= 0:
            original(self, tokens_to_remove)
        elif tokens_to_remove < self.get_seq_length():
            original(self, tokens_to_remove - self.get_seq_length())

    return crop


def _dynamic_from_tuples(cls: Callable[[], Any], past_key_values: object = None) -> Any:
    cache = cls()
    _fill(cache, () if past_key_values is None else legacy.check_tuples(past_key_values, width=(2,)))
    return cache


def _encoder_decoder_from_tuples(cls: Callable[..., Any], past_key_values: object = None) -> Any:
    states = () if past_key_values is None else legacy.check_tuples(past_key_values, width=(2, 4))
    own, cross = transformers.DynamicCache(), transformers.DynamicCache()
    _fill(own, [layer[:2] for layer in states])
    _fill(cross, [layer[2:] for layer in states if layer[2:]])
    # It looks at what cross-attention holds to say which layers are updated.
    return cls(own, cross)


def _fill(cache: Any, pairs: "legacy.LegacyStates | list[tuple[Tensor, ...]]") -> None:
    for index, (keys, values) in enumerate(pairs):
        cache.update(keys, values, index)
