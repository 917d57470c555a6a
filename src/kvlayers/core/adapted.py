"""transformers' own layers, by the contract of kvlayers' layers."""

from collections.abc import Sequence
from typing import Any

from kvlayers.core.layer_operations import LayerOperations
from kvlayers.utils import late


def adapted(layer: Any, grows: bool = False) -> LayerOperations:
    """The layer itself if it is one of kvlayers' layers; otherwise a new adapter over it.

    Args:
        layer: a layer of kvlayers or of transformers.
        grows: whether a reservation that is too small is replaced by a larger one, instead of raising `CapacityError`.

    Raises:
        OptionError: it is no layer.
    """
    if isinstance(layer, LayerOperations):
        return layer
    adapter: LayerOperations = late.function("adapter")(layer, grows)
    return adapter


def adapted_anew(layers: Sequence[Any], known: Sequence[LayerOperations], grows: bool) -> list[LayerOperations]:
    """For each layer the layer itself or its adapter: the known adapter if it has one, and otherwise a new one."""
    by_identity = {id(layer.original): layer for layer in known}
    return [by_identity.get(id(layer)) or adapted(layer, grows) for layer in layers]
