"""The registry of layers: which classes a file may name."""

from kvlayers.core.cache_layer import LAYER_CLASSES, CacheLayer
from kvlayers.core.description import DescriptionContext, Fact, Facts, registered_class

register_layer = LAYER_CLASSES.register
"""Let layers of a class, which derives from `TokenLayer` or from `CacheLayer`, be loaded from files."""

unregister_layer = LAYER_CLASSES.remove
"""Remove a class of layers from the registry, by its name."""

layer_names = LAYER_CLASSES.names
"""The names of all registered layers, including those of entry points in other packages."""


def layer_class(kind: Fact) -> type[CacheLayer]:
    """The class that is registered as a kind of layer.

    Raises:
        RegistryError: no class is registered as this kind.
    """
    found: type[CacheLayer] = registered_class(LAYER_CLASSES, kind, "register_layer")
    return found


def layer_from_description(kind: Fact, facts: Facts, context: DescriptionContext) -> CacheLayer:
    """An empty layer of a kind, from what its `describe` returned. Raises as `layer_class`."""
    return layer_class(kind).from_description(facts, context)
