"""A layer that attends and has a recurrent state: an attention layer and a recurrent layer, side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import whole_number
from kvlayers.core.cache_layer import (
    CacheLayer,
    LayerState,
    LayerTraits,
    WrapperLayer,
    check_kind_of_state,
    forwarding,
    layer_class,
    layer_from_description,
    register_layer,
)
from kvlayers.core.description import DescriptionContext, Fact, Facts
from kvlayers.core.from_config import HYBRID, RECURRENT, Checkpoints
from kvlayers.core.token_store import Fidelity, least_faithful
from kvlayers.errors import UnsupportedLayerError
from kvlayers.recurrent.linear_layer import LinearAttentionLayer
from kvlayers.upstream import compat
from kvlayers.upstream.model_layers import LayerSpec

LINEAR = "linear."
"""Prefix of the names of the recurrent part in a saved state."""


def _of_both(name: str) -> Any:
    """A method that calls the one of this name of both layers."""

    def call(layer: "HybridLayer", *args: Any) -> None:
        for part in layer.parts:
            getattr(part, name)(*args)

    return call


ANSWERED_BY_ATTENTION = """
    is_opaque is_compileable is_initialized update keys values peek count _recount mask_sizes get_seq_length
    make_room reserve_form trim compact separate_rows row_lengths
"""

ANSWERED_BY_LINEAR = """
    update_conv_state update_recurrent_state number_of_states conv_state recurrent_state conv_states recurrent_states
    is_conv_states_initialized is_recurrent_states_initialized conv_kernel_size has_previous_state
"""


@register_layer
class HybridLayer(
    forwarding("wrapped", ANSWERED_BY_ATTENTION),  # type: ignore[misc]
    forwarding("linear", ANSWERED_BY_LINEAR),  # type: ignore[misc]
    WrapperLayer,
    compat.LINEAR_LAYER,  # type: ignore[misc]
):
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

    wrapped: CacheLayer

    def __init__(self, attention: CacheLayer, linear: LinearAttentionLayer) -> None:
        if not isinstance(attention, CacheLayer) or attention.traits.is_recurrent or attention.traits.is_upstream:
            raise UnsupportedLayerError(
                f"`attention` must be a layer that attends, got a {type(attention).__name__}: pass a DynamicLayer, or "
                "another CacheLayer."
            )
        if not isinstance(linear, LinearAttentionLayer):
            raise UnsupportedLayerError(
                f"`linear` must be a LinearAttentionLayer, got a {type(linear).__name__}: pass one."
            )
        super().__init__(attention)
        self.linear = linear
        self.traits = LayerTraits(is_recurrent=True, counts_rows=attention.traits.counts_rows)

    @property
    def attention(self) -> CacheLayer:
        """The attention layer."""
        return self.wrapped

    def with_attention(self, attention: CacheLayer) -> "HybridLayer":
        """A layer that attends as `attention` does, with the same recurrent layer."""
        return HybridLayer(attention, self.linear)

    @property
    @override
    def fidelity(self) -> Fidelity:
        return least_faithful((self.wrapped.fidelity, self.linear.fidelity))

    @property
    @override
    def reservation_facts(self) -> frozenset[str]:  # type: ignore[override]
        return self.wrapped.reservation_facts | set(_prefixed(dict.fromkeys(self.linear.reservation_facts)))

    @property
    def record_past(self) -> bool:
        """Always true; see `LinearAttentionLayer`."""
        return self.linear.record_past

    @record_past.setter
    def record_past(self, record_past: bool) -> None:
        if not record_past:
            self.deactivate_past_recording()

    # Both

    activate_past_recording = _of_both("activate_past_recording")
    deactivate_past_recording = _of_both("deactivate_past_recording")
    check_truncate_rows = _of_both("check_truncate_rows")
    truncate_rows = _of_both("truncate_rows")
    expand = _of_both("expand")
    reset = _of_both("reset")

    @property
    @override
    def parts(self) -> tuple[CacheLayer, ...]:
        return self.wrapped, self.linear

    @property
    @override
    def is_recording(self) -> bool:
        return self.wrapped.is_recording or self.linear.is_recording

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `crop` can put both back as they were."""
        return self.wrapped.is_croppable and self.linear.is_croppable

    @property
    @override
    def batch_size(self) -> int | None:
        return self.linear.batch_size if self.wrapped.batch_size is None else self.wrapped.batch_size

    @override
    def nearest_restorable(self, length: int) -> int:
        """The greatest length, `length` at most, to which both layers can be put back."""
        while True:
            before = length
            length = self._of_linear(self.wrapped.nearest_restorable(length))
            if length == before:
                return length

    def _of_linear(self, length: int) -> int:
        # If the model does not use it, or an update was interrupted before it, there is nothing to take back.
        unused = self.linear.length == 0
        if unused or (self.linear.length is None and length == self.wrapped.length):
            return length
        return int(self.linear.nearest_restorable(length))

    @override
    def check_truncate(self, length: int) -> None:
        self.wrapped.check_truncate(length)
        if self._of_linear(length) != length:
            self.linear.check_truncate(length)

    @override
    def truncate(self, length: int) -> int:
        length = whole_number(length, "`length`")
        target = self.nearest_restorable(length)
        self.wrapped.truncate(target)
        if self.linear.length:
            self.linear.truncate(target)
        return length - target

    @override
    def row(self, index: int) -> CacheLayer:
        attention = self.wrapped.row(index) if self.wrapped.batch_size is not None else self.wrapped.fork()
        linear = self.linear.row(index) if self.linear.batch_size is not None else self.linear.fork()
        return HybridLayer(attention, cast("LinearAttentionLayer", linear))

    @override
    def side_by_side(self, layers: Sequence[CacheLayer]) -> CacheLayer:
        attention, linear = zip(*(layer.parts for layer in layers), strict=True)
        # The model may use one of the two alone.
        joined = [
            parts[0].side_by_side(parts) if parts[0].batch_size is not None else parts[0].fork()
            for parts in (attention, linear)
        ]
        return HybridLayer(joined[0], cast("LinearAttentionLayer", joined[1]))

    @override
    def select(self, indices: Tensor) -> None:
        # Also without tokens, as it may know the padding of each sequence.
        self.wrapped.select(indices)
        self.linear.select(indices)

    @override
    def share_prefix(self, other: CacheLayer, tokens: int) -> None:
        if isinstance(other, HybridLayer):
            self.wrapped.share_prefix(other.wrapped, tokens)

    @override
    def fork(self) -> Self:
        return type(self)(self.wrapped.fork(), self.linear.fork())

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from self.wrapped.held_tensors()
        yield from self.linear.held_tensors()

    @override
    def describe(self) -> dict[str, Fact]:
        attention, linear = self.wrapped.describe(), self.linear.describe()
        return {**attention, "attention": self.wrapped.kind, **_prefixed(linear)}

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        attention: Any = layer_from_description(facts["attention"], _of_attention(facts), context)
        return cls(attention, LinearAttentionLayer.from_description(_unprefixed(facts), context))

    @classmethod
    @override
    def reserved_by(cls, facts: Facts) -> tuple[int, int]:
        return layer_class(facts["attention"]).reserved_by(_of_attention(facts))

    @override
    def state(self) -> LayerState:
        attention, linear = self.wrapped.state(), self.linear.state()
        facts: dict[str, Fact] = {**attention.facts, "attention": attention.kind, **_prefixed(linear.facts)}
        return LayerState(self.kind, {**attention.tensors, **_prefixed(linear.tensors)}, facts)

    def _parts(self, state: LayerState) -> tuple[LayerState, LayerState]:
        check_kind_of_state(state, self.kind)
        tensors = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(LINEAR)}
        linear = LayerState(self.linear.kind, _unprefixed(state.tensors), _unprefixed(state.facts))
        return LayerState(str(state.facts.get("attention")), tensors, _of_attention(state.facts)), linear

    @override
    def check_state(self, state: LayerState) -> None:
        attention, linear = self._parts(state)
        self.wrapped.check_state(attention)
        self.linear.check_state(linear)

    @override
    def load_state(self, state: LayerState) -> None:
        self.check_state(state)
        attention, linear = self._parts(state)
        self.wrapped.load_state(attention)
        self.linear.load_state(linear)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r}, {self.linear!r})"


def _of_attention(facts: Facts) -> dict[str, Fact]:
    """The facts of the attention layer, without its kind."""
    return {name: fact for name, fact in facts.items() if name != "attention" and not name.startswith(LINEAR)}


def _prefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{LINEAR}{name}": value for name, value in values.items()}


def _unprefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(LINEAR): value for name, value in values.items() if name.startswith(LINEAR)}


def recurrent_kinds(
    attention: Mapping[str, Callable[[LayerSpec], Any]], policy: Checkpoints, tokens_at_once: int | None
) -> dict[str, Callable[[LayerSpec], Any]]:
    """For each layer type that has recurrent states, a function that makes the layer.

    Args:
        attention: the same for layer types that attend.
        policy: when checkpoints are taken.
        tokens_at_once: see `LinearAttentionLayer`.
    """

    def recurrent(spec: LayerSpec) -> LinearAttentionLayer:
        states = spec.options.get("number_of_states", 1)
        # Layers of several convolutions (inkling) have no scan behind them.
        scans = spec.layer_type != "conv" and states == 1
        return LinearAttentionLayer(states, policy, tokens_at_once, scans=scans)

    def hybrid(spec: LayerSpec) -> HybridLayer:
        return HybridLayer(attention[HYBRID[spec.layer_type]](spec), recurrent(spec))

    return {**dict.fromkeys(RECURRENT, recurrent), **dict.fromkeys(HYBRID, hybrid)}
