"""Quantization backends by name: who makes the quantizers that `backend="..."` asks for."""

from collections.abc import Callable
from typing import TypeVar

from kvlayers.errors import OptionError, RegistryError
from kvlayers.quantizers.contract import Backend
from kvlayers.utils.registry import Registry

ENTRY_POINT_GROUP = "kvlayers.quantizers"
"""Entry points in this group are factories that other packages offer, under the entry point's name."""

BackendFactory = Callable[[], Backend]
Factory = TypeVar("Factory", bound=BackendFactory)

_backends: Registry[BackendFactory] = Registry("backend", ENTRY_POINT_GROUP, "unregister_quantizer")


def register_quantizer(name: str) -> Callable[[Factory], Factory]:
    """Decorator that makes a factory, a class or function that returns a `Backend`, the maker of backend `name`.

    Raises:
        RegistryError: the name is empty or taken.
    """
    _backends.check_free(name)

    def keep(factory: Factory) -> Factory:
        _backends.add(name, factory)
        return factory

    return keep


def unregister_quantizer(name: str) -> None:
    """Forget a name.

    Raises:
        RegistryError: there is no such name.
    """
    if not _backends.remove(name):
        raise RegistryError(f"expected the name of a backend ({', '.join(quantizer_names())}), but saw {name!r}.")


def quantizer_names() -> list[str]:
    """Every name that `backend` knows, those of other packages' entry points included."""
    return _backends.names()


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
    factory = _backends.get(name)
    if factory is None:
        raise OptionError(
            f"expected the name of a quantization backend ({', '.join(quantizer_names())}), but saw {name!r}."
        )
    made = factory()
    if not isinstance(made, Backend):
        raise RegistryError(
            f"expected the factory of '{name}' to return a Backend, but saw a {type(made).__name__}: correct the "
            "factory."
        )
    return made
