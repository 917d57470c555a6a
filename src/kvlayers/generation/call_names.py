"""Which cache a call of `generate()` gets: the one that it names, that its config was saved with, or the default.

transformers refuses to load a config with a cache name that it does not know. Such a name, and the options of its
cache, are therefore saved in a separate field, which transformers loads and ignores. kvlayers reads it if installed.
"""

import contextlib
import copy
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import transformers
import transformers.generation.configuration_utils as configuration

from kvlayers.core import named_caches
from kvlayers.core.named_caches import CacheRequest
from kvlayers.errors import ConfigError, KVLayersError
from kvlayers.generation import cache_by_name
from kvlayers.generation.passed_caches import check_rope_dtype
from kvlayers.generation.patching import ScopedValue
from kvlayers.upstream.callers import warn_the_caller

logger = logging.getLogger(__name__)

FIELD = "kvlayers"
"""The separate field, a dict of `OPTIONS`."""

OPTIONS = ("cache_implementation", "cache_config")

CONTINUOUS_BATCHING = "paged"
"""A name that asks `generate()` for another way of batching, rather than for a cache."""


class DefaultCache:
    """A name of a cache for calls that give none, by any model that such a cache suits.

    Args:
        text: a name, which may have options behind a colon, as in "sink:window_length=512".

    Raises:
        RegistryError: the name is not registered.
        OptionError: `text` is not a text, or the cache lacks such an option, or needs one that is missing.
    """

    def __init__(self, text: str) -> None:
        self.named = named = cache_by_name.requested_cache(text, None)
        self._suits: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # An option that does not exist is an error now. Another model may suit the cache better than this one.
        with contextlib.suppress(ConfigError):
            cache_by_name.cache_for(named.name, CacheRequest(transformers.LlamaConfig(), named.options, length_hint=1))

    def suits(self, model: Any) -> bool:
        """Whether a model can have such a cache. If not, the log says so once."""
        if model not in self._suits:
            try:
                if not model._supports_default_dynamic_cache():
                    raise ConfigError("the model makes its own cache.")
                request = cache_by_name.request_of(model, self.named.options, length_hint=1)
                check_rope_dtype(model, cache_by_name.cache_for(self.named.name, request))
                self._suits[model] = True
            except KVLayersError as reason:
                self._suits[model] = False
                name = type(model).__name__
                logger.warning("Calls of %s go on without the cache '%s': %s", name, self.named.name, reason)
        return self._suits[model]


DEFAULT: ScopedValue[DefaultCache | None] = ScopedValue("cache of calls that name none", None)
"""The option `cache` of `install()`."""

_added_names: tuple[str, ...] = ()
_accepted: tuple[str, ...] = ()
_lock = threading.Lock()


def are_accepted() -> bool:
    """Whether `accept_names` has added names, and they are still there."""
    return bool(_added_names) and configuration.ALL_CACHE_IMPLEMENTATIONS is _accepted


def accept_names(list_names: Callable[[], list[str]]) -> None:
    """Let a `GenerationConfig` accept more names, besides those of transformers and of other libraries.

    Args:
        list_names: returns all names that kvlayers adds now; the names that it added before are removed.
    """
    global _added_names, _accepted
    with _lock:
        other_names = tuple(name for name in configuration.ALL_CACHE_IMPLEMENTATIONS if name not in _added_names)
        _added_names = tuple(name for name in list_names() if name not in other_names)
        configuration.ALL_CACHE_IMPLEMENTATIONS = _accepted = other_names + _added_names


def requested_name(arguments: Mapping[str, Any]) -> str | None:
    """The cache name that a call of `generate()` asks for itself, by an argument or in the config that it is given.

    Args:
        arguments: arguments of `generate()` by their names.

    Raises:
        RegistryError: `generate()` does not know the name.
    """
    name: str | None = arguments.get("cache_implementation")
    given = arguments.get("generation_config")
    if name is None and given is not None:
        name = given.cache_implementation
    if name not in (None, *configuration.ALL_CACHE_IMPLEMENTATIONS, CONTINUOUS_BATCHING):
        raise cache_by_name.unknown_name(name)
    return name


def resolve_name(model: Any, config: Any, requested: str | None, is_given_a_cache: bool) -> None:
    """Let the config that transformers has made for a call say which cache the call gets.

    transformers drops the name "hybrid" even if the call asks for it, and does not know of the separate field. A call
    that says nothing gets the default of `install()`, except for draft models.

    Args:
        model: the model.
        config: the `GenerationConfig` of the call, which is changed.
        requested: as `requested_name` returned it.
        is_given_a_cache: whether the call has a cache already.

    Raises:
        RegistryError: the saved name is not registered.
    """
    if config.cache_implementation is None:
        config.cache_implementation = requested
    if config.cache_implementation is not None or is_given_a_cache:
        return
    # The separate field is left in a config that was loaded before kvlayers was installed.
    name, options = _saved(config)
    default = DEFAULT.get()
    if name is not None:
        if not named_caches.is_registered(name):
            raise cache_by_name.unknown_name(name)
        _use(config, name, options)
        return
    says_nothing = config.cache_config is None and config.use_cache is not False and not config.is_assistant
    if default is not None and says_nothing and default.suits(model):
        _use(config, default.named.name, dict(default.named.options) or None)


class SavedName:
    """The separate field as an attribute of `GenerationConfig`: a config that is loaded takes over the name in it.

    Args:
        takes_over: whether a config whose field is set now takes over the name.
    """

    def __init__(self, takes_over: Callable[[], bool]) -> None:
        self._takes_over = takes_over

    def __get__(self, config: Any, owner: type) -> Any:
        if config is None:
            return self
        try:
            return vars(config)[FIELD]
        except KeyError:
            raise AttributeError(FIELD) from None

    def __set__(self, config: Any, field: Any) -> None:
        vars(config)[FIELD] = field
        name, options = _saved(config)
        if name is not None and named_caches.is_registered(name) and self._takes_over():
            del vars(config)[FIELD]
            if config.cache_implementation is None:
                _use(config, name, options)

    def __delete__(self, config: Any) -> None:
        del vars(config)[FIELD]


def save_pretrained(original: Callable[..., None]) -> Callable[..., None]:
    """For `GenerationConfig.save_pretrained`: write the name and the options into the separate field."""

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        name = self.cache_implementation
        if name not in _added_names:
            original(self, *args, **kwargs)
            return
        moved = {option: vars(self)[option] for option in OPTIONS if vars(self)[option] is not None}
        written = copy.copy(self)
        # transformers loads a config that comes from a model config without fields that it does not know. So what it
        # notes of the origin of a config is taken from one that comes from nowhere.
        origin = {note: value for note, value in vars(configuration.GenerationConfig()).items() if note.startswith("_")}
        vars(written).update({**origin, **dict.fromkeys(OPTIONS), FIELD: moved})
        original(written, *args, **kwargs)
        warn_the_caller(
            f"transformers does not know the cache {name!r}, so the saved GenerationConfig has this name in the field "
            f"{FIELD!r}: the model can be loaded anywhere, and uses this cache where kvlayers is installed "
            "(kvlayers.install())."
        )

    return save_pretrained


def _saved(config: Any) -> tuple[str | None, Any]:
    field = vars(config).get(FIELD)
    # Anybody may have written a field of this name.
    name = field.get("cache_implementation") if isinstance(field, dict) else None
    return (name, field.get("cache_config")) if isinstance(name, str) else (None, None)


def _use(config: Any, name: str, options: Any) -> None:
    config.cache_implementation = name
    if config.cache_config is None:
        config.cache_config = options
