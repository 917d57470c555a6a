"""Names of caches, and the requests that they answer. Each kind registers its names where its class is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import transformers
from transformers import PretrainedConfig

from kvlayers.core.cache import CACHE_CLASSES, Cache
from kvlayers.core.preparation import left_padding_of
from kvlayers.errors import OptionError, RegistryError
from kvlayers.utils.registry import Registry

ENTRY_POINT_GROUP = "kvlayers.caches"
"""Entry points of this group are factories in other packages; the name of the entry point is that of the cache."""


@dataclass(frozen=True)
class CacheRequest:
    """What a factory knows about the cache that it is to make. Except for `config`, all of it may be unknown.

    Attributes:
        config: config of the model.
        options: what the user passed as `cache_config`, or to `make_cache`.
        batch_size: number of sequences, beams included.
        length_hint: the most tokens that are expected.
        device: device of the model.
        dtype: dtype of the model.
        encoder_length: tokens of the encoder's output, if the model has an encoder.
        attention_mask: mask of the prompt, `[batch, tokens]`, 0 for padding.
        layer_devices: device of each layer of the decoder, empty if all are on `device`.
    """

    config: PretrainedConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    length_hint: int | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    encoder_length: int | None = None
    attention_mask: torch.Tensor | None = None
    layer_devices: tuple[torch.device, ...] = ()


CacheFactory = Callable[[CacheRequest], transformers.Cache]
Factory = TypeVar("Factory", bound=CacheFactory)

_factories: Registry[CacheFactory] = Registry("cache", ENTRY_POINT_GROUP, "unregister")
_listeners: list[Callable[[], None]] = []


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorator: register a factory, `(CacheRequest) -> Cache`, for the caches called `name`.

    `make_cache(name, ...)` calls the factory, and under `install()` so does
    `generate(..., cache_implementation=name)`.

    Args:
        name: name of the cache.

    Raises:
        RegistryError: the name is empty or taken.

    Example:
        >>> import kvlayers
        >>> @kvlayers.register("roomy")
        ... def roomy(request):
        ...     return kvlayers.StaticCache(request.config, max_cache_len=4096, **request.options)
        >>> "roomy" in kvlayers.cache_names()
        True
        >>> kvlayers.unregister("roomy")
    """
    _factories.check_free(name)

    def add(factory: Factory) -> Factory:
        _factories.add(name, factory)
        _notify_listeners()
        return factory

    return add


def unregister(name: str) -> None:
    """Remove a name.

    Raises:
        RegistryError: the name is not registered.
    """
    _factories.remove(name)
    _notify_listeners()


def cache_names() -> list[str]:
    """Every name that `make_cache` accepts, entry points of other packages included, in alphabetical order."""
    return _factories.names()


def is_registered(name: str) -> bool:
    """Whether `make_cache` accepts a name."""
    return name in _factories


factory_of = _factories.get
"""The factory of the caches called by a name, `None` for an unknown name."""


on_change = _listeners.append
"""Let a function be called whenever a name is registered or removed."""


def unknown(name: object) -> RegistryError:
    """The error for a name that is not registered, which lists the names that are."""
    return RegistryError(_factories.unknown(name))


def _notify_listeners() -> None:
    for listener in _listeners:
        listener()


def named(
    kind: type[Cache],
    hint: str = "",
    defaults: Mapping[str, Any] = MappingProxyType({}),
    fixed: Mapping[str, Any] = MappingProxyType({}),
    general: str = "",
) -> CacheFactory:
    """A factory: which class makes the cache, and with which options.

    Args:
        kind: the class.
        hint: the option that is the length hint unless the request says otherwise; "" for a class without one.
        defaults: options that the request may change.
        fixed: options that the name says, so that the request must not say otherwise.
        general: the name of a cache of this class whose options are all free.
    """

    def make(request: CacheRequest) -> Cache:
        for option, value in fixed.items():
            if request.options.get(option, value) != value:
                raise OptionError(
                    f"`{option}` is {value!r} for a cache of this name, got {request.options[option]!r}: use the name "
                    f"{general!r}, or leave the option out."
                )
        options = {**defaults, **fixed}
        if hint:
            options[hint] = request.length_hint
        if kind.learns_padding and request.attention_mask is not None:
            options["left_padding"] = left_padding_of(request.attention_mask)
        return kind(**{**options, **request.options, "config": request.config})

    return make


register_cache_class = CACHE_CLASSES.register
"""Let caches of a class, which derives from `Cache`, be loaded from files.

A class whose initialiser sets attributes of its own adds their values to `describe`, and sets them in
`from_description` too.
"""

unregister_cache_class = CACHE_CLASSES.remove
"""Remove a class of caches from the registry, by its name."""

cache_class_names = CACHE_CLASSES.names
"""The names of all registered classes of caches, including those of entry points in other packages."""
