"""The layers of a cache: what they are, and how much they hold."""

import operator
from abc import ABC
from collections.abc import Sequence
from typing import Any

import torch

from kvlayers.errors import LayerIndexError, OptionError, UnsupportedLayerError
from kvlayers.layers import LayerOperations
from kvlayers.layers.arguments import unbounded_as_minus_one
from kvlayers.layers.upstream_adapter.adapter import adapted_anew
from kvlayers.stores.buffer import StateForm


class LayerList(ABC):
    """The part of a cache's interface that says what its layers are.

    Attributes:
        layers: the layers, as users see them: a plain list that anybody may change.
    """

    layers: list[Any]
    _adapted: Sequence[LayerOperations] = ()
    """Each layer, or its adapter if it is one of transformers' layers, as of the last time that somebody asked."""
    _grows = False
    """Whether reservations of transformers' layers are made larger when they are too small."""

    def adapted_layers(self) -> Sequence[LayerOperations]:
        """The layers with the operations of kvlayers' layers: each layer itself, or its adapter.

        `layers` is a plain list that anybody may change, and shows transformers' layers themselves. Their adapters
        stand beside it, are made once, and are found by the identity of the layer.
        """
        known = self._adapted
        if len(known) != len(self.layers) or not all(map(operator.is_, known, self.layers)):
            self._adapted = known = adapted_anew(self.layers, known, self._grows)
        return known

    def adapted_layer(self, layer_idx: int) -> LayerOperations:
        """As `adapted_layers()[layer_idx]`, without a look at the other layers."""
        layer = self.layers[layer_idx]
        if -len(self._adapted) <= layer_idx < len(self._adapted):
            known = self._adapted[layer_idx]
            if known is layer or known.original is layer:
                return known
        return self.adapted_layers()[layer_idx]

    @property
    def keeps_every_token(self) -> bool:
        """Whether the cache can be put back to any number of tokens, whatever it has seen since."""
        return all(layer.keeps_every_token for layer in self.adapted_layers())

    def recurrent_parts(self) -> list[Any]:
        """The `LinearAttentionLayer` of each layer that has one: the layer itself, or a part of a hybrid layer."""
        return [part for layer in self.adapted_layers() for part in layer.parts if part.counts_columns]

    def check_layer(self, layer_idx: int) -> int:
        """`layer_idx` counted from the first layer. Negative numbers count from the last.

        Raises:
            LayerIndexError: no layer has that index.
        """
        if not -len(self.layers) <= layer_idx < len(self.layers):
            raise self._no_layer(layer_idx)
        return layer_idx % len(self.layers)

    def _no_layer(self, layer_idx: int) -> LayerIndexError:
        return LayerIndexError(
            f"expected a layer index from 0 to {len(self.layers) - 1}, but saw {layer_idx}: make the cache from the "
            "config of the model that uses it."
        )

    @property
    def batch_size(self) -> int:
        """Sequences side by side, -1 before the first states."""
        return next((layer.batch_size for layer in self.adapted_layers() if layer.batch_size is not None), -1)

    @property
    def is_initialized(self) -> bool:
        """Whether every layer that can reserve memory knows the form of its states."""
        reserving = [layer for layer in self.adapted_layers() if layer.supports_early_init]
        return bool(reserving) and all(layer.is_initialized for layer in reserving)

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may compile the forward pass around this cache."""
        return len(self.layers) > 0 and all(layer.is_compileable for layer in self.adapted_layers())

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can put every layer back as it was."""
        return all(layer.is_croppable for layer in self.adapted_layers())

    @property
    def is_sliding(self) -> list[bool]:
        """For each layer, whether it attends within a window."""
        return [layer.is_sliding for layer in self.adapted_layers()]

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether it has a recurrent state and no attention."""
        return [layer.is_recurrent and not layer.attends for layer in self.adapted_layers()]

    @property
    def is_dummy(self) -> list[bool]:
        """For each layer, whether it holds nothing at all."""
        return [not layer.is_recurrent and not layer.attends for layer in self.adapted_layers()]

    def __len__(self) -> int:
        return len(self.layers)

    def _attending(self, layer_idx: int) -> LayerOperations:
        """The layer if it attends, or the first layer that does if it is layer 0."""
        layer = self.adapted_layer(layer_idx)
        found = layer if layer.attends else self._first_attending(layer_idx)
        if found is None:
            raise UnsupportedLayerError(
                f"expected a layer that attends, but layer {layer_idx} is a {type(layer.original).__name__}: ask "
                "another layer, if the model has one that attends, or make the cache from the config of the model."
            )
        return found

    def _first_attending(self, layer_idx: int) -> LayerOperations | None:
        """The first layer that attends, if layer 0 is asked for."""
        return next((layer for layer in self.adapted_layers() if layer.attends), None) if layer_idx == 0 else None

    def most_tokens(self, layer_idx: int | None = None) -> int:
        """As `get_max_length`, whose answer is different under `legacy_names`."""
        if layer_idx is not None:
            if layer_idx >= len(self.layers):
                return -1
            return unbounded_as_minus_one(self.adapted_layer(layer_idx).capacity)
        capacities = [layer.capacity for layer in self.adapted_layers() if layer.attends]
        bounded = [capacity for capacity in capacities if capacity is not None]
        return unbounded_as_minus_one(max(bounded) if bounded and len(bounded) == len(capacities) else None)

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Reserve memory before the first forward pass, in the layers that can.

        Args:
            batch_size: sequences side by side.
            num_heads: kv_heads, one number for all layers or one for each.
            head_dim: head_dim of keys and values, one number for all layers or one for each.
            dtype: dtype of the states.
            device: device of the states.
        """
        if batch_size < 1:
            raise OptionError(f"expected a batch of at least one sequence, but saw batch_size={batch_size!r}.")
        layers = self.adapted_layers()
        heads = [num_heads] * len(layers) if isinstance(num_heads, int) else list(num_heads)
        dims = [head_dim] * len(layers) if isinstance(head_dim, int) else list(head_dim)
        if len(heads) != len(layers) or len(dims) != len(layers):
            raise LayerIndexError(
                f"expected num_heads and head_dim for each of {len(layers)} layers, but saw {len(heads)} and "
                f"{len(dims)}: pass one number for all, or one for each."
            )
        device = torch.empty(0, device=device).device
        for layer, layer_heads, layer_dim in zip(layers, heads, dims, strict=True):
            if layer.supports_early_init and not layer.is_initialized:
                form = StateForm(batch_size, layer_heads, layer_dim, dtype, device)
                layer.reserve_form(form, form)
