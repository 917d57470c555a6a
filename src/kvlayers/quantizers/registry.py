"""Quantization backends by name: who makes the quantizers that `backend="..."` asks for."""

import functools
import importlib.metadata
import threading
from collections.abc import Callable
from typing import TypeVar

from kvlayers.errors import OptionError, RegistryError
from kvlayers.quantizers.contract import Backend

ENTRY_POINT_GROUP = "kvlayers.quantizers"
"""Entry points in this group are factories that other packages offer, under the entry point's name."""

BackendFactory = Callable[[], Backend]
Factory = TypeVar("Factory", bound=BackendFactory)

_factories: dict[str, BackendFactory] = {}
_changing = threading.Lock()


def register_quantizer(name: str) -> Callable[[Factory], Factory]:
    """Decorator that makes a factory, a class or function that returns a `Backend`, the maker of backend `name`.

    Raises:
        RegistryError: the name is empty or taken.
    """
    if not isinstance(name, str) or not name.strip():
        raise RegistryError(f"expected a name for the backend, but saw {name!r}: pass a string that is not empty.")
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
            f"expected a name that is free, but '{name}' is taken by {taken_by.__module__}: choose another, or "
            f"unregister_quantizer('{name}') first."
        )


def unregister_quantizer(name: str) -> None:
    """Forget a name.

    Raises:
        RegistryError: there is no such name.
    """
    if _factories.pop(name, None) is None:
        raise RegistryError(f"expected the name of a backend ({', '.join(quantizer_names())}), but saw {name!r}.")


def quantizer_names() -> list[str]:
    """Every name that `backend` knows, those of other packages' entry points included."""
    return sorted({*_factories, *(point.name for point in _entry_points())})


def backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        OptionError: there is no such name.
        RegistryError: what the name stands for does not return a backend.

    Example:
        >>> from kvlayers.quantizers import backend
        >>> backend("native").widths
        (2, 3, 4, 8)
    """
    made = _factory(name)()
    if not isinstance(made, Backend):
        raise RegistryError(
            f"expected the factory of '{name}' to return a Backend, but saw a {type(made).__name__}: correct the "
            "factory."
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
        f"expected the name of a quantization backend ({', '.join(quantizer_names())}), but saw {name!r}."
    )


@functools.cache
def _entry_points() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
