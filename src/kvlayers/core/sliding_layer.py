"""A layer that keeps a window of the newest tokens."""

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from kvlayers.core.arguments import check_rollback, whole_number
from kvlayers.core.cache_layer import CacheLayer, LayerState, LayerTraits, not_of_so_many, register_layer
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.description import Argument
from kvlayers.core.token_layer import TokenLayer
from kvlayers.core.token_store import KVPair, StoreArgument, TokenStore
from kvlayers.errors import ConfigError, RollbackError, StateMismatchError
from kvlayers.utils.options import checks_options

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
