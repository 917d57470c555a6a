"""Cache names that only kvlayers knows, in a `GenerationConfig`: accepted, saved and loaded.

transformers refuses to load a config with a cache name that it does not know. Such a name, and the options of its
cache, are therefore saved in a separate field, which transformers loads and ignores. kvlayers reads it if installed.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import transformers.generation.configuration_utils as configuration

from kvlayers.generation import registry
from kvlayers.upstream.deprecation import warn_the_caller

FIELD = "kvlayers"
"""The separate field, a dict of `OPTIONS`."""

OPTIONS = ("cache_implementation", "cache_config")

CONTINUOUS_BATCHING = "paged"
"""A name that asks `generate()` for another way of batching, rather than for a cache."""

_added_names: tuple[str, ...] = ()
_lock = threading.Lock()


def accept_names(list_names: Callable[[], list[str]]) -> None:
    """Let a `GenerationConfig` accept more names, besides those of transformers and of other libraries.

    Args:
        list_names: returns all names that kvlayers adds now; the names that it added before are removed.
    """
    global _added_names
    with _lock:
        other_names = tuple(name for name in configuration.ALL_CACHE_IMPLEMENTATIONS if name not in _added_names)
        _added_names = tuple(name for name in list_names() if name not in other_names)
        configuration.ALL_CACHE_IMPLEMENTATIONS = other_names + _added_names


def check_name(name: str) -> None:
    """Raise `RegistryError` if `generate()` does not know the cache name `name`."""
    if name not in (*configuration.ALL_CACHE_IMPLEMENTATIONS, CONTINUOUS_BATCHING):
        raise registry.unknown_name(name)


def init(original: Callable[..., None]) -> Callable[..., None]:
    """For `GenerationConfig.__init__`: take over the name in the separate field."""

    def init(self: Any, **kwargs: Any) -> None:
        original(self, **kwargs)
        name, options = _saved(self)
        if name is not None and registry.is_registered(name):
            del vars(self)[FIELD]
            _use(self, name, options)

    return init


def save_pretrained(original: Callable[..., None]) -> Callable[..., None]:
    """For `GenerationConfig.save_pretrained`: write the name and the options into the separate field."""

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        name = self.cache_implementation
        if name not in _added_names:
            original(self, *args, **kwargs)
            return
        moved = {option: vars(self)[option] for option in OPTIONS if vars(self)[option] is not None}
        written = copy.copy(self)
        # transformers loads a config that comes from a model config without fields that it does not know.
        vars(written).update({**dict.fromkeys(OPTIONS), FIELD: moved, "_from_model_config": False})
        original(written, *args, **kwargs)
        warn_the_caller(
            f"transformers does not know the cache {name!r}, so the saved GenerationConfig has this name in the field "
            f"{FIELD!r}: the model can be loaded anywhere, and uses this cache where kvlayers is installed "
            "(kvlayers.install())."
        )

    return save_pretrained


def use_saved_name(config: Any) -> None:
    """Apply the separate field of a config that was loaded before kvlayers was installed.

    Raises:
        RegistryError: the name is not registered.
    """
    name, options = _saved(config)
    if name is not None and config.cache_implementation is None:
        if not registry.is_registered(name):
            raise registry.unknown_name(name)
        _use(config, name, options)


def _saved(config: Any) -> tuple[str | None, Any]:
    field = vars(config).get(FIELD)
    # Anybody may have written a field of this name.
    name = field.get("cache_implementation") if isinstance(field, dict) else None
    return (name, field.get("cache_config")) if isinstance(name, str) else (None, None)


def _use(config: Any, name: str, options: Any) -> None:
    if config.cache_implementation is None:
        config.cache_implementation = name
        if config.cache_config is None:
            config.cache_config = options
