"""Quantization backends by name, for the option `backend="..."`."""

from collections.abc import Callable
from typing import TypeVar

from kvlayers.quantizers.contract import Backend
from kvlayers.utils.registry import FactoryRegistry

ENTRY_POINT_GROUP = "kvlayers.quantizers"
"""Entry points in this group are factories in other packages. The entry point's name is the backend's name."""

Factory = TypeVar("Factory", bound=Callable[[], Backend])

_backends = FactoryRegistry("quantization backend", ENTRY_POINT_GROUP, "unregister_quantizer", Backend)  # type: ignore[type-abstract]


def register_quantizer(name: str) -> Callable[[Factory], Factory]:
    """Decorator that registers a factory (a class or function that returns a `Backend`) as backend `name`.

    Raises:
        RegistryError: the name is empty or taken.
    """
    return _backends.register(name)


def unregister_quantizer(name: str) -> None:
    """Remove a backend.

    Raises:
        RegistryError: the name is not registered.
    """
    _backends.remove(name)


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
        (1, 2, 3, 4, 5, 6, 8)
    """
    return _backends.make(name)
