"""A package that is not kvlayers: a layer, a store and a quantizer, made of public names alone."""

import kvlayers
from other_package.halves import HalvesBackend
from other_package.recent_layer import RecentLayer
from other_package.stepped_store import SteppedStore

__all__ = ["HalvesBackend", "RecentLayer", "SteppedStore", "register", "unregister"]


def register() -> None:
    """Register every kind, as an import of such a package does."""
    kvlayers.layers.register_layer(RecentLayer)
    kvlayers.stores.register_store(SteppedStore)
    kvlayers.quantizers.register_quantizer("halves")(HalvesBackend)


def unregister() -> None:
    """Take the names back."""
    kvlayers.layers.unregister_layer("RecentLayer")
    kvlayers.stores.unregister_store("SteppedStore")
    kvlayers.quantizers.unregister_quantizer("halves")
