"""Which layers of a cache make room for the next tokens together."""

from collections.abc import Sequence

from kvlayers.layers.operations import LayerOperations


def in_step(asked: LayerOperations, layers: Sequence[LayerOperations]) -> tuple[int, ...]:
    """Indices of the layers that have seen as many tokens as a layer, and may hold as many: one mask is made for all.

    Other layers may hold something else, such as the image that cross-attention reads (mllama), or stand still.

    Args:
        asked: the layer that is asked how its next tokens are masked.
        layers: layers of the same cache.
    """
    seen, capacity = asked.length_on_host, asked.capacity
    return tuple(
        index
        for index, layer in enumerate(layers)
        # A count that stands on an accelerator, and is not waited for, is None.
        if layer.length_on_host in (seen, None) and layer.capacity == capacity
    )
