"""A layer that keeps the first few tokens and a window of the newest tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.cache_layer import LayerState, forwarded, register_layer
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.description import RotaryArgument
from kvlayers.core.preparation import PADDING_NAME, check_rotary, padding_of
from kvlayers.core.token_layer import TokenLayer, WindowLayer, window_room
from kvlayers.core.token_store import Fidelity, KVPair, StoreArgument, TokenStore
from kvlayers.errors import StateMismatchError
from kvlayers.kernels.attention.gqa import marked_for_sdpa
from kvlayers.kernels.attention.packed_ops import packed_like
from kvlayers.kernels.attention.packed_tensor import PackedStates, as_dense
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.quantized.quantization import Quantization
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.rope.rotary import Rotary
from kvlayers.sinks.sink_tokens import NAMES, Sinks, check_sinks
from kvlayers.utils.options import checks_options


@register_layer
class SinkLayer(WindowLayer, TokenLayer):
    """Attention sinks: keeps the first `num_sink_tokens` tokens and the newest tokens, `window_length` in all.

    StreamingLLM (Xiao et al. 2023, arXiv:2309.17453) lets a query attend to the kept tokens as if they were one
    sequence without a gap. Attention under RoPE depends on distances only. So the window's keys stay as they are, and
    the few keys of the sinks are rotated by the distance that eviction has put between them and the window. They are
    always rotated from the keys as they came, so nothing is rounded twice.

    Tokens are evicted between updates, never within one: the tokens of a prompt attend to the whole prompt.

    If sequences are padded on the left, each has its own sinks: its first tokens that are not padding.

    Args:
        window_length: tokens that a query attends to, the sinks and itself included.
        num_sink_tokens: how many of them are sinks.
        rotary: how keys are rotated, `None` for a layer whose attention does not know positions.
        store: how the tokens of the window are held; a `DenseStore` if it is not given.
        left_padding: tokens of padding before each sequence, int64 `[batch]`.

    Raises:
        OptionError: a window that is not larger than the sinks, or a count that is not a whole number.

    Example:
        >>> import torch, kvlayers
        >>> from kvlayers.rope.rotary import Rotary
        >>> rotary = Rotary(10000.0 ** -(torch.arange(0, 8, 2) / 8).double(), "halves")
        >>> layer = kvlayers.SinkLayer(window_length=16, num_sink_tokens=4, rotary=rotary)
        >>> for _ in range(100):
        ...     keys, values = layer.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
        >>> keys.shape, layer.length
        (torch.Size([1, 2, 16, 8]), 100)
    """

    described = ("window_length", "num_sink_tokens")
    made_with = (
        StoreArgument("store", room=lambda facts: window_room(facts["window_length"])),
        RotaryArgument("rotary"),
    )
    hints = ("left_padding",)
    beside = ("_sinks",)
    fidelity: Fidelity = "evicting"
    rotary = forwarded("_sinks")
    """How keys are rotated, `None` for keys that do not know positions."""

    @checks_options
    def __init__(
        self,
        window_length: int,
        num_sink_tokens: int,
        rotary: Rotary | None,
        store: TokenStore | None = None,
        left_padding: Sequence[int] | Tensor | None = None,
    ) -> None:
        check_sinks(window_length, num_sink_tokens)
        check_rotary(rotary)
        self.room = window_room(window_length)
        super().__init__(DenseStore(self.room) if store is None else store)
        self.window = self.window_length = window_length
        self.num_sink_tokens = num_sink_tokens
        self._sinks = Sinks(num_sink_tokens, rotary).with_padding(padding_of(left_padding))

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> KVPair:
        store, seen = self.store, self._seen
        tokens = store.validate(key_states, value_states)
        self._sinks.check_batch(key_states.shape[0])
        sinks = self._sinks.with_tokens(seen, key_states, value_states)
        past = min(seen, self.window - 1)
        first = seen - past
        front = self._in_front(sinks, first, past)
        # The sinks stand where the oldest tokens of the window are, which no query attends to any more. A rollback may
        # still need them while the past is recorded.
        behind = past
        if front is not None and (self.record_past or not store.overwrite(past, *front)):
            behind -= self.num_sink_tokens
        attended = self._extend(key_states, value_states, past, behind)
        if front is not None and behind < past:
            attended = marked_for_sdpa(*_behind(front, attended), tokens)
        self._sinks, self._seen = sinks, seen + tokens
        if not self.record_past:
            self._drop_beyond_window()
        return attended

    def _in_front(self, sinks: Sinks, first: int, count: int) -> KVPair | None:
        """What stands in the place of the oldest of the newest `count` held tokens, `None` if the tokens themselves.

        In a sequence without tokens between its sinks and the window, the oldest tokens are the sinks.

        Args:
            sinks: the sinks.
            first: position of the oldest of these tokens.
            count: held tokens that are read.
        """
        if first <= sinks.first_start:
            return None
        front, padding = sinks.rotated_before(first), sinks.padding
        if first > sinks.last_start or padding is None:
            return front
        are_apart, held = (first > padding)[:, None, None, None], self.store.newest(count)
        keys, values = (
            torch.where(are_apart, turned, as_dense(states[:, :, : self.num_sink_tokens]))
            for turned, states in zip(front, held, strict=True)
        )
        return keys, values

    @property
    @override
    def exact_from(self) -> int | None:
        first, dropped = super().exact_from, self._seen - self.store.length
        if first is None or dropped <= self._sinks.first_start:
            return first
        # Where the sinks of any sequence stand, no token of its window is. In the others these tokens are exact.
        return max(first, dropped + self.num_sink_tokens)

    @property
    def left_padding(self) -> Tensor | None:
        """Tokens of padding before each sequence, int64 `[batch]` on the host; `None` without padding."""
        padding = self._sinks.padding
        return None if padding is None else padding.cpu()

    @left_padding.setter
    def left_padding(self, padding: Sequence[int] | Tensor | None) -> None:
        if self._seen:
            raise StateMismatchError(
                f"`padding` must be given to an empty layer, got one that has seen {self._seen} tokens: give "
                "left_padding before the first token."
            )
        self._sinks = self._sinks.emptied().with_padding(padding_of(padding))

    @override
    def _handed_out(self, side: Side) -> Tensor | None:
        # Copies: what the next token attends to is made from the sinks, as they came, and from the window.
        states = self.peek()[side == "values"]
        # Handles of packed states cannot be written to.
        return states if states is None or isinstance(states, PackedStates) else states.clone()

    @override
    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        if self.store.forms is None:
            return None, None
        past = self.attended_past(self._seen)
        front = self._in_front(self._sinks, self._seen - past, past)
        if front is None:
            return self.store.newest(past)
        return _behind(front, self.store.newest(past - self.num_sink_tokens))

    @override
    def _assignable(self, states: Tensor) -> Tensor:
        if self._seen != self.store.length or self._seen > self.attended_past(self._seen):
            raise StateMismatchError(
                f"A layer whose states are assigned must hold all of its {self._seen} tokens, got one that has evicted "
                "some: use state() and load_state()."
            )
        if states.shape[2] != self._seen:
            raise StateMismatchError(
                f"Assigned states must be of all {self._seen} tokens, since keys are rotated by their positions, got "
                f"{states.shape[2]}: use a DynamicCache to evict other tokens than the oldest."
            )
        return states

    @override
    def _replace(self, keys: Tensor, values: Tensor) -> None:
        super()._replace(keys, values)
        self._sinks = self._sinks.with_tokens(0, *self.store.newest(self._seen))

    @override
    def reset(self) -> None:
        """Forget all tokens, and the padding before them; the memory of the window is kept for the next ones."""
        super().reset()
        self._sinks = self._sinks.emptied()

    @override
    def state(self) -> LayerState:
        state, held = super().state(), self.store.length
        front = self._in_front(self._sinks, self._seen - held, held) if self.store.holds_tokens_apart else None
        for name, states in zip(("keys", "values"), front or (), strict=False):
            # Whether the store has written the sinks there depends on its forks, and no state does.
            state.tensors[name][:, :, : self.num_sink_tokens] = states
        return LayerState(state.kind, {**state.tensors, **self._sinks.state()}, state.facts)

    @override
    def check_state(self, state: LayerState) -> None:
        own, window = state.split((*NAMES, PADDING_NAME))
        super().check_state(window)
        sinks = self._sinks.of_state(own)
        seen = state.length
        if seen and sinks.keys is None:
            raise StateMismatchError(
                f"`state` must have the first of its {seen} tokens, got a state without tokens: take it again."
            )

    @override
    def load_state(self, state: LayerState) -> None:
        self.check_state(state)
        own, window = state.split((*NAMES, PADDING_NAME))
        sinks = self._sinks.of_state(own)
        self.store.load_state(window.tensors)
        self._sinks, self._seen = sinks, state.length


@dataclass(frozen=True, eq=False, slots=True)
class SinkConfig:
    """How the layers of a `SinkCache` are made.

    Attributes:
        window_length: tokens that a query attends to, the sinks and itself included.
        num_sink_tokens: how many of them are sinks.
        quantization: how windows are held in packed codes, `None` for full precision.
        left_padding: tokens of padding before each sequence, int64 `[batch]`; `None` if there is no padding.
    """

    window_length: int
    num_sink_tokens: int
    quantization: Quantization | None = None
    left_padding: Tensor | None = None

    def facts(self) -> dict[str, Any]:
        """The fields as plain values, from which `from_facts` makes an equal config."""
        return {
            "window_length": self.window_length,
            "num_sink_tokens": self.num_sink_tokens,
            "quantization": None if self.quantization is None else self.quantization.facts(),
            "left_padding": None if self.left_padding is None else self.left_padding.tolist(),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """A config from what `facts` returned, possibly among other facts.

        Raises:
            OptionError: a fact has a value that the cache does not take.
        """
        check_sinks(facts["window_length"], facts["num_sink_tokens"])
        quantization, padding = Quantization.of(facts["quantization"]), padding_of(facts["left_padding"])
        return cls(facts["window_length"], facts["num_sink_tokens"], quantization, padding)

    def layer(self, rotary: Rotary | None) -> SinkLayer:
        """A layer whose keys are rotated by `rotary`, `None` for keys that know no positions."""
        quantization, window = self.quantization, self.window_length
        store = None if quantization is None else QuantizedStore(quantization, window_room(window))
        return SinkLayer(window, self.num_sink_tokens, rotary, store, self.left_padding)


def _behind(front: KVPair, attended: KVPair) -> KVPair:
    """What queries attend to, with a segment in front."""
    keys, values = attended
    if isinstance(keys, PackedStates):
        snapshot = keys.snapshot
        # Sinks keep the dtype that they came in, and a store may hold another one since.
        first_keys, first_values = (states.to(snapshot.dtype) for states in front)
        held = (DenseSegment(first_keys, first_values), *snapshot.segments.in_order)
        return packed_like(keys, values, replace(snapshot, segments=replace(snapshot.segments, in_order=held)))
    return torch.cat([front[0], keys], dim=2), torch.cat([front[1], values], dim=2)
