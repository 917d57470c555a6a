"""What models with recurrent layers ask of a cache: convolution states, recurrent states and indexer keys."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from kvlayers.errors import LayerIndexError, UnsupportedLayerError
from kvlayers.layers import HybridLayer, LayerOperations, LinearAttentionLayer, upstream_calls
from kvlayers.upstream import compat

RECURRENT = (LinearAttentionLayer, HybridLayer, compat.LINEAR_LAYER)
"""Ours first: an instance of the very class is found without asking its bases, at every layer and token."""

HOLDERS = (LinearAttentionLayer, HybridLayer)
KVLAYERS = (*HOLDERS, LayerOperations)


class RecurrentSurface(ABC):
    """The part of a cache's interface that linear-attention, hybrid and sparse-attention models call."""

    layers: list[Any]
    _at: int
    _in_step: int

    @abstractmethod
    def _follow(self, layer_idx: int, tokens: int) -> None:
        """Note that a layer is about to be updated; see `Cache`."""

    def _recurrent(self, layer_idx: int) -> Any:
        """The layer at `layer_idx`, which has such states."""
        try:
            layer = self.layers[layer_idx]
        except (IndexError, TypeError):
            raise self._no_recurrent_layer(layer_idx) from None
        if isinstance(layer, RECURRENT):
            return layer
        raise UnsupportedLayerError(
            f"expected a layer with a recurrent state, but layer {layer_idx} is a {type(layer).__name__}: the cache "
            "was made for another model, so make one from the config of the model that uses it."
        )

    def _no_recurrent_layer(self, layer_idx: object) -> Exception:
        if not self.layers:
            return UnsupportedLayerError(
                "expected a cache that was made from the config of the model that uses it, as it has recurrent layers, "
                f"but this {type(self).__name__} was made without one: pass config=model.config."
            )
        return LayerIndexError(
            f"expected a layer index from 0 to {len(self.layers) - 1}, but saw {layer_idx!r}: make the cache from the "
            "config of the model that uses it."
        )

    @staticmethod
    def _state(states: dict[int, Any], state_idx: int) -> Any:
        try:
            return states[state_idx]
        except (KeyError, TypeError):
            raise LayerIndexError(
                f"expected a state index from 0 to {len(states) - 1}, but saw {state_idx!r}: make the cache from the "
                "config of the model that uses it."
            ) from None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a recurrent layer (the last one by default) has seen tokens.

        Raises:
            UnsupportedLayerError: the layer has no such states, or no layer has.
            LayerIndexError: the layer has no such state.
        """
        if layer_idx is None:
            layer: Any = next((layer for layer in reversed(self.layers) if isinstance(layer, RECURRENT)), None)
            if layer is None:
                raise UnsupportedLayerError(
                    "expected a layer with a recurrent state, but saw none: make the cache from the config of the "
                    "model that uses it."
                )
        elif layer_idx >= len(self.layers):
            return False
        else:
            layer = self._recurrent(layer_idx)
        seen = upstream_calls.by_index(layer.has_previous_state)
        return all(seen.values()) if state_idx is None else bool(self._state(seen, state_idx))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Convolution state of a layer, `[batch, channels, conv_kernel_size]`, `None` before the first tokens.

        Raises:
            LayerIndexError: no layer has that index, or the layer no such state.
            UnsupportedLayerError: the layer has no such states.
        """
        layer = self._recurrent(layer_idx)
        seen = self._state(upstream_calls.by_index(layer.has_previous_state), state_idx)
        held = layer.held.conv if isinstance(layer, HOLDERS) else upstream_calls.by_index(layer.conv_states)
        return held[state_idx] if seen else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Recurrent state of a layer, `None` before the first tokens. Raises as `get_conv_state`."""
        layer = self._recurrent(layer_idx)
        seen = self._state(upstream_calls.by_index(layer.has_previous_state), state_idx)
        held = layer.held.recurrent if isinstance(layer, HOLDERS) else upstream_calls.by_index(layer.recurrent_states)
        return held[state_idx] if seen else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Take in the convolution inputs of new tokens in a layer, which checks `layer_options` itself.

        See `LinearAttentionLayer.update_conv_state`, whose option is `conv_kernel_size`.

        Raises:
            LayerIndexError: no layer has that index, or the layer no such state.
            UnsupportedLayerError: the layer has no such states, or takes in no several tokens behind others.
            StateMismatchError: inputs of another batch size, channels, dtype, device or kernel than those held.
        """
        layer = self._recurrent(layer_idx)
        # A layer that attends besides is followed by its keys.
        followed = isinstance(layer, LinearAttentionLayer) and not torch.compiler.is_compiling()
        if followed and not state_idx and not self._at < layer_idx <= self._in_step:
            self._follow(layer_idx, conv_states.shape[-1])
        which = (state_idx,) if isinstance(layer, KVLAYERS) else upstream_calls.which_state(state_idx)
        updated: Tensor = layer.update_conv_state(conv_states, *which, **layer_options)
        if followed:
            self._at = layer_idx
        return updated

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Replace the recurrent state of a layer, which checks `layer_options`. Raises as `update_conv_state`."""
        layer = self._recurrent(layer_idx)
        which = (state_idx,) if isinstance(layer, KVLAYERS) else upstream_calls.which_state(state_idx)
        updated: Tensor = layer.update_recurrent_state(recurrent_states, *which, **layer_options)
        return updated

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a model must pass the states of every token to a layer, rather than write to those that it holds.

        Layers of ours with recurrent states always say so, as they count tokens. Whether a layer holds more than it
        needs, for a later rollback, is its `is_recording`.
        """
        layer = self.layers[layer_idx]
        if isinstance(layer, KVLAYERS):
            return bool(layer.record_past)
        return bool(vars(layer).get("record_past", False))

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Take in the indexer keys of new tokens, `[batch, new, index_head_dim]`, in a sparse-attention layer."""
        layer = self.layers[layer_idx]
        if isinstance(layer, LayerOperations):
            raise UnsupportedLayerError(
                f"expected a layer with an indexer, but layer {layer_idx} is a {type(layer).__name__}: make the cache "
                "from the config of the model that uses it."
            )
        return upstream_calls.update_indexer(layer, indexer_key_states)
