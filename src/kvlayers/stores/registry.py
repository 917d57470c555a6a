"""Stores by name: the classes that may be made from a file."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

from kvlayers.errors import RegistryError
from kvlayers.stores.contract import STORE_CLASSES, TokenStore
from kvlayers.stores.description import DescriptionContext, Facts

Store = TypeVar("Store", bound=type[TokenStore])


@overload
def register_store(store_class: Store, *, name: str | None = None) -> Store: ...


@overload
def register_store(store_class: None = None, *, name: str | None = None) -> Callable[[Store], Store]: ...


def register_store(store_class: Any = None, *, name: str | None = None) -> Any:
    """Allow layers with a store of this class to be saved and loaded. Use it as a decorator or call it.

    Args:
        store_class: the class, derived from `TokenStore`.
        name: its name in files, by default the name of the class.

    Raises:
        RegistryError: the name is taken, or the class lacks a member of the contract, which is named.
    """
    if store_class is None:
        return lambda decorated: register_store(decorated, name=name)
    STORE_CLASSES.register(store_class, name)
    return store_class


def unregister_store(name: str) -> None:
    """Remove a store.

    Raises:
        RegistryError: no store is registered by this name.
    """
    STORE_CLASSES.remove(name)


def store_names() -> list[str]:
    """All stores that a file may name, including those of entry points in other packages."""
    return STORE_CLASSES.names()


def store_class_of(facts: Facts) -> type[TokenStore] | None:
    """The class of the store that a layer's facts describe; `None` if the layer makes its own.

    Raises:
        RegistryError: no store is registered by the name in the facts.
    """
    if "store" not in facts:
        return None
    found = STORE_CLASSES.get(facts["store"])
    if found is None:
        unknown = STORE_CLASSES.unknown(facts["store"])
        raise RegistryError(f"{unknown} Import the package that registers it, or call register_store().")
    return found


def store_from_description(facts: Facts, context: DescriptionContext) -> TokenStore | None:
    """The empty store that a layer's facts describe; `None` if the layer makes its own. Raises as `store_class_of`."""
    store_class = store_class_of(facts)
    return None if store_class is None else store_class.from_description(facts, context)
