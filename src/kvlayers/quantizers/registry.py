"""Quantization backends by name, for the option `backend="..."`."""

from collections.abc import Callable
from typing import TypeVar

from kvlayers.errors import OptionError, RegistryError
from kvlayers.quantizers.contract import Backend
from kvlayers.utils.registry import Registry

ENTRY_POINT_GROUP = "kvlayers.quantizers"
"""Entry points in this group are factories in other packages. The entry point's name is the backend's name."""

BackendFactory = Callable[[], Backend]
Factory = TypeVar("Factory", bound=BackendFactory)

_backends: Registry[BackendFactory] = Registry("backend", ENTRY_POINT_GROUP, "unregister_quantizer")


def register_quantizer(name: str) -> Callable[[Factory], Factory]:
    """Decorator that registers a factory (a class or function that returns a `Backend`) as backend `name`.

    Raises:
        RegistryError: the name is empty or taken.
    """
    _backends.check_free(name)

    def add(factory: Factory) -> Factory:
        _backends.add(name, factory)
        return factory

    return add


def unregister_quantizer(name: str) -> None:
    """Remove a backend.

    Raises:
        RegistryError: the name is not registered.
    """
    if not _backends.remove(name):
        raise RegistryError(f"`name` must be that of a backend ({', '.join(quantizer_names())}), got {name!r}.")


def quantizer_names() -> list[str]:
    """All names of backends, including those of entry points in other packages."""
    return _backends.names()


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
    factory = _backends.get(name)
    if factory is None:
        raise OptionError(
            f"`backend` must be the name of a quantization backend ({', '.join(quantizer_names())}), got {name!r}."
        )
    made = factory()
    if not isinstance(made, Backend):
        raise RegistryError(
            f"The factory of '{name}' must return a Backend, got a {type(made).__name__}: correct the factory."
        )
    return made
