"""What models with recurrent layers ask of a cache: convolution states, recurrent states and indexer keys.

The layers that hold them are transformers' own.
"""

from typing import Any

from torch import Tensor

from . import compat
from .errors import UnsupportedLayerError
from .layers import CacheLayer


class RecurrentSurface:
    """The part of a cache's interface that linear-attention, hybrid and sparse-attention models call."""

    layers: list[Any]

    def _recurrent(self, layer_idx: int | None) -> Any:
        candidates = reversed(self.layers) if layer_idx is None else [self.layers[layer_idx]]
        for layer in candidates:
            if isinstance(layer, compat.LINEAR_LAYER):
                return layer
        raise UnsupportedLayerError(
            "expected a layer with a recurrent state, but saw "
            f"{'none' if layer_idx is None else f'a {type(self.layers[layer_idx]).__name__} at {layer_idx}'}: make the "
            "cache from the config of the model that uses it."
        )

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a recurrent layer (the last one by default) has seen tokens."""
        if layer_idx is not None and layer_idx >= len(self.layers):
            return False
        seen = self._recurrent(layer_idx).has_previous_state
        return all(seen.values()) if state_idx is None else bool(seen[state_idx])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Convolution state of a layer, `None` before the first tokens."""
        layer = self._recurrent(layer_idx)
        return layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Recurrent state of a layer, `None` before the first tokens."""
        layer = self._recurrent(layer_idx)
        return layer.recurrent_states[state_idx] if layer.has_previous_state[state_idx] else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Take in the convolution inputs of new tokens in a layer, which checks `layer_options` itself."""
        updated: Tensor = self._recurrent(layer_idx).update_conv_state(conv_states, state_idx, **layer_options)
        return updated

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Replace the recurrent state of a layer, which checks `layer_options` itself."""
        updated: Tensor = self._recurrent(layer_idx).update_recurrent_state(
            recurrent_states, state_idx, **layer_options
        )
        return updated

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Take in the indexer keys of new tokens, `[batch, new, index_head_dim]`, in a sparse-attention layer."""
        layer = self.layers[layer_idx]
        if isinstance(layer, CacheLayer):
            raise UnsupportedLayerError(
                f"expected a layer with an indexer, but layer {layer_idx} is a {type(layer).__name__}: make the cache "
                "from the config of the model that uses it."
            )
        updated: Tensor = layer.update_indexer(indexer_key_states)
        return updated
