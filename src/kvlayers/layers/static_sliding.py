"""A layer that keeps a window of the newest tokens in memory that is reserved once."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.errors import CapacityError, StateMismatchError
from kvlayers.layers.registry import register_layer
from kvlayers.layers.shape import LayerShape, PlannedBytes
from kvlayers.layers.sliding import SlidingLayer, check_window, window_room
from kvlayers.layers.static import RESERVATION_FACTS, ReservedLayer, check_reservation, reservation_from
from kvlayers.stores import Buckets, StaticStore
from kvlayers.stores.description import DescriptionContext, Fact, Facts
from kvlayers.stores.validation import no_room_for_tokens
from kvlayers.utils.options import checks_options


def reserved_room(max_cache_len: int, sliding_window: int, grow: bool) -> int:
    """Tokens to reserve for a window: no more than are expected, unless the layer may grow."""
    return window_room(sliding_window) if grow or max_cache_len >= sliding_window else max_cache_len


@register_layer
class StaticSlidingLayer(ReservedLayer, SlidingLayer):
    """Sliding-window and chunked attention over memory that is reserved once, at an address that does not change.

    The window has spare room, and moves to the front when the room is used up. So a token is written once, and moved
    only when that happens. In compiled code attention reads the slots from the first slot on, and the mask leaves out
    slots that the window has passed: tokens stay in the order of their positions, which the mask needs.

    Args:
        max_cache_len: the most tokens that are expected. If they are fewer than the window, no more are reserved, and
            one token more raises `CapacityError`.
        sliding_window: tokens that a query attends to, itself included; the chunk size for chunked attention.
        token_limit: tokens after which `CapacityError` is raised although the window could go on, `None` for no limit.
            Next to layers that hold every token, it makes all layers refuse the same token.
        max_batch_size: sequences to reserve for; the batch size of the first tokens if it is not given. One sequence
            more raises `CapacityError`.
        buckets: sizes of the buckets that compiled code reads while the window fills.
        grow: reserve for the whole window even if fewer tokens are expected, and for more sequences when they come.
    """

    reservation_facts = RESERVATION_FACTS | {"token_limit"}

    @checks_options
    def __init__(
        self,
        max_cache_len: int,
        sliding_window: int,
        token_limit: int | None = None,
        max_batch_size: int | None = None,
        buckets: Buckets | None = None,
        grow: bool = False,
    ) -> None:
        check_reservation(max_cache_len, max_batch_size, buckets, grow)
        check_window(sliding_window)
        fits_window = grow or max_cache_len >= sliding_window
        room = reserved_room(max_cache_len, sliding_window, grow)
        whole_from = sliding_window - 1 if fits_window else None
        super().__init__(sliding_window, store=StaticStore(room, max_batch_size, buckets, whole_from, grow))
        self.room = room
        self._expected = max_cache_len
        self.token_limit = None if grow else token_limit if fits_window else max_cache_len

    # The store counts the tokens: if compiled code counted here, it would be compiled for one length.

    @property
    def _seen(self) -> int:
        return self._store.total

    @_seen.setter
    def _seen(self, seen: int) -> None:
        self._store.total = seen

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self._store.mask_extent.mode.uses_buckets:
            return self._update_compiled(key_states, value_states)
        if self.token_limit is not None and key_states.dim() == 4:
            self._check_token_limit(key_states.shape[2])
        if not self.record_past:
            # Compiled code leaves it to eager code to drop tokens that have left the window.
            self._drop_beyond_window()
        return super().update(key_states, value_states)

    def _check_token_limit(self, tokens: int) -> None:
        if self.token_limit is not None and self._seen + tokens > self.token_limit:
            raise no_room_for_tokens(self.token_limit, self._seen, tokens)

    @property
    def _past(self) -> int:
        # Not min(): so compiled code knows that a full window is one constant number.
        most = self.sliding_window - 1
        return most if self._seen >= most else self._seen

    @override
    def make_room(self, tokens: int) -> None:
        if self._store.mask_extent.mode.uses_buckets:
            self._store.prepare()
            if self._store.lacks_room_for(tokens) and self._past + tokens <= self.room:
                self._store.move_to_front(self._past)
        else:
            self._check_token_limit(tokens)

    @property
    @override
    def _bucket_offset(self) -> int:
        return self._store.mask_offset  # type: ignore[return-value]

    def _update_compiled(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        store = self._store
        tokens = store.validate(key_states, value_states)
        if not torch.compiler.is_compiling() or not store.reads_bucket(tokens):
            self._check_token_limit(tokens)
        if store.reads_bucket(tokens):
            return store.extend(key_states, value_states)
        seen, past = self._seen, self._past
        if past + tokens > self.room:
            kept = past + tokens
            if kept >= self.sliding_window - 1:
                kept = self.sliding_window - 1
            attended = store.extend_and_evict(key_states, value_states, past, kept)
            store.set_total(seen + tokens)
            return attended
        self.make_room(tokens)
        return store.extend(key_states, value_states, past)

    @override
    def _tokens_to_return_to(self) -> int:
        # Where compiled code may run, tokens that have left the window stay for a while. Eager code on a CPU has
        # dropped them, and what a program may do must not depend on the device.
        return self._past if self._store.mask_extent.mode.compileable else super()._tokens_to_return_to()

    @property
    @override
    def capacity(self) -> int | None:
        return self.max_cache_len

    @property
    def max_cache_len(self) -> int:
        """The most tokens that a query attends to: the window, or the reservation if that is smaller."""
        return min(self._expected, self.sliding_window)

    @property
    @override
    def sized_for(self) -> int | None:
        return self._expected

    @override
    def planned_nbytes(self, shape: LayerShape, tokens: int, sized_for: int | None) -> PlannedBytes:
        expected = self._expected if sized_for is None else sized_for
        room = reserved_room(expected, self.sliding_window, self._store.grow)
        # A whole window slides on over the reservation.
        held = min(tokens, room) if room >= self.sliding_window else tokens
        return PlannedBytes(self._store.planned_nbytes(*shape.forms(), held, room))

    @property
    def cumulative_length_int(self) -> int:
        """As `length`, by the name of transformers, whose layer also counts in a tensor."""
        return self.length

    @override
    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self._store.mask_extent.mode.recording = True

    @override
    def deactivate_past_recording(self) -> None:
        super().deactivate_past_recording()
        self._store.mask_extent.mode.recording = False

    @override
    def assignable(self, states: Tensor) -> Tensor:
        least = min(self._seen, self.sliding_window - 1)
        if states.shape[2] < least:
            raise StateMismatchError(
                f"expected states of at least the {least} tokens that a static window attends to, since compiled code "
                f"relies on them, but saw {states.shape[2]}: use a DynamicCache to evict tokens of a window."
            )
        return super().assignable(states)

    def covers(self, other: Any, batch_size: int | None) -> bool:
        """Whether this layer can replace another one, for `batch_size` sequences, with the memory that it has."""
        return (
            type(self) is type(other)
            and self.sliding_window == other.sliding_window
            and self._expected >= other._expected
            and (self.token_limit is None) == (other.token_limit is None)
            and self._store.covers(other._store, batch_size)
        )

    @override
    def describe(self) -> dict[str, Fact]:
        return {
            "max_cache_len": self._expected,
            **self._store.describe_reservation(),
            "token_limit": self.token_limit,
            **self.described_arguments(),
        }

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        given: Any = facts
        return cls(token_limit=given["token_limit"], **reservation_from(facts), **cls.arguments_from(facts))

    @classmethod
    @override
    def reserved_by(cls, facts: Facts) -> tuple[int, int]:
        given, reserved = reservation_from(facts), facts["sliding_window"]
        room = reserved_room(given["max_cache_len"], reserved, given["grow"])  # type: ignore[arg-type]
        return room, given["max_batch_size"] or 0

    @override
    def check_held(self, held: int, seen: int) -> None:
        super().check_held(held, seen)
        if self.token_limit is not None and seen > self.token_limit:
            raise CapacityError(f"expected a state of at most {self.token_limit} tokens, but saw {seen}.")
