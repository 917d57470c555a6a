"""Layers over memory that is reserved once, at an address that does not change: full attention, and windows."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import no_room_for_tokens
from kvlayers.core.cache_layer import forwarded, in_step, register_layer
from kvlayers.core.description import Argument, OptionsArgument
from kvlayers.core.token_layer import DynamicLayer, SlidingLayer, TokenLayer, check_window, part_of_form, window_room
from kvlayers.errors import CapacityError, StateMismatchError
from kvlayers.static.slots import MOST_TOKENS, Buckets
from kvlayers.static.static_store import StaticStore, check_reserved
from kvlayers.utils.options import check_whole_number, checks_options

RESERVATION_FACTS = frozenset({"max_cache_len", "max_batch_size", "smallest_bucket", "bucket_factor", "grow"})
"""Facts that say what a static layer reserves. Its states do not depend on that."""


class ReservedLayer(TokenLayer):
    """A layer over memory that is reserved once, at an address that does not change."""

    made_with: ClassVar[tuple[Argument, ...]] = (
        Argument("max_batch_size", "store.max_batch_size"),
        OptionsArgument("buckets", "store.buckets", options=Buckets),
        Argument("grow", "store.grow"),
    )
    reservation_facts = RESERVATION_FACTS

    store: StaticStore
    # As layers of transformers that reserve their memory have them, `None` before the first states
    num_heads = part_of_form("kv_heads")
    # In transformers 4, keys and values have one `head_dim`.
    k_head_dim = head_dim = part_of_form("head_dim")
    v_head_dim = part_of_form("head_dim", 1)

    token_limit: int | None
    """The most tokens that the layer may see, `None` for no limit."""
    followers: "tuple[ReservedLayer, ...]" = ()
    """Layers that make room when this layer is asked for its mask sizes, in a cache that asks one layer for all."""

    @property
    @override
    def reserved(self) -> StaticStore:
        """The memory, and the part of it that attention reads."""
        return self.store

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether generate() may compile the forward pass around it."""
        return self.store.mask_extent.mode.compileable

    @property
    def max_batch_size(self) -> int | None:
        """Sequences that memory is reserved for, `None` before the first tokens if it was not given."""
        return self.store.reserved_batch_size

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.make_room(query_length)
        for index in self._followers_in_step():
            self.followers[index].make_room(query_length)
        bucket = self.store.choose_extent(query_length)
        if bucket is None:
            return super().mask_sizes(query_length)
        # Only a window drops tokens, so that its first slot is not that of the first token.
        return bucket, self.store.mask_offset if self.is_sliding else 0  # type: ignore[return-value]

    # A constant of compiled code, in which lengths would be constants otherwise.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _followers_in_step(self) -> tuple[int, ...]:
        return in_step(self, self.followers)

    def covers(self, other: Any, batch_size: int | None) -> bool:
        """Whether this layer can replace another one, for `batch_size` sequences, with the memory that it has."""
        return (
            type(self) is type(other)
            and self.sliding_window == other.sliding_window
            and (self.sized_for or 0) >= (other.sized_for or 0)
            and (self.token_limit is None) == (other.token_limit is None)
            and self.store.covers(other.store, batch_size)
        )

    @override
    def check_held(self, held: int, seen: int) -> None:
        super().check_held(held, seen)
        if self.token_limit is not None and seen > self.token_limit:
            raise CapacityError(
                f"`state` must be of at most {self.token_limit} tokens, which the layer may see, got {seen}: make the "
                "cache with a longer max_cache_len, or with grow=True."
            )

    @override
    def get_seq_length(self) -> int:
        """As `length`. In compiled code it is a tensor, since a number would be that of the step that was compiled."""
        return self.store.total_on_device() if torch.compiler.is_compiling() else self.length  # type: ignore[return-value]

    @override
    def fork(self) -> Self:
        twin = super().fork()
        twin.followers = ()
        return twin


@register_layer
class StaticLayer(ReservedLayer, DynamicLayer):
    """Full attention over memory that is reserved once, at an address that does not change.

    In eager code attention reads the tokens that are held. In compiled code it reads the smallest bucket that contains
    them, so that one compiled function serves many lengths.

    Args:
        max_cache_len: tokens to reserve. One token more raises `CapacityError`.
        max_batch_size: sequences to reserve for; the batch size of the first tokens if it is not given. One sequence
            more raises `CapacityError`.
        buckets: sizes of the buckets that compiled code reads.
        grow: take a larger reservation instead of raising `CapacityError`. Compiled code cannot, and raises.
    """

    made_with = (Argument("max_cache_len", "store.initial_capacity"), *ReservedLayer.made_with)

    @checks_options
    def __init__(
        self,
        max_cache_len: int,
        max_batch_size: int | None = None,
        buckets: Buckets | None = None,
        grow: bool = False,
    ) -> None:
        check_reserved(max_cache_len, "max_cache_len", "tokens", MOST_TOKENS)
        super().__init__(store=StaticStore(max_cache_len, max_batch_size, buckets, grow=grow))

    @property
    def max_cache_len(self) -> int:
        """Tokens reserved."""
        return self.store.capacity

    @property
    def token_limit(self) -> int | None:  # type: ignore[override]
        """The most tokens that the layer may see, `None` if it grows."""
        return None if self.store.grow else self.store.capacity

    capacity = max_cache_len

    @override
    def _recount(self, length: int) -> None:
        """Go on from `length` tokens, as `truncate`.

        Raises:
            RollbackError: fewer tokens are held.
        """
        self.truncate(length)

    @override
    def _assignable(self, states: Tensor) -> Tensor:
        held, tokens = self.length, states.shape[2]
        if tokens > held and tokens != self.max_cache_len:
            raise StateMismatchError(
                f"Assigned states must have at most the {held} tokens that are held, or all {self.max_cache_len} of "
                f"the reservation, got {tokens}: use update for new tokens."
            )
        return states[:, :, :held]

    tensors = forwarded("store")
    """`tensors()`: what compiled code writes to. An exported program must have it as its buffers: `keys` and `values`
    `[batch, kv_heads, max_cache_len, head_dim]`, and the `position` of the next token, an int64 scalar. They are
    reserved by the first update, or by `early_initialization`."""

    @override
    def make_room(self, tokens: int) -> None:
        if self.store.mask_extent.mode.uses_buckets:
            # Only eager code can grow.
            self.store.make_room(tokens)
        else:
            self.store.check_room(tokens)

    @classmethod
    @override
    def reserved_by(cls, facts: Mapping[str, Any]) -> tuple[int, int]:
        return facts["max_cache_len"], facts["max_batch_size"] or 0


def reserved_room(max_cache_len: int, sliding_window: int, grow: bool) -> int:
    """Tokens to reserve for a window: no more than are expected, unless the layer may grow."""
    return window_room(sliding_window) if grow or max_cache_len >= sliding_window else max_cache_len


@register_layer
class StaticSlidingLayer(ReservedLayer, SlidingLayer):  # type: ignore[misc]
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

    made_with = (Argument("max_cache_len", "_expected"), *ReservedLayer.made_with, Argument("token_limit"))
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
        check_reserved(max_cache_len, "max_cache_len", "tokens", MOST_TOKENS)
        check_window(sliding_window)
        if token_limit is not None:
            check_whole_number(token_limit, "`token_limit`", 1, of="tokens")
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
        return self.store.total

    @_seen.setter
    def _seen(self, seen: int) -> None:
        self.store.set_total(seen)

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.store.mask_extent.mode.uses_buckets:
            return self._update_compiled(key_states, value_states)
        if self.token_limit is not None and isinstance(key_states, Tensor) and key_states.dim() == 4:
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
        if self.store.mask_extent.mode.uses_buckets:
            self.store.prepare()
            if self.store.lacks_room_for(tokens) and self._past + tokens <= self.room:
                self.store.move_to_front(self._past)
        else:
            self._check_token_limit(tokens)

    def _update_compiled(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        store = self.store
        tokens = store.validate(key_states, value_states)
        if not torch.compiler.is_compiling() or store.bucket_for(tokens) is None:
            self._check_token_limit(tokens)
        if store.bucket_for(tokens) is not None:
            return store.extend(key_states, value_states)
        past = self._past
        if past + tokens > self.room:
            kept = past + tokens
            if kept >= self.sliding_window - 1:
                kept = self.sliding_window - 1
            return store.extend_and_evict(key_states, value_states, past, kept)
        self.make_room(tokens)
        return store.extend(key_states, value_states, past)

    @override
    def _tokens_to_return_to(self) -> int:
        # Where compiled code may run, tokens that have left the window stay for a while. Eager code on a CPU has
        # dropped them, and what a program may do must not depend on the device.
        return self._past if self.store.mask_extent.mode.compileable else super()._tokens_to_return_to()

    @property
    def max_cache_len(self) -> int:
        """The most tokens that a query attends to: the window, or the reservation if that is smaller."""
        return min(self._expected, self.sliding_window)

    capacity = max_cache_len

    @property
    @override
    def sized_for(self) -> int | None:  # type: ignore[override]
        return self._expected

    # transformers, whose layer also counts in a tensor, calls the number so.
    cumulative_length_int = SlidingLayer.cumulative_length

    @override
    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.store.mask_extent.mode.recording = True

    @override
    def deactivate_past_recording(self) -> None:
        super().deactivate_past_recording()
        self.store.mask_extent.mode.recording = False

    @override
    def _assignable(self, states: Tensor) -> Tensor:
        least = min(self._seen, self.sliding_window - 1)
        if states.shape[2] < least:
            raise StateMismatchError(
                f"Assigned states must have at least the {least} tokens that a static window attends to, since "
                f"compiled code relies on them, got {states.shape[2]}: use a DynamicCache to evict tokens of a window."
            )
        return super()._assignable(states)

    @classmethod
    @override
    def reserved_by(cls, facts: Mapping[str, Any]) -> tuple[int, int]:
        room = reserved_room(facts["max_cache_len"], facts["sliding_window"], facts["grow"])
        return room, facts["max_batch_size"] or 0
