"""The registry of layers: which classes a file may name."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from kvlayers.core.description import DescriptionContext, Fact, Facts
from kvlayers.core.layer_operations import LAYER_CLASSES, LayerOperations
from kvlayers.core.token_store import store_from_description
from kvlayers.errors import RegistryError
from kvlayers.rope.rotary import Rotary

Layer = TypeVar("Layer", bound=type[LayerOperations])


@overload
def register_layer(layer_class: Layer, *, name: str | None = None) -> Layer: ...


@overload
def register_layer(layer_class: None = None, *, name: str | None = None) -> Callable[[Layer], Layer]: ...


def register_layer(layer_class: Any = None, *, name: str | None = None) -> Any:
    """Let layers of this class be loaded from files, as a decorator or by a call.

    Args:
        layer_class: the class, derived from `CacheLayer`, or from `TokenLayer`.
        name: its name in files; the name of the class if it is not given.

    Raises:
        RegistryError: the name is taken, or the class lacks a member of the contract. The error names the member.

    Example:
        >>> import kvlayers
        >>> @kvlayers.layers.register_layer
        ... class PatientLayer(kvlayers.DynamicLayer):
        ...     pass
        >>> "PatientLayer" in kvlayers.layers.layer_names()
        True
        >>> kvlayers.layers.unregister_layer("PatientLayer")
    """
    return LAYER_CLASSES.register(layer_class, name)


def unregister_layer(name: str) -> None:
    """Remove a class of layers from the registry.

    Raises:
        RegistryError: no class is registered by this name.
    """
    LAYER_CLASSES.remove(name)


def layer_names() -> list[str]:
    """The names of all registered layers, including those of entry points in other packages."""
    return LAYER_CLASSES.names()


def layer_class(kind: Fact) -> type[LayerOperations]:
    """The class that is registered as a kind of layer.

    Raises:
        RegistryError: no class is registered as this kind.
    """
    found = LAYER_CLASSES.get(kind)
    if found is None:
        raise RegistryError(
            f"{LAYER_CLASSES.unknown(kind)} Import the package that registers it, or call register_layer()."
        )
    return found


def layer_from_description(kind: Fact, facts: Facts, context: DescriptionContext) -> LayerOperations:
    """An empty layer of a kind, from what its `describe` returned. Raises as `layer_class`."""
    return layer_class(kind).from_description(facts, context)


def description_context(rotaries: Mapping[str, Rotary]) -> DescriptionContext:
    """What layers are made from beside their facts.

    Args:
        rotaries: how keys are rotated, by the fingerprint of the rotation.
    """
    return DescriptionContext(layer_from_description, store_from_description, rotaries)
