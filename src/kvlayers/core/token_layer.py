"""Layers over a store of tokens: what all of them share, the one that keeps every token, and the one of a window."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import Self, override

from kvlayers.core.arguments import as_batch_indices, check_rollback, repeated_rows, whole_number
from kvlayers.core.buffer import LayerShape, StateForm
from kvlayers.core.cache_layer import (
    CacheLayer,
    LayerState,
    LayerTraits,
    check_kind_of_state,
    forwarded,
    forwarding,
    not_of_so_many,
    register_layer,
)
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.description import Argument, Facts
from kvlayers.core.token_store import KVPair, StoreArgument, TokenStore, store_class_of
from kvlayers.errors import ConfigError, OptionError, RollbackError, StateMismatchError
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.utils import late
from kvlayers.utils.options import checks_options


class PendingAssignment:
    """Stands in for a store after keys were assigned, until matching values are assigned; or the reverse.

    It can be moved and measured. Every other use is an error, because keys and values disagree on which tokens are
    held.

    Args:
        complete: the store with the tokens that are held until then.
        keys: `[batch, kv_heads, tokens, key_head_dim]`, the assigned keys or the held ones.
        values: `[batch, kv_heads, tokens, value_head_dim]`, the assigned values or the held ones.
    """

    holds_tokens_apart = False

    def __init__(self, complete: TokenStore, keys: Tensor, values: Tensor) -> None:
        self.complete = complete
        self.keys = keys
        self.values = values

    def caller_views(self) -> tuple[Tensor, Tensor]:
        """The keys and values, which do not match."""
        return self.keys, self.values

    forms = forwarded("complete")
    swap_buffers = forwarded("complete")

    def held_tensors(self) -> Iterator[Tensor]:
        """All tensors that keep memory alive."""
        yield from self.complete.held_tensors()
        yield from (self.keys, self.values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StateMismatchError(
            "Keys and values must have the same batch size and number of tokens, got keys "
            f"{list(self.keys.shape)} and values {list(self.values.shape)}: assign the other half as well, or reset() "
            "the cache."
        )


def part_of_form(part: str, side: int = 0) -> Any:
    """A property of a layer: a part of the form of its keys (side 0) or values, `None` before the first states."""

    def read(layer: "TokenLayer") -> Any:
        forms = layer.store.forms
        return None if forms is None else getattr(forms[side], part)

    return property(read)


# A layer that evicts tokens to which the model would attend has another fidelity than its store.
ANSWERED_BY_STORE = "is_opaque bits fidelity attention_paths packing_paths sized_for check_select trim compact"


class TokenLayer(forwarding("store", ANSWERED_BY_STORE), CacheLayer, CacheLayerMixin):  # type: ignore[misc]
    """A layer that keeps tokens in a `TokenStore`. Which tokens those are, a subclass decides.

    If the initialiser of a subclass takes a `store` (`None` for a `DenseStore`) and plain facts, the class names these
    facts in `described` and keeps them in attributes of the same names. It can then be saved, and loaded when it is
    registered with `register_layer`. Any other subclass defines `describe` and `from_description`.

    Args:
        store: how the tokens are held; a `DenseStore` if it is not given.

    Attributes:
        store: the same. Another store that is set must hold the same tokens, on the device that computes.
    """

    made_with: ClassVar[tuple[Argument, ...]] = (StoreArgument("store"),)

    recall: Any = None
    """How a single query chooses the pages that it attends to; `None` if it attends to all tokens. A layer that has it
    also says how pages are read where they are held (`chosen_page_tokens`), and what that takes (`copies_nbytes`)."""

    beside: ClassVar[tuple[str, ...]] = ()
    """Attributes that hold what the layer keeps of each sequence beside its store, each with a method `selected`, which
    returns the same for the sequences at some indices, and a method `held_tensors`."""

    def __init__(self, store: TokenStore | None = None) -> None:
        # Not the initialiser of transformers: it would assign attributes that are properties here.
        if store is not None and not isinstance(store, TokenStore):
            raise OptionError(f"`store` must be a TokenStore, got {store!r}: pass one, such as DenseStore().")
        self.store = DenseStore() if store is None else store

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens seen and not rolled back."""

    @property
    @override
    def held_tokens(self) -> int:
        return self.store.length

    @property
    @override
    def forms(self) -> tuple[StateForm, ...]:  # type: ignore[override]
        return self.store.forms or ()

    def attended_past(self, tokens: int) -> int:
        """How many of the newest `tokens` tokens the next one attends to, besides itself."""
        return tokens

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = self.attended_past(self.store.length)
        return past + query_length, self.length - past

    @property
    @override
    def exact_from(self) -> int | None:
        first = self.store.exact_from
        if first is None or (first == 0 and self.fidelity != "evicting"):
            return first
        return self.length - self.store.length + first

    @property
    def keys(self) -> Tensor | None:
        """Keys held, a view `[batch, kv_heads, held, head_dim]` in the order of their tokens; `None` at first.

        Writing to the view changes the layer, and no fork of it. A layer that grows never writes there again, so the
        view stays the same after a crop or a reset. A static layer has one address, so its view shows every change.

        Other keys may be assigned, and then values of as many tokens, or the reverse: of as many tokens as are held, or
        of fewer, to evict tokens. Using the layer between the two assignments raises `StateMismatchError`.
        """
        return self._handed_out("keys")

    @keys.setter
    def keys(self, states: Tensor) -> None:
        self._assign(states, "keys")

    @property
    def values(self) -> Tensor | None:
        """Values held, `[batch, kv_heads, held, head_dim]`; see `keys`."""
        return self._handed_out("values")

    @values.setter
    def values(self, states: Tensor) -> None:
        self._assign(states, "values")

    def _handed_out(self, side: Side) -> Tensor | None:
        store = self.store
        if store.forms is None and store.complete is store:
            return None
        return store.caller_views()[side == "values"]

    @override
    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.store.forms is None else self.store.newest(self.store.length)

    def _assign(self, states: Tensor, side: Side) -> None:
        if not isinstance(states, Tensor) or states.dim() != 4:
            seen = list(states.shape) if isinstance(states, Tensor) else f"a {type(states).__name__}"
            raise StateMismatchError(
                f"`{side}` must be [batch, kv_heads, tokens, head_dim], got {seen}: pass a tensor, or use reset() "
                "to forget all tokens."
            )
        before = self.store
        keys, values = self.keys, self.values
        self.store = before.complete
        try:
            states = self._assignable(states)
            keys, values = (states, values) if side == "keys" else (keys, states)
            # A layer without tokens has no states for the other half yet.
            keys, values = (states[:, :, :0] if half is None else half for half in (keys, values))
            # The same numbers of sequences and of tokens.
            if keys.shape[::2] == values.shape[::2]:
                self._replace(keys, values)
            else:
                self.store = cast("TokenStore", PendingAssignment(self.store, keys, values))
        except BaseException:
            self.store = before
            raise

    def _assignable(self, states: Tensor) -> Tensor:
        """The part of the assigned `states` that replaces the held states.

        Args:
            states: assigned keys or values, `[batch, kv_heads, tokens, head_dim]`.

        Raises:
            StateMismatchError: this kind of layer cannot go on from the states of as many tokens.
        """
        return states

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self.store = self.store.rewritten(keys, values)

    # Parts of the forms of keys and values, `None` before the first states

    batch_size = part_of_form("batch_size")
    dtype = part_of_form("dtype")
    device = part_of_form("device")

    @override
    def select(self, indices: Tensor) -> None:
        try:
            self._with_beside(indices, lambda: self.store.select(indices))
        except (AttributeError, IndexError, TypeError, RuntimeError):
            # Not before, since beam search asks at each step, with indices that its cache has checked.
            as_batch_indices(indices, self.batch_size or 0)
            raise

    @override
    def expand(self, repeats: int) -> None:
        if self.batch_size is not None:
            self._with_beside(repeated_rows(repeats, self.batch_size), lambda: self.store.expand(repeats))

    def _with_beside(self, indices: Tensor, change: Callable[[], None]) -> None:
        """Change the sequences of the store, and of what is beside it. If there is no memory, nothing has changed."""
        chosen = {name: getattr(self, name).selected(indices) for name in self.beside}
        change()
        self.__dict__.update(chosen)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from self.store.held_tensors()
        for name in self.beside:
            yield from getattr(self, name).held_tensors()

    @override
    def share_prefix(self, other: CacheLayer, tokens: int) -> None:
        dropped = self.length - self.store.length
        if isinstance(other, TokenLayer) and dropped == other.length - other.store.length:
            self.store.share_prefix(other.store, tokens - dropped)

    @override
    def reset(self) -> None:
        self.store = self.store.complete
        self.store.clear()

    @override
    def fork(self) -> Self:
        twin = self._twin()
        twin.store = self.store.fork()
        return twin

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        if self.store.length:
            raise StateMismatchError(
                f"The layer must be empty, got one that holds {self.store.length} tokens: reset the cache first."
            )
        self.store.reserve_form(key_form, value_form)

    def snapshot(self) -> Self:
        """See `TokenStore.snapshot`."""
        twin = self._twin()
        twin.store = self.store.snapshot()
        return twin

    @classmethod
    @override
    def reserved_by(cls, facts: Facts) -> tuple[int, int]:
        store_class = store_class_of(facts)
        return (0, 0) if store_class is None else store_class.reserved_by(facts)

    @override
    def state(self) -> LayerState:
        facts = self.describe()
        for name, value in self.store.describe().items():
            if facts.get(name, value) != value:
                raise StateMismatchError(
                    f"A {type(self).__name__} and its {type(self.store).__name__} must describe themselves by "
                    f"different names, got {name} in both: rename one of them."
                )
        return LayerState(self.kind, self.store.state(), {**facts, "length": self.length})

    @override
    def load_state(self, state: LayerState) -> None:
        self.check_state(state)
        self.store.load_state(state.tensors)

    @override
    def check_state(self, state: LayerState) -> None:
        check_kind_of_state(state, self.kind)
        for name, value in self.describe().items():
            if name not in self.reservation_facts and state.facts.get(name) != value:
                raise StateMismatchError(
                    f"`state` must have {name}={value}, got {name}={state.facts.get(name)}: load it into a "
                    "cache that was made with the same settings."
                )
        kinds = {(tensor.layout, tensor.device) for tensor in state.tensors.values()}
        if len(kinds) > 1 or any(layout != torch.strided for layout, _ in kinds):
            raise StateMismatchError(
                f"`state` must be dense tensors on one device, got {sorted(map(str, kinds))}: move them to one device."
            )
        self.check_held(self.store.check_state(state.tensors), state.length)

    def check_held(self, held: int, seen: int) -> None:
        """Raise `StateMismatchError` if a layer that has seen `seen` tokens cannot go on from the newest `held`."""
        if held != seen:
            raise StateMismatchError(f"`state` must have all of its {seen} tokens, got {held}: take the state again.")


@register_layer
class DynamicLayer(TokenLayer):
    """Full attention: keeps every token.

    Args:
        length_hint: the most tokens that are expected, if known; see `DenseStore`.
        store: how the tokens are held; a `DenseStore` if it is not given.
    """

    hints = ("length_hint",)
    traits = LayerTraits(keeps_every_token=True, can_be_stacked=True)
    capacity: int | None = None

    @checks_options
    def __init__(self, length_hint: int | None = None, store: TokenStore | None = None) -> None:
        super().__init__(DenseStore(length_hint) if store is None else store)

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.store.take_in(key_states, value_states)

    @override
    def side_by_side(self, layers: Sequence[CacheLayer]) -> CacheLayer:
        # Rows in one tensor are saved and compared as a plain layer, so they stand for nothing else.
        plain = DynamicLayer()
        if (self.kind, self.describe()) != (plain.kind, plain.describe()):
            return super().side_by_side(layers)
        joined: CacheLayer = late.function("dense rows")(layers)
        return joined

    @property
    @override
    def length(self) -> int:
        return self.store.length

    count = forwarded("store")

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Asked in each step: without the calls of layers that hold less than they saw.
        return self.store.length + query_length, 0

    @override
    def check_truncate(self, length: int) -> None:
        check_rollback(length, self.store.length)

    @override
    def truncate(self, length: int) -> None:
        self.check_truncate(length)
        self.store.truncate(int(length))


SLACK_DIVISOR = 4
"""A window has spare room for its own length divided by this number, and moves to the front when that is used up."""

MINIMUM_SLACK = 16
"""The least spare room of a window, in tokens."""


def window_room(sliding_window: int) -> int:
    """Tokens of memory that a window needs so that each step of sliding costs the same."""
    return sliding_window - 1 + max(sliding_window // SLACK_DIVISOR, MINIMUM_SLACK)


class WindowLayer(CacheLayer):
    """What a `TokenLayer` with a window has before it: it counts the tokens seen, and drops those that left the window.

    While the past is recorded, no token is dropped between one `truncate` or `crop` and the next. So the tokens of a
    rejected draft can be taken back although the window is full.

    Attributes:
        window: tokens that a query attends to, itself included.
        room: tokens of memory for the window, beyond which the store shrinks.
    """

    store: TokenStore
    window: int
    room: int
    _seen = 0

    @property
    @override
    def length(self) -> int:
        return self._seen

    @override
    def count(self, tokens: int) -> None:
        self._seen = self._seen + tokens

    @override
    def activate_past_recording(self) -> None:
        """Hold every token between one `truncate` or `crop` and the next, which may then go back to any of them."""
        self.record_past = True

    @override
    def deactivate_past_recording(self) -> None:
        """Hold no more than the window from now on."""
        self.record_past = False
        self._keep_window()

    @override
    def truncate(self, length: int) -> None:
        length = whole_number(length, "`length`")
        self.check_truncate(length)
        if length:
            self.store.truncate(self.store.length - (self._seen - length))
        else:
            self.store.clear()
        self._seen = length
        self._keep_window()

    def _extend(self, keys: Tensor, values: Tensor, past: int, attended: int) -> KVPair:
        """Hold validated states behind `past` tokens of the window; return these and the newest `attended` held ones.

        An update that is interrupted has not happened.
        """
        store, tokens = self.store, keys.shape[2]
        held = store.length
        if self.record_past:
            store.reserve(held + tokens)
        elif past + tokens > self.room:
            return store.extend_and_evict(keys, values, attended, min(self.window - 1, past + tokens))
        try:
            return store.extend(keys, values, attended)
        except BaseException:
            if store.length > held:
                store.truncate(held)
            raise

    def _keep_window(self) -> None:
        self._drop_beyond_window()
        self.store.shrink(self.room)

    def _drop_beyond_window(self) -> None:
        """Drop the tokens to which no later token attends."""
        beyond = self.store.length - (self.window - 1)
        if beyond > 0:
            self.store.drop_oldest(beyond)

    @property
    @override
    def capacity(self) -> int | None:
        return self.window

    def attended_past(self, tokens: int) -> int:
        """See `TokenLayer.attended_past`."""
        return min(tokens, self.window - 1)

    @override
    def check_truncate(self, length: int) -> None:
        check_rollback(length, self._seen)
        dropped = self._seen - self._tokens_to_return_to()
        needed = max(length - self.window + 1, 0)
        if length and needed < dropped:
            raise RollbackError(
                f"`length` must be one to which the held tokens suffice, got {length} of {self._seen}: that needs "
                f"token {needed} again, and the tokens before {dropped} have left the window of {self.window}: call "
                "activate_past_recording() before the tokens that may be taken back, or fork() the cache."
            )

    def _tokens_to_return_to(self) -> int:
        """How many of the newest tokens a rollback may need."""
        return self.store.length

    def check_held(self, held: int, seen: int) -> None:
        """See `TokenLayer.check_held`."""
        if not min(seen, self.window - 1) <= held <= seen:
            raise StateMismatchError(
                f"A state must have at least the newest {min(seen, self.window - 1)} of {seen} tokens, "
                f"got {held}: take the state again."
            )

    @override
    def reset(self) -> None:
        super().reset()  # type: ignore[safe-super]
        self._seen = 0


@register_layer
class SlidingLayer(WindowLayer, TokenLayer):
    """Sliding-window and chunked attention: keeps the newest `sliding_window - 1` tokens.

    A query attends to itself and the `sliding_window - 1` tokens before it, so no more tokens are kept between updates.
    Chunked attention attends to fewer tokens, those of the query's chunk, by its mask.

    Args:
        sliding_window: tokens that a query attends to, itself included; the chunk size for chunked attention.
        store: how the tokens are held; a `DenseStore` if it is not given.
    """

    described = ("sliding_window",)
    made_with: ClassVar[tuple[Argument, ...]] = (
        StoreArgument("store", room=lambda facts: window_room(facts["sliding_window"])),
    )
    traits = LayerTraits(can_be_stacked=True)
    is_sliding = True
    sliding_window: int

    @checks_options
    def __init__(self, sliding_window: int, store: TokenStore | None = None) -> None:
        check_window(sliding_window)
        self.room = window_room(sliding_window)
        super().__init__(DenseStore(length_hint=self.room) if store is None else store)
        self.window = self.sliding_window = sliding_window
        self._seen = 0

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        store, seen = self.store, self._seen
        tokens = store.validate(key_states, value_states)
        past = min(store.length, self.sliding_window - 1)
        attended = self._extend(key_states, value_states, past, past)
        self._seen = seen + tokens
        if not self.record_past:
            self._drop_beyond_window()
        return attended

    def resume_at(self, seen: int) -> None:
        """Take the held tokens for the newest of `seen` tokens."""
        self._seen = seen

    @override
    def _recount(self, length: int) -> None:
        held = self.store.length
        if not min(length, self.sliding_window - 1) <= held <= length:
            raise not_of_so_many(length, held)
        self._seen = length

    @override
    def _assignable(self, states: Tensor) -> Tensor:
        # An assignment does not change how many tokens were seen. The assigned states count as the newest tokens.
        if states.shape[2] > self._seen:
            raise StateMismatchError(
                f"Assigned states must be of at most the {self._seen} tokens that were seen, got {states.shape[2]}: "
                "use update for new tokens, and from_legacy_cache to fill a new cache."
            )
        return states

    @override
    def _replace(self, keys: Tensor, values: Tensor) -> None:
        seen = self._seen
        super()._replace(keys, values)
        self._seen = seen
        if not self.record_past:
            self._drop_beyond_window()

    @override
    def load_state(self, state: LayerState) -> None:
        super().load_state(state)
        self._seen = state.length


def check_window(sliding_window: object) -> None:
    """Raise `ConfigError` if `sliding_window` is not a number of tokens."""
    if not isinstance(sliding_window, int) or isinstance(sliding_window, bool) or sliding_window < 1:
        raise ConfigError(
            f"`sliding_window` (or a chunk size) must be at least 1 token, got {sliding_window!r}: set it in the "
            "model config, or use a layer for full attention."
        )


def planned_bits(layer: CacheLayer, shape: LayerShape) -> float:
    """Bits of one number of a key or value, with its share of scales; not of the few tokens in full precision."""
    part = layer.parts[0].unwrapped
    return part.store.planned_bits(*shape.forms()) if isinstance(part, TokenLayer) else 8.0 * shape.dtype.itemsize
