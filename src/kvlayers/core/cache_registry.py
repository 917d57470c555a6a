"""The registry of classes of caches: which of them a file may name."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

from kvlayers.core.cache import CACHE_CLASSES, Cache

CacheClass = TypeVar("CacheClass", bound=type[Cache])


@overload
def register_cache_class(cache_class: CacheClass, *, name: str | None = None) -> CacheClass: ...


@overload
def register_cache_class(
    cache_class: None = None, *, name: str | None = None
) -> Callable[[CacheClass], CacheClass]: ...


def register_cache_class(cache_class: Any = None, *, name: str | None = None) -> Any:
    """Let caches of this class be loaded from files, as a decorator or by a call.

    A class whose initialiser sets attributes of its own adds their values to `describe`, and sets them in
    `from_description` too.

    Args:
        cache_class: the class, derived from `Cache`.
        name: its name in files; the name of the class if it is not given.

    Raises:
        RegistryError: the name is taken, or it is not a class of caches.
    """
    if cache_class is None:
        return lambda decorated: register_cache_class(decorated, name=name)
    CACHE_CLASSES.register(cache_class, name)
    return cache_class


def unregister_cache_class(name: str) -> None:
    """Remove a class of caches from the registry.

    Raises:
        RegistryError: no class is registered by this name.
    """
    CACHE_CLASSES.remove(name)


def cache_class_names() -> list[str]:
    """The names of all registered classes of caches, including those of entry points in other packages."""
    return CACHE_CLASSES.names()
