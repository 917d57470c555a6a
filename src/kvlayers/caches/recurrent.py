"""The part of a cache that models with recurrent layers call: convolution states, recurrent states, indexer keys."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvlayers.caches.forward_pass import ForwardPassFollower
from kvlayers.caches.layer_list import LayerList
from kvlayers.errors import LayerIndexError, UnsupportedLayerError


class RecurrentSurface(LayerList):
    """The part of a cache's interface that linear-attention, hybrid and sparse-attention models call."""

    layer_class_to_replicate: Callable[[], Any] | None
    _pass: ForwardPassFollower

    def _recurrent(self, layer_idx: int) -> Any:
        """The layer at `layer_idx`, which has recurrent states."""
        try:
            layer = self.layers[layer_idx]
        except (IndexError, TypeError):
            raise self._no_recurrent_layer(layer_idx) from None
        if layer_idx >= len(self._adapted) or self._adapted[layer_idx] is not layer:
            layer = self.adapted_layer(layer_idx)
        if layer.is_recurrent:
            return layer
        raise UnsupportedLayerError(
            f"expected a layer with a recurrent state, but layer {layer_idx} is a {type(layer.original).__name__}: the "
            "cache was made for another model, so make one from the config of the model that uses it."
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
            UnsupportedLayerError: the layer has no recurrent states, or no layer of the cache has.
            LayerIndexError: the layer has no state of that index.
        """
        if layer_idx is None:
            layer: Any = next((layer for layer in reversed(self.adapted_layers()) if layer.is_recurrent), None)
            if layer is None:
                raise UnsupportedLayerError(
                    "expected a layer with a recurrent state, but no layer has one: make the cache from the config of "
                    "the model that uses it."
                )
        elif layer_idx >= len(self.layers):
            return False
        else:
            layer = self._recurrent(layer_idx)
        seen = layer.has_previous_state
        return all(seen.values()) if state_idx is None else bool(self._state(seen, state_idx))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Convolution state of a layer, `[batch, channels, conv_kernel_size]`, `None` before the first tokens.

        Raises:
            LayerIndexError: no layer has that index, or the layer has no state of that index.
            UnsupportedLayerError: the layer has no recurrent states.
        """
        layer = self._recurrent(layer_idx)
        return layer.conv_state(state_idx) if self._state(layer.has_previous_state, state_idx) else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Recurrent state of a layer, `None` before the first tokens. Raises as `get_conv_state`."""
        layer = self._recurrent(layer_idx)
        return layer.recurrent_state(state_idx) if self._state(layer.has_previous_state, state_idx) else None

    @property
    def is_recurrent(self) -> bool:
        """Whether the layers hold recurrent states alone, so that no layer keeps tokens."""
        is_linear = self.is_linear
        return bool(is_linear) and all(is_linear)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Take in the convolution inputs of new tokens in a layer, which checks `layer_options` itself.

        See `LinearAttentionLayer.update_conv_state`, whose option is `conv_kernel_size`.

        Raises:
            LayerIndexError: no layer has that index, or the layer has no state of that index.
            UnsupportedLayerError: the layer has no recurrent states, or the model cannot take in several tokens behind
                others.
            StateMismatchError: inputs of another batch size, channels, dtype, device or kernel than those held.
        """
        layer = self._recurrent(layer_idx)
        # A forward pass goes through a layer that attends as well when its keys come.
        followed = layer.counts_columns and not torch.compiler.is_compiling()
        following = self._pass
        if followed and not state_idx and not following.at < layer_idx <= following.in_step:
            following.follow(self, layer_idx, conv_states.shape[-1])
        updated: Tensor = layer.update_conv_state(conv_states, state_idx, **layer_options)
        if followed:
            following.at = layer_idx
        return updated

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Replace the recurrent state of a layer, which checks `layer_options`. Raises as `update_conv_state`."""
        layer = self._recurrent(layer_idx)
        updated: Tensor = layer.update_recurrent_state(recurrent_states, state_idx, **layer_options)
        return updated

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a model must pass the states of every token to a layer, instead of writing to the held states.

        kvlayers' recurrent layers always say so, since they count tokens. A layer's `is_recording` says whether it
        holds more than it needs, for a later rollback.
        """
        return bool(self.adapted_layer(layer_idx).record_past)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Take in the indexer keys of new tokens, `[batch, new, index_head_dim]`, in a sparse-attention layer."""
        layer: Any = self.adapted_layer(layer_idx)
        if not layer.has_other_states:
            raise UnsupportedLayerError(
                f"expected a layer with an indexer, but layer {layer_idx} is a {type(layer.original).__name__}: make "
                "the cache from the config of the model that uses it."
            )
        updated: Tensor = layer.update_indexer(indexer_key_states)
        return updated
