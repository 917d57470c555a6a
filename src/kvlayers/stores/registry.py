"""Stores by name: which classes may be made from a file."""

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
    """Let layers over a store of this class be saved and loaded, as a decorator or by a call.

    Args:
        store_class: the class, derived from `TokenStore`.
        name: the name that files know it by, that of the class if not given.

    Raises:
        RegistryError: the name is taken, or the class lacks a member of the contract, which is named.
    """
    if store_class is None:
        return lambda decorated: register_store(decorated, name=name)
    STORE_CLASSES.register(store_class, name)
    return store_class


def unregister_store(name: str) -> None:
    """Forget a name.

    Raises:
        RegistryError: no store is registered by it.
    """
    if not STORE_CLASSES.remove(name):
        raise _unknown(name)


def store_names() -> list[str]:
    """Every store that a file may name, those of other packages' entry points included."""
    return STORE_CLASSES.names()


def store_class_of(facts: Facts) -> type[TokenStore] | None:
    """The class of the store that a layer's facts describe; `None` if the layer makes its own.

    Raises:
        RegistryError: no store is registered by the name that they have.
    """
    if "store" not in facts:
        return None
    found = STORE_CLASSES.get(facts["store"])
    if found is None:
        raise _unknown(facts["store"])
    return found


def store_from_description(facts: Facts, context: DescriptionContext) -> TokenStore | None:
    """The empty store that a layer's facts describe; `None` if the layer makes its own. Raises as `store_class_of`."""
    store_class = store_class_of(facts)
    return None if store_class is None else store_class.from_description(facts, context)


def _unknown(name: object) -> RegistryError:
    return RegistryError(
        f"expected the name of a store ({', '.join(store_names())}), but saw {name!r}: import the package that has it, "
        "or register_store() it."
    )
