"""Transformers' layers behind an adapter, which gives them the contract of kvlayers' layers."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.buffer import StateForm
from kvlayers.core.cache_layer import forwarded
from kvlayers.core.description import DescriptionContext, Fact, Facts
from kvlayers.core.layer_operations import LayerOperations, LayerState
from kvlayers.core.token_store import Fidelity
from kvlayers.errors import OptionError, UnsupportedLayerError
from kvlayers.interop import calls
from kvlayers.upstream import compat


@runtime_checkable
class _Reorderable(Protocol):
    def reorder_cache(self, beam_idx: Tensor) -> None: ...


@runtime_checkable
class _Recording(Protocol):
    def activate_past_recording(self) -> None: ...


@runtime_checkable
class _Indexed(Protocol):
    def update_indexer(self, indexer_key_states: Tensor) -> Tensor: ...


def adapter(layer: Any, grows: bool = False) -> LayerOperations:
    """An adapter over one of transformers' layers.

    Raises:
        OptionError: it is no layer.
    """
    if not isinstance(layer, (compat.ATTENTION_LAYER, compat.LINEAR_LAYER, *compat.DUMMY_LAYER)):
        shown = f"the class {layer.__name__}" if isinstance(layer, type) else f"a {type(layer).__name__}"
        raise OptionError(
            f"A layer must be one of kvlayers or of transformers, got {shown}: pass layers, such as those of "
            "cache.layers."
        )
    return TransformersLayer(layer, grows)


class TransformersLayer(LayerOperations):
    """Adapter over one of transformers' layers: an indexer, compressed attention, or a class of a model's own.

    The layer itself stays in `cache.layers`, since models look at its class. A cache makes the adapter once, and finds
    it by the identity of the layer.

    Args:
        layer: the layer, which is changed in place.
        grows: whether a reservation that is too small is replaced by a larger one, instead of raising `CapacityError`.
    """

    is_upstream = True
    is_initialized = forwarded("layer")
    is_compileable = forwarded("layer")
    # A layer may count in a tensor, and static layers do so in compiled code.
    get_seq_length = forwarded("layer")
    offload = forwarded("layer")
    prefetch = forwarded("layer")

    def __init__(self, layer: Any, grows: bool = False) -> None:
        self.layer = layer
        self.grows = grows
        self.is_recurrent = isinstance(layer, compat.LINEAR_LAYER)
        self.attends = isinstance(layer, compat.ATTENTION_LAYER)
        self.has_other_states = isinstance(layer, _Indexed)
        self.keeps_every_token = isinstance(layer, compat.DUMMY_LAYER)
        # A dummy holds nothing.
        self.can_be_stacked = self.keeps_every_token

    @property
    @override
    def original(self) -> Any:
        return self.layer

    @property
    @override
    def kind(self) -> str:
        """Module and name of the layer's class. No kind of kvlayers has such a name."""
        return f"{type(self.layer).__module__}.{type(self.layer).__qualname__}"

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        """Refuse: the layer is made from the model's config, and has no facts.

        Raises:
            UnsupportedLayerError: always.
        """
        raise UnsupportedLayerError(
            "expected a kind of kvlayers, but transformers' layers are made from the config of the model: pass it."
        )

    # Attention

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.attends:
            raise self._does_not_attend()
        return calls.update(self.layer, key_states, value_states, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take in the indexer keys of new tokens, `[batch, new, index_head_dim]`, and return those of all tokens."""
        if calls.is_checked_on_host(self.layer, indexer_key_states):
            # An indexer has a count of its own, since attention may have taken in the tokens already.
            seen = int(self.layer.indexer_cumulative_length) if self.layer.is_indexer_initialized else 0
            calls.check_reservation(self.layer, seen, indexer_key_states.shape[-2])
        updated: Tensor = self.layer.update_indexer(indexer_key_states)
        return updated

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        asked = torch.empty(query_length) if compat.MASKS_BY_CACHE_POSITION else query_length
        kv_length, kv_offset = self.layer.get_mask_sizes(asked)
        return kv_length, kv_offset

    @override
    def make_room(self, tokens: int) -> None:
        if calls.is_reserved(self.layer) and not torch.compiler.is_compiling():
            (calls.grow if self.grows else calls.check_room)(self.layer, tokens)

    @property
    def supports_early_init(self) -> bool:  # type: ignore[override]
        """Whether memory can be reserved before the first states."""
        return calls.reserves(self.layer)

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        batch, kv_heads, head_dim, dtype, device = key_form
        calls.reserve(self.layer, torch.empty((batch, kv_heads, 0, head_dim), dtype=dtype, device=device))

    @property
    @override
    def length(self) -> int | None:
        return int(self.layer.get_seq_length()) if self.attends else None

    @property
    def counts_on_device(self) -> bool:  # type: ignore[override]
        """Whether the count stands in a tensor, as that of static layers does."""
        return self.attends and not isinstance(self.layer.get_seq_length(), int)

    @property
    @override
    def capacity(self) -> int | None:
        if not self.attends:
            return None
        most = calls.max_length(self.layer)
        return None if most < 0 else most

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        """Whether the layer attends within a window. Not every class of transformers says so."""
        return bool(getattr(self.layer, "is_sliding", False))

    @property
    def keys(self) -> Tensor | None:
        """Keys held, `[batch, kv_heads, tokens, head_dim]`, `None` for a layer that does not attend."""
        return self.layer.keys if self.attends else None

    @keys.setter
    def keys(self, states: Tensor) -> None:
        self.layer.keys = states

    @property
    def values(self) -> Tensor | None:
        """Values held, `[batch, kv_heads, tokens, head_dim]`, `None` for a layer that does not attend."""
        return self.layer.values if self.attends else None

    @values.setter
    def values(self, states: Tensor) -> None:
        self.layer.values = states

    @override
    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        return self.keys, self.values

    @property
    @override
    def held_tokens(self) -> int | None:
        keys = self.keys
        return self.length if keys is None or keys.dim() != 4 else min(self.length or 0, int(keys.shape[2]))

    # Recurrent states

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """By state index, whether tokens have been seen."""
        return calls.by_index(self.layer.has_previous_state)

    def conv_state(self, state_idx: int) -> Tensor | None:
        """The convolution state, `None` before the first tokens."""
        return calls.by_index(self.layer.conv_states)[state_idx]  # type: ignore[no-any-return]

    def recurrent_state(self, state_idx: int) -> Tensor | None:
        """The recurrent state, `None` before the first tokens."""
        return calls.by_index(self.layer.recurrent_states)[state_idx]  # type: ignore[no-any-return]

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **layer_options: Any) -> Tensor:
        """Take in the inputs of a convolution, as the layer does, which checks `layer_options` itself."""
        which = calls.which_state(state_idx)
        return self.layer.update_conv_state(conv_states, *which, **layer_options)  # type: ignore[no-any-return]

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **layer_options: Any) -> Tensor:
        """Replace a recurrent state, as the layer does, which checks `layer_options` itself."""
        which = calls.which_state(state_idx)
        return self.layer.update_recurrent_state(recurrent_states, *which, **layer_options)  # type: ignore[no-any-return]

    # Planning

    @property
    @override
    def sized_for(self) -> int | None:  # type: ignore[override]
        return int(self.layer.max_cache_len) if isinstance(self.layer, compat.STATIC_INDEXED_LAYER) else None

    @property
    @override
    def fidelity(self) -> Fidelity:
        return "rounded" if isinstance(self.layer, compat.QUANTIZED_LAYERS) else "exact"

    # Both

    @property
    @override
    def batch_size(self) -> int | None:
        if self.keys is not None and self.keys.dim() == 4:
            return int(self.keys.shape[0])
        if not self.is_recurrent:
            return None
        held = map(calls.by_index, (self.layer.conv_states, self.layer.recurrent_states))
        return next((int(one.shape[0]) for states in held for one in states.values() if one is not None), None)

    @property
    def device(self) -> torch.device | None:
        """Device of the states, `None` before the first ones."""
        return next((tensor.device for tensor in self.held_tensors()), None)

    @property
    def record_past(self) -> bool:  # type: ignore[override]
        """Whether more is held than is needed, for a later crop. Not every class of transformers says so."""
        return calls.records_past(self.layer)

    # Rolling back

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `remove_newest` can put the layer back as it was."""
        return calls.is_croppable(self.layer) and calls.crops_every_state(self.layer)

    @override
    def check_truncate(self, length: int) -> None:
        self.check_removal((self.length or 0) - length)

    @override
    def truncate(self, length: int) -> None:
        self.remove_newest((self.length or 0) - length)

    @property
    def is_empty(self) -> bool:
        """Whether the layer holds nothing."""
        return calls.is_empty(self.layer)

    @override
    def check_removal(self, tokens: int) -> None:
        calls.check_removal(self.layer, tokens)

    @override
    def remove_newest(self, tokens: int) -> None:
        self.check_removal(tokens)
        if self.is_empty or not isinstance(self.layer, calls.Croppable):
            return
        # A past that was recorded for this is forgotten.
        if tokens or (self.is_recurrent and self.record_past):
            self.layer.crop(-tokens)

    @override
    def check_select(self, batch_size: int) -> None:
        if not isinstance(self.layer, _Reorderable):
            raise UnsupportedLayerError(
                f"expected layers whose sequences can be selected, but transformers' {type(self.layer).__name__} has "
                "no reorder_cache: run one sequence at a time."
            )

    @override
    def select(self, indices: Tensor) -> None:
        self.check_select(indices.shape[0])
        if self.is_empty:
            return
        rows, before = self.batch_size, list(self._states_by_name())
        self.layer.reorder_cache(indices)
        # Before 5.23, `reorder_cache` of deepseek_v4 leaves what its layers keep by name, besides keys and values.
        for attribute, name, states in before:
            named = vars(self.layer)[attribute]
            if named[name] is states and states.shape[0] == rows:
                named[name] = states.index_select(0, indices.to(states.device))
        if "batch_size" in vars(self.layer):
            self.layer.batch_size = indices.shape[0]

    def _states_by_name(self) -> Iterator[tuple[str, Any, Tensor]]:
        """Tensors in dicts of the layer, with the attribute and the name in it."""
        for attribute, named in vars(self.layer).items():
            if isinstance(named, dict):
                for name, states in named.items():
                    if isinstance(states, Tensor) and states.dim():
                        yield attribute, name, states

    @override
    def activate_past_recording(self) -> None:
        if isinstance(self.layer, _Recording):
            self.layer.activate_past_recording()

    @override
    def deactivate_past_recording(self) -> None:
        calls.stop_recording(self.layer)

    @override
    def reset(self) -> None:
        self.layer.reset()
        if self.attends and self.length:
            # In transformers 5.17, layers that grow fill their tokens with zeros, and keep them.
            for name, value in vars(self.layer).items():
                if isinstance(value, Tensor) and value.dim():
                    setattr(self.layer, name, None)
                elif name in ("is_initialized", "is_indexer_initialized"):
                    setattr(self.layer, name, False)

    @override
    def fork(self) -> Self:
        return type(self)(calls.copy_of(self.layer), self.grows)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from calls.held_tensors(self.layer)

    @override
    def state(self) -> LayerState:
        found = dict(calls.entries(self.layer))
        facts: dict[str, Fact] = {
            name: value for name, value in found.items() if isinstance(value, int | str | bool | None)
        }
        tensors = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
        return LayerState(self.kind, tensors, facts)

    @override
    def check_state(self, state: LayerState) -> None:
        # Files of the first version have the name of the class alone.
        calls.check_state(self.layer, state, (self.kind, type(self.layer).__name__))

    @override
    def load_state(self, state: LayerState) -> None:
        self.check_state(state)
        calls.load_state(self.layer, state)
