"""Quantization backends by name, for the option `backend="..."`."""

import functools
import importlib.metadata
import threading
from collections.abc import Callable
from typing import TypeVar

from kvlayers.errors import OptionError, RegistryError
from kvlayers.quantizers.contract import Backend

ENTRY_POINT_GROUP = "kvlayers.quantizers"
"""Entry points in this group are factories in other packages. The entry point's name is the backend's name."""

BackendFactory = Callable[[], Backend]
Factory = TypeVar("Factory", bound=BackendFactory)

_factories: dict[str, BackendFactory] = {}
_changing = threading.Lock()


def register_quantizer(name: str) -> Callable[[Factory], Factory]:
    """Decorator that registers a factory (a class or function that returns a `Backend`) as backend `name`.

    Raises:
        RegistryError: the name is empty or taken.
    """
    if not isinstance(name, str) or not name.strip():
        raise RegistryError(f"`name` of a backend must be a string that is not empty, got {name!r}.")
    _check_free(name)

    def keep(factory: Factory) -> Factory:
        with _changing:
            # Another thread may have taken it since.
            _check_free(name)
            _factories[name] = factory
        return factory

    return keep


def _check_free(name: str) -> None:
    taken_by = _factories.get(name)
    if taken_by is not None:
        raise RegistryError(
            f"The name '{name}' is taken by {taken_by.__module__}: choose another one, or call "
            f"unregister_quantizer('{name}') first."
        )


def unregister_quantizer(name: str) -> None:
    """Remove a backend.

    Raises:
        RegistryError: the name is not registered.
    """
    if _factories.pop(name, None) is None:
        raise RegistryError(f"`name` must be that of a backend ({', '.join(quantizer_names())}), got {name!r}.")


def quantizer_names() -> list[str]:
    """All names of backends, including those of entry points in other packages."""
    return sorted({*_factories, *(point.name for point in _entry_points())})


def backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        OptionError: no backend has this name.
        RegistryError: the factory with this name does not return a backend.

    Example:
        >>> from kvlayers.quantizers import backend
        >>> backend("native").widths
        (2, 3, 4, 8)
    """
    made = _factory(name)()
    if not isinstance(made, Backend):
        raise RegistryError(
            f"The factory of '{name}' must return a Backend, got a {type(made).__name__}: correct the factory."
        )
    return made


def _factory(name: str) -> BackendFactory:
    registered = _factories.get(name) if isinstance(name, str) else None
    if registered is not None:
        return registered
    for point in _entry_points():
        if point.name == name:
            factory: BackendFactory = point.load()
            return factory
    raise OptionError(
        f"`backend` must be the name of a quantization backend ({', '.join(quantizer_names())}), got {name!r}."
    )


@functools.cache
def _entry_points() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
