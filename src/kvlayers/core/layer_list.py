"""The layers of a cache: what they are, how much they hold, and the recurrent states that models ask them for."""

import operator
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.arguments import unbounded_as_minus_one
from kvlayers.core.buffer import StateForm
from kvlayers.core.cache_layer import CacheLayer
from kvlayers.core.forward_pass import ForwardPassFollower, GivenToGenerate, SeenTokens
from kvlayers.errors import LayerIndexError, OptionError, UnsupportedLayerError
from kvlayers.upstream import compat
from kvlayers.utils import late
from kvlayers.utils.options import check_accepted, check_whole_number, checked_dtype


def adapted(layer: Any, grows: bool = False) -> CacheLayer:
    """The layer itself if it is one of kvlayers' layers; otherwise a new adapter over it.

    Args:
        layer: a layer of kvlayers or of transformers.
        grows: whether a reservation that is too small is replaced by a larger one, instead of raising `CapacityError`.

    Raises:
        OptionError: it is no layer.
    """
    if isinstance(layer, CacheLayer):
        return layer
    adapter: CacheLayer = late.function("adapter")(layer, grows)
    return adapter


class CacheClass(ABCMeta):
    """What classes of caches are, so that a class cannot be passed where a cache is meant.

    transformers' `generate()` marks the cache that it is given. A mark on a class would hold for all of its caches, and
    hide from them, for good, that they are given to a call.
    """

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "_is_user_defined":
            raise OptionError(
                f"`cache` must be a cache, got the class {cls.__name__}: pass one that it makes, as in "
                f"{cls.__name__}(config=model.config)."
            )
        super().__setattr__(name, value)


class LayerList(metaclass=CacheClass):
    """The part of a cache's interface that says what its layers are.

    Attributes:
        layers: the layers, as users see them: a plain list that anybody may change.
    """

    layers: list[Any]
    layer_class_to_replicate: Callable[[], Any] | None
    _pass: ForwardPassFollower
    _given: GivenToGenerate | None = None
    _adapted: Sequence[CacheLayer] = ()
    """Each layer, or its adapter if it is one of transformers' layers, as of the last time that somebody asked."""
    _grows = False
    """Whether reservations of transformers' layers are made larger when they are too small."""

    def adapted_layers(self) -> Sequence[CacheLayer]:
        """The layers with the operations of kvlayers' layers: each layer itself, or its adapter.

        `layers` is a plain list that anybody may change, and shows transformers' layers themselves. Their adapters
        stand beside it, are made once, and are found by the identity of the layer.
        """
        known = self._adapted
        if len(known) != len(self.layers) or not all(map(operator.is_, known, self.layers)):
            by_identity = {id(layer.original): layer for layer in known}
            self._adapted = known = [by_identity.get(id(layer)) or adapted(layer, self._grows) for layer in self.layers]
        return known

    def _layer_at(self, layer_idx: int) -> CacheLayer | None:
        """The layer, as in `adapted_layers()`; `None` for an index beyond the layers, whose layer may be made later."""
        try:
            if layer_idx >= len(self.layers):
                operator.index(layer_idx)
                return None
            layer = self.layers[layer_idx]
        except (IndexError, TypeError, ValueError, RuntimeError):
            raise self._no_layer(layer_idx) from None
        if -len(self._adapted) <= layer_idx < len(self._adapted):
            known = self._adapted[layer_idx]
            if known is layer or known.original is layer:
                return known
        return self.adapted_layers()[layer_idx]

    @property
    def length(self) -> int:
        """Tokens that the cache has seen and not rolled back. Raises as `get_seq_length`, for which it is the name in
        kvlayers.
        """
        return self._seen_by(0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer has seen. If layer 0 does not attend, it stands for the first layer that does.

        Raises:
            UnsupportedLayerError: neither attends, and no layer with a recurrent state counts its tokens.
            InterruptedPassError: layer 0 is asked, outside of the model, and the last forward pass was interrupted, so
                that later layers have seen fewer tokens. `crop` to the length that they have, or `reset`.
        """
        seen = self._seen_by(layer_idx)
        is_asked = not torch.compiler.is_compiling() and self._is_in_prefill()
        return SeenTokens.of(self, seen) if is_asked else seen

    def _seen_by(self, layer_idx: int) -> int:
        layer = self._layer_at(layer_idx)
        if layer is None:
            return 0
        compiling = torch.compiler.is_compiling()
        if layer_idx == 0 and not compiling and self._pass.at < self._pass.in_step:
            self._pass.check_in_step(self)
        if not layer.traits.attends and (
            self._first_attending(layer_idx) is not None or not layer.traits.counts_columns
        ):
            layer = self._attending(layer_idx)
        seen = layer.get_seq_length()
        # transformers' layers may count in a tensor, and in compiled code all static layers do.
        return seen if compiling else int(seen)

    def _is_in_prefill(self) -> bool:
        """Whether `generate()` may be asking, to find the tokens of its sequence that are new."""
        if not compat.MARKS_GIVEN_CACHES:
            return compat.PREFILL_SUBTRACTS_LENGTHS
        given = self._given
        if given is None or given.is_measured:
            return False
        given.measure()
        return True

    def most_seen(self) -> int:
        """Tokens that the layer which has seen most has seen. After an interrupted pass, others have seen fewer."""
        most = 0
        for layer in self.adapted_layers():
            most = max(most, layer.length or 0)
        return most

    def _layer(self, layer_idx: int) -> CacheLayer:
        """As `adapted_layers()[layer_idx]`, without a look at the other layers.

        Raises:
            LayerIndexError: no layer has that index.
        """
        layer = self._layer_at(layer_idx)
        if layer is None:
            raise self._no_layer(layer_idx)
        return layer

    @property
    def keeps_every_token(self) -> bool:
        """Whether the cache can be put back to any number of tokens, whatever it has seen since."""
        return all(map(operator.attrgetter("traits.keeps_every_token"), self.adapted_layers()))

    def recurrent_parts(self) -> list[Any]:
        """The `LinearAttentionLayer` of each layer that has one: the layer itself, or a part of a hybrid layer."""
        return [part for layer in self.adapted_layers() for part in layer.parts if part.traits.counts_columns]

    def _no_layer(self, layer_idx: object) -> LayerIndexError:
        return LayerIndexError(
            f"`layer_idx` must be a whole number from 0 to {len(self.layers) - 1}, got a "
            f"{type(layer_idx).__name__}: pass keys, values and layer_idx in this order."
            if isinstance(layer_idx, Tensor)
            else f"`layer_idx` must be a whole number from 0 to {len(self.layers) - 1}, got {layer_idx!r}: make the "
            "cache from the config of the model that uses it."
        )

    @property
    def batch_size(self) -> int:
        """Sequences side by side, -1 before the first states."""
        return next((rows for layer in self.adapted_layers() if (rows := layer.batch_size) is not None), -1)

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
        return [layer.traits.is_recurrent and not layer.traits.attends for layer in self.adapted_layers()]

    @property
    def is_dummy(self) -> list[bool]:
        """For each layer, whether it holds nothing at all."""
        return [not layer.traits.is_recurrent and not layer.traits.attends for layer in self.adapted_layers()]

    def __len__(self) -> int:
        return len(self.layers)

    def _attending(self, layer_idx: int) -> CacheLayer:
        """The layer if it attends, or the first layer that does if it is layer 0."""
        layer = self._layer(layer_idx)
        found = layer if layer.traits.attends else self._first_attending(layer_idx)
        if found is None:
            raise UnsupportedLayerError(
                f"`layer_idx` must be that of a layer that attends, got {layer_idx}, a "
                f"{type(layer.original).__name__}: ask another layer, if the model has one that attends, or make the "
                "cache from the config of the model."
            )
        return found

    def _first_attending(self, layer_idx: int) -> CacheLayer | None:
        """The first layer that attends, if layer 0 is asked for."""
        return (
            next((layer for layer in self.adapted_layers() if layer.traits.attends), None) if layer_idx == 0 else None
        )

    def most_tokens(self, layer_idx: int | None = None) -> int:
        """As `get_max_length`, whose answer is different under `legacy_names`."""
        if layer_idx is not None:
            layer = self._layer_at(layer_idx)
            return unbounded_as_minus_one(None if layer is None else layer.capacity)
        capacities = [layer.capacity for layer in self.adapted_layers() if layer.traits.attends]
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

        Raises:
            OptionError: states cannot have such a number, dtype or device.
            LayerIndexError: the numbers are not one for each layer.
        """
        check_whole_number(batch_size, "`batch_size`", 1, of="sequences")
        dtype = checked_dtype(dtype)
        check_accepted(None, device)
        layers = self.adapted_layers()
        heads = num_heads if isinstance(num_heads, Sequence) else [num_heads] * len(layers)
        dims = head_dim if isinstance(head_dim, Sequence) else [head_dim] * len(layers)
        if len(heads) != len(layers) or len(dims) != len(layers):
            raise LayerIndexError(
                f"`num_heads` and `head_dim` must be given for each of {len(layers)} layers, got {len(heads)} and "
                f"{len(dims)}: pass one number for all, or one for each."
            )
        for number in (*heads, *dims):
            check_whole_number(number, "`num_heads` and `head_dim`", 1)
        device = torch.empty(0, device=device).device
        for layer, layer_heads, layer_dim in zip(layers, heads, dims, strict=True):
            if layer.supports_early_init and not layer.is_initialized:
                form = StateForm(batch_size, layer_heads, layer_dim, dtype, device)
                layer.reserve_form(form, form)

    # What linear-attention, hybrid and sparse-attention models call

    def _recurrent(self, layer_idx: int) -> Any:
        """The layer at `layer_idx`, which has recurrent states."""
        if not self.layers:
            raise UnsupportedLayerError(
                f"The cache of a model with recurrent layers must be made from its config, got a {type(self).__name__} "
                "without one: pass config=model.config."
            )
        layer = self._layer(layer_idx)
        if not layer.traits.is_recurrent:
            raise UnsupportedLayerError(
                f"`layer_idx` must be that of a layer with a recurrent state, got {layer_idx}, a "
                f"{type(layer.original).__name__}: the cache was made for another model, so make one from the config "
                "of the model that uses it."
            )
        return layer

    @staticmethod
    def _state(states: dict[int, Any], state_idx: int) -> Any:
        try:
            return states[state_idx]
        except (KeyError, TypeError, RuntimeError):
            raise LayerIndexError(
                f"`state_idx` must be a whole number from 0 to {len(states) - 1}, got {state_idx!r}: make the cache "
                "from the config of the model that uses it."
            ) from None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a recurrent layer (the last one by default) has seen tokens.

        Raises:
            UnsupportedLayerError: the layer has no recurrent states, or no layer of the cache has.
            LayerIndexError: the layer has no state of that index.
        """
        if layer_idx is None:
            layer: Any = next((layer for layer in reversed(self.adapted_layers()) if layer.traits.is_recurrent), None)
            if layer is None:
                raise UnsupportedLayerError(
                    "The cache must have a layer with a recurrent state, got none: make it from the config of the "
                    "model that uses it."
                )
        elif self._layer_at(layer_idx) is None:
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
        followed = layer.traits.counts_columns and not torch.compiler.is_compiling()
        following = self._pass
        if followed and not state_idx and not following.at < layer_idx <= following.in_step:
            following.follow(self, layer_idx, layer, conv_states.shape[-1])
        updated: Tensor = layer.update_conv_state(conv_states, state_idx, **layer_options)
        if followed:
            following.at = layer_idx
        return updated

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Replace the recurrent state of a layer, which checks `layer_options`. Raises as `update_conv_state`."""
        updated: Tensor = self._recurrent(layer_idx).update_recurrent_state(
            recurrent_states, state_idx, **layer_options
        )
        return updated

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a model must pass the states of every token to a layer, instead of writing to the held states.

        kvlayers' recurrent layers always say so, since they count tokens. A layer's `is_recording` says whether it
        holds more than it needs, for a later rollback.
        """
        return bool(self._layer(layer_idx).record_past)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Take in the indexer keys of new tokens, `[batch, new, index_head_dim]`, in a sparse-attention layer."""
        layer: Any = self._layer(layer_idx)
        if not layer.traits.has_other_states:
            raise UnsupportedLayerError(
                f"`layer_idx` must be that of a layer with an indexer, got {layer_idx}, a "
                f"{type(layer.original).__name__}: make the cache from the config of the model that uses it."
            )
        updated: Tensor = layer.update_indexer(indexer_key_states)
        return updated


def in_step(asked: CacheLayer, layers: Sequence[CacheLayer]) -> tuple[int, ...]:
    """Indices of the layers that have seen as many tokens as a layer, and may hold as many: one mask is made for all.

    Other layers may hold something else, such as the image that cross-attention reads (mllama), or stand still.

    Args:
        asked: the layer that is asked how its next tokens are masked.
        layers: layers of the same cache.
    """
    seen, capacity = None if asked.counts_on_device else asked.length, asked.capacity
    return tuple(
        index
        for index, layer in enumerate(layers)
        # A count that stands on an accelerator is not waited for.
        if (layer.counts_on_device or layer.length in (seen, None)) and layer.capacity == capacity
    )


def let_static_layers_agree(layers: Sequence[CacheLayer]) -> None:
    """Let layers that reserve their memory agree on what attention reads, since one mask serves all layers."""
    if any(layer.parts[0].unwrapped.reserved is not None for layer in layers):
        late.function("static layers agree")(layers)
