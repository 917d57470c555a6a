"""A layer that attends and has a recurrent state: an attention layer and a recurrent layer, side by side."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from typing_extensions import Self, override

from kvlayers.errors import StateMismatchError, UnsupportedLayerError
from kvlayers.layers.arguments import whole_number
from kvlayers.layers.contract import CacheLayer, attribute_within, public_names
from kvlayers.layers.linear.layer import LinearAttentionLayer
from kvlayers.layers.operations import LayerOperations, LayerState
from kvlayers.layers.registry import layer_class, register_layer
from kvlayers.layers.shape import LayerShape, PlannedBytes
from kvlayers.offload.prefetcher import Prefetcher
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.buffer import StateForm
from kvlayers.stores.contract import Fidelity, least_faithful
from kvlayers.stores.description import DescriptionContext, Fact, Facts
from kvlayers.upstream import compat

LINEAR = "linear."
"""Prefix of the names of the recurrent part in a saved state."""


@register_layer
class HybridLayer(CacheLayer, compat.LINEAR_LAYER):  # type: ignore[misc]
    """An attention layer and a linear-attention layer for one layer of a model that has both.

    Keys and values go to the attention layer, convolution states and recurrent states to the linear-attention layer.
    Operations go to both.

    Args:
        attention: any `CacheLayer` that has no recurrent states itself.
        linear: the layer of the convolution states and recurrent states.

    Raises:
        UnsupportedLayerError: a layer of another kind.

    Example:
        >>> import kvlayers
        >>> kvlayers.HybridLayer(kvlayers.DynamicLayer(), kvlayers.LinearAttentionLayer())
        HybridLayer(DynamicLayer(length=0), LinearAttentionLayer(length=0))
    """

    is_recurrent = True

    def __init__(self, attention: CacheLayer, linear: LinearAttentionLayer) -> None:
        if not isinstance(attention, CacheLayer) or attention.is_recurrent:
            raise UnsupportedLayerError(
                f"expected a layer of attention first, but saw a {type(attention).__name__}: pass a DynamicLayer, or "
                "another CacheLayer."
            )
        if not isinstance(linear, LinearAttentionLayer):
            raise UnsupportedLayerError(
                f"expected a LinearAttentionLayer second, but saw a {type(linear).__name__}: pass one."
            )
        super().__init__()
        self.attention = attention
        self.linear = linear
        self.sliding_window = attention.sliding_window

    # Attention

    @override
    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention.update(key_states, value_states)

    @property
    def is_opaque(self) -> bool:  # type: ignore[override]
        """Whether compiled code calls `update` as an operator, rather than be traced through it."""
        return self.attention.is_opaque

    @override
    def count(self, tokens: int) -> None:
        self.attention.count(tokens)

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.attention.mask_sizes(query_length)

    @override
    def get_seq_length(self) -> int:
        return self.attention.get_seq_length()

    @override
    def make_room(self, tokens: int) -> None:
        self.attention.make_room(tokens)

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        self.attention.reserve_form(key_form, value_form)

    @property
    @override
    def length(self) -> int:
        return self.attention.length

    @property
    @override
    def capacity(self) -> int | None:
        return self.attention.capacity

    @property
    @override
    def sized_for(self) -> int | None:
        return self.attention.sized_for

    @property
    @override
    def fidelity(self) -> Fidelity:
        return least_faithful((self.attention.fidelity, self.linear.fidelity))

    @override
    def planned_nbytes(self, shape: LayerShape, tokens: int, sized_for: int | None) -> PlannedBytes:
        attention = self.attention.planned_nbytes(shape, tokens, sized_for)
        linear = self.linear.planned_nbytes(shape, tokens, None)
        return PlannedBytes(attention.device + linear.device, attention.host + linear.host)

    @override
    def planned_bits(self, shape: LayerShape) -> float:
        return self.attention.planned_bits(shape)

    @property
    def keys(self) -> Any:
        """See the attention layer."""
        return self._attends.keys

    @keys.setter
    def keys(self, states: Tensor) -> None:
        self._attends.keys = states

    @property
    def values(self) -> Any:
        """See the attention layer."""
        return self._attends.values

    @values.setter
    def values(self, states: Tensor) -> None:
        self._attends.values = states

    @override
    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        return self.attention.peek()

    @property
    def _attends(self) -> Any:
        return self.attention

    @override
    def recount(self, length: int) -> None:
        self.attention.recount(length)

    def __getattr__(self, name: str) -> Any:
        """Further attributes of the attention layer, such as its window or its reservation."""
        return attribute_within(self, "attention", name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *public_names(self.attention)})

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        """Whether it attends within a window."""
        return self.attention.is_sliding

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether generate() may compile the forward pass around it."""
        return bool(self.attention.is_compileable)

    # Convolution states and recurrent states

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None) -> Tensor:
        """See `LinearAttentionLayer.update_conv_state`."""
        return self.linear.update_conv_state(conv_states, state_idx, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0) -> Tensor:
        """See `LinearAttentionLayer.update_recurrent_state`."""
        return self.linear.update_recurrent_state(recurrent_states, state_idx)

    @property
    def number_of_states(self) -> int:
        """Convolution states that the model's layer has."""
        return self.linear.number_of_states

    def conv_state(self, state_idx: int) -> Tensor | None:
        """See `LinearAttentionLayer.conv_state`."""
        return self.linear.conv_state(state_idx)

    def recurrent_state(self, state_idx: int) -> Tensor | None:
        """See `LinearAttentionLayer.recurrent_state`."""
        return self.linear.recurrent_state(state_idx)

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """See `LinearAttentionLayer`."""
        return self.linear.conv_states

    @conv_states.setter
    def conv_states(self, states: Mapping[int, Tensor | None]) -> None:
        self.linear.conv_states = states

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """See `LinearAttentionLayer`."""
        return self.linear.recurrent_states

    @recurrent_states.setter
    def recurrent_states(self, states: Mapping[int, Tensor | None]) -> None:
        self.linear.recurrent_states = states

    @property
    def is_conv_states_initialized(self) -> dict[int, bool]:
        """See `LinearAttentionLayer`."""
        return self.linear.is_conv_states_initialized

    @property
    def is_recurrent_states_initialized(self) -> dict[int, bool]:
        """See `LinearAttentionLayer`."""
        return self.linear.is_recurrent_states_initialized

    @property
    def conv_kernel_size(self) -> dict[int, int | None]:
        """See `LinearAttentionLayer`."""
        return self.linear.conv_kernel_size

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """See `LinearAttentionLayer`."""
        return self.linear.has_previous_state

    @property
    def record_past(self) -> bool:
        """Always true; see `LinearAttentionLayer`."""
        return self.linear.record_past

    @record_past.setter
    def record_past(self, record_past: bool) -> None:
        if not record_past:
            self.deactivate_past_recording()

    # Both

    @property
    @override
    def parts(self) -> tuple[LayerOperations, ...]:
        return self.attention, self.linear

    @override
    def use_prefetcher(self, prefetcher: Prefetcher) -> None:
        self.attention.use_prefetcher(prefetcher)

    @override
    def note_left_padding(self, padding: Tensor | None) -> None:
        self.attention.note_left_padding(padding)

    @property
    @override
    def held_tokens(self) -> int | None:
        return self.attention.held_tokens

    @property
    @override
    def bits(self) -> tuple[int, int] | None:
        return self.attention.bits

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:
        return self.attention.attention_paths

    @property
    @override
    def can_be_stacked(self) -> bool:
        return self.attention.can_be_stacked and self.linear.can_be_stacked

    @property
    @override
    def is_recording(self) -> bool:
        return self.attention.is_recording or self.linear.is_recording

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `crop` can put both back as they were."""
        return self.attention.is_croppable and self.linear.is_croppable

    @property
    @override
    def batch_size(self) -> int | None:
        return self.linear.batch_size if self.attention.batch_size is None else self.attention.batch_size

    @property
    def dtype(self) -> Any:
        """dtype of the keys, `None` before the first states."""
        return self._attends.dtype

    @property
    def device(self) -> Any:
        """Device of the keys, `None` before the first states."""
        return self._attends.device

    @property
    def is_initialized(self) -> bool:
        """Whether the form of the keys and values is known."""
        return self.attention.is_initialized

    @is_initialized.setter
    def is_initialized(self, is_initialized: bool) -> None:
        self.attention.is_initialized = is_initialized

    @override
    def nearest_restorable(self, length: int) -> int:
        """The greatest length, `length` at most, to which both layers can be put back."""
        while True:
            before = length
            length = self._of_linear(self.attention.nearest_restorable(length))
            if length == before:
                return length

    def _of_linear(self, length: int) -> int:
        # If the model does not use it, or an update was interrupted before it, there is nothing to take back.
        unused = self.linear.length == 0
        if unused or (self.linear.length is None and length == self.attention.length):
            return length
        return self.linear.nearest_restorable(length)

    @override
    def check_truncate(self, length: int) -> None:
        self.attention.check_truncate(length)
        if self._of_linear(length) != length:
            self.linear.check_truncate(length)

    @override
    def truncate(self, length: int) -> int:
        length = whole_number(length, "a length")
        target = self.nearest_restorable(length)
        self.attention.truncate(target)
        if self.linear.length:
            self.linear.truncate(target)
        return length - target

    @override
    def activate_past_recording(self) -> None:
        self.attention.activate_past_recording()
        self.linear.activate_past_recording()

    @override
    def deactivate_past_recording(self) -> None:
        self.attention.deactivate_past_recording()
        self.linear.deactivate_past_recording()

    @override
    def check_select(self, batch_size: int) -> None:
        self.attention.check_select(batch_size)

    @override
    def select(self, indices: Tensor) -> None:
        if self.attention.batch_size is not None:
            self.attention.select(indices)
        self.linear.select(indices)

    @override
    def expand(self, repeats: int) -> None:
        self.attention.expand(repeats)
        self.linear.expand(repeats)

    @override
    def reset(self) -> None:
        self.attention.reset()
        self.linear.reset()

    @override
    def fork(self) -> Self:
        return type(self)(self.attention.fork(), self.linear.fork())

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from self.attention.held_tensors()
        yield from self.linear.held_tensors()

    @property
    def rotaries(self) -> tuple[Rotary, ...]:  # type: ignore[override]
        """Those of the attention layer."""
        return self.attention.rotaries

    @override
    def describe(self) -> dict[str, Fact]:
        attention, linear = self.attention.describe(), self.linear.describe()
        return {**attention, "attention": self.attention.kind, **_prefixed(linear)}

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        attention = context.layer(facts["attention"], _of_attention(facts))
        return cls(attention, LinearAttentionLayer.from_description(_unprefixed(facts), context))

    @classmethod
    @override
    def reserved_by(cls, facts: Facts) -> tuple[int, int]:
        return layer_class(facts["attention"]).reserved_by(_of_attention(facts))

    @override
    def state(self) -> LayerState:
        attention, linear = self.attention.state(), self.linear.state()
        facts: dict[str, Fact] = {**attention.facts, "attention": attention.kind, **_prefixed(linear.facts)}
        return LayerState(self.kind, {**attention.tensors, **_prefixed(linear.tensors)}, facts)

    def _parts(self, state: LayerState) -> tuple[LayerState, LayerState]:
        kind = state.facts.get("attention")
        if state.kind != self.kind or not isinstance(kind, str):
            raise StateMismatchError(
                f"expected the state of a {self.kind}, but saw that of a {state.kind}: load it into a cache "
                "that was made for the same model config."
            )
        tensors = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(LINEAR)}
        linear = LayerState(self.linear.kind, _unprefixed(state.tensors), _unprefixed(state.facts))
        return LayerState(kind, tensors, _of_attention(state.facts)), linear

    @override
    def check_state(self, state: LayerState) -> None:
        attention, linear = self._parts(state)
        self.attention.check_state(attention)
        self.linear.check_state(linear)

    @override
    def load_state(self, state: LayerState) -> None:
        self.check_state(state)
        attention, linear = self._parts(state)
        self.attention.load_state(attention)
        self.linear.load_state(linear)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.attention!r}, {self.linear!r})"


def _of_attention(facts: Facts) -> dict[str, Fact]:
    """The facts of the attention layer, without those that say of what kind it is."""
    return {name: fact for name, fact in facts.items() if name != "attention" and not name.startswith(LINEAR)}


def _prefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{LINEAR}{name}": value for name, value in values.items()}


def _unprefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(LINEAR): value for name, value in values.items() if name.startswith(LINEAR)}
