"""A layer that keeps the tokens that a rule scores highest."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import check_rollback, whole_number
from kvlayers.core.cache_layer import CacheLayer, LayerState, LayerTraits, register_layer
from kvlayers.core.dense_store import DenseStore, may_share
from kvlayers.core.description import Argument, RotaryArgument
from kvlayers.core.preparation import padding_of
from kvlayers.core.token_layer import TokenLayer
from kvlayers.core.token_store import Fidelity, KVPair, StoreArgument, TokenStore
from kvlayers.errors import OptionError, StateMismatchError, UnsupportedLayerError
from kvlayers.eviction.evicted import evicted
from kvlayers.eviction.eviction_progress import PROGRESS_NAMES, STEP, WHOLE_FROM, EvictionProgress
from kvlayers.eviction.held_tokens import attended_with, held_tokens, with_columns
from kvlayers.eviction.options import EvictionOptions
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.eviction.rule import EvictionRule, scores_of
from kvlayers.eviction.selection import HEAD_FLOOR, select
from kvlayers.kernels.attention.gqa import marked_for_sdpa
from kvlayers.kernels.attention.packed_ops import observed
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.rope.rotary import Rotary
from kvlayers.utils.options import checks_options

SMALL_STEP_DIVISOR = 40
"""What a store grows by. It has next to no spare room, since evicted tokens are to leave memory. A token is then copied
40 times on average, which costs less than attention reading it at every step."""

SMALL_STEP = 16
"""Fewest tokens by which such a store grows."""


@register_layer
class EvictingLayer(TokenLayer):
    """Full attention of limited memory: keeps the sinks, the newest tokens, and the tokens with the highest scores.

    A prompt, or a later chunk of several tokens, that would exceed what the layer may hold is attended to as a whole.
    Only the tokens that are kept are stored. With a `budget`, the layer also evicts while single tokens come, whenever
    it holds `STEP` tokens more than that. With `keep`, single tokens are all kept until several come at once.

    Kept keys stay as they came. Positions are those of the text: `length` counts all tokens seen.

    The layer can be rolled back within its newest tokens, which every head holds: those since the last eviction, and
    the `recent_tokens` before it. While the past is recorded, no token is evicted between one `truncate` or `crop` and
    the next.

    A rule that needs queries gets them when attention reads the states that `update` returned. The layer holds all
    tokens of the update until then.

    Args:
        rule: which tokens are evicted first: the name of a rule, an `EvictionRule`, or a
            `ScorerPress` of kvpress.
        keep: part of the tokens that an average KV head keeps, larger than 0 and at most 1. Without
            `budget` either, the rule says it: a half for most.
        budget: tokens that an average KV head keeps, in place of `keep`.
        sink_tokens: first tokens of each sequence, after its padding, that are always kept.
        recent_tokens: newest tokens that an eviction always keeps.
        per_head: whether KV heads keep different numbers of tokens.
        rotary: how keys are rotated, for rules that need to know; `None` for keys that do not know positions.
        scale: factor of the scores of attention, `None` for `1 / sqrt(head_dim)`.
        store: how the tokens are held; a `DenseStore` if it is not given.
        left_padding: tokens of padding before each sequence, int64 `[batch]`. They are evicted first, and not counted.

    Raises:
        OptionError: an argument has a wrong value.

    Example:
        >>> import torch, kvlayers
        >>> layer = kvlayers.EvictingLayer("knorm", keep=0.25, sink_tokens=4, recent_tokens=16, per_head=False)
        >>> keys, values = layer.update(torch.randn(1, 2, 400, 8), torch.randn(1, 2, 400, 8))
        >>> keys.shape, layer.length, layer.held_tokens
        (torch.Size([1, 2, 400, 8]), 400, 100)
    """

    described = ("scale",)
    made_with = (
        StoreArgument("store", "_empty"),
        Argument("rule", "options.registered_name", "eviction_rule"),
        Argument("keep", "options.keep", "eviction_keep"),
        Argument("budget", "options.budget", "eviction_budget"),
        Argument("sink_tokens", "options.sink_tokens", "eviction_sink_tokens"),
        Argument("recent_tokens", "options.recent_tokens", "eviction_recent_tokens"),
        Argument("per_head", "options.per_head", "eviction_per_head"),
        RotaryArgument("rotary"),
    )
    hints = ("left_padding",)
    beside = ("_progress",)
    traits = LayerTraits(evicts_by_states=True)
    fidelity: Fidelity = "evicting"
    capacity: int | None = None

    @checks_options
    def __init__(
        self,
        rule: str | EvictionRule,
        keep: float | None = None,
        budget: int | None = None,
        sink_tokens: int = 4,
        recent_tokens: int = 64,
        per_head: bool = True,
        rotary: Rotary | None = None,
        scale: float | None = None,
        store: TokenStore | None = None,
        left_padding: Sequence[int] | Tensor | None = None,
    ) -> None:
        quantization = store.quantization if isinstance(store, QuantizedStore) else None
        if not (store is None or quantization is not None or may_share(store)):
            raise OptionError(
                "`store` of a layer that evicts tokens must be a DenseStore or a QuantizedStore, got a "
                f"{type(store).__name__}: pass one of them."
            )
        given = EvictionOptions.of(
            rule,
            keep,
            budget,
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
            per_head=per_head,
            quantization=quantization,
        )
        self.options = options = replace(given, rule=given.rule.for_attention(rotary, scale))
        self.rotary, self.scale = rotary, scale
        self._empty = DenseStore(None, SMALL_STEP_DIVISOR, SMALL_STEP) if store is None else store
        super().__init__(self._empty.fork())
        self._start_over(EvictionProgress(options, padding_of(left_padding)))

    def _start_over(self, progress: EvictionProgress, seen: int = 0) -> None:
        """Go on from there, with nothing expected of attention."""
        self._progress, self._seen = progress, seen
        self._announced = self._awaited = 0
        self._unstored: KVPair | None = None

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> KVPair:
        self._check_settled()
        store, progress, options = self.store, self._progress, self.options
        tokens = (
            key_states.shape[2]
            if isinstance(key_states, Tensor) and key_states.dim() == 4
            else store.validate(key_states, value_states)
        )
        progress.check_batch(key_states.shape[0])
        seen = self._seen + tokens
        evicts = (
            (progress.is_due(seen, slack=0) if tokens > 1 else seen >= progress.next_eviction)
            and not self.record_past
            and key_states.shape[0] > 0
        )
        if evicts:
            store.validate(key_states, value_states)
        # An eviction attends to everything, but stores the kept tokens alone. If scores are wrong, nothing is stored.
        states = attended_with(store, key_states, value_states) if evicts else store.take_in(key_states, value_states)
        if self._awaited:
            # Attention has not shown the queries of the last tokens. Earlier ones would not stand beside their keys.
            self._progress = progress = progress.without_queries(seen)
        returned = with_columns(states, self._announced + tokens)
        if evicts and not options.rule.queries:
            self._evict(states, tokens, progress, seen)
            self._announced = 0
            return marked_for_sdpa(*returned, tokens)
        self._announced, self._seen = 0, seen
        if not evicts and (not options.rule.queries or (options.budget is None and not self.record_past)):
            return returned
        self._awaited, self._unstored = tokens, (key_states, value_states) if evicts else None
        return observed(*returned, functools.partial(self._observe, seen))

    def _observe(self, seen: int, query: Tensor) -> None:
        """Take note of the queries of the newest tokens, and evict if an eviction has waited for them.

        Args:
            seen: tokens seen when the states were returned that the queries attend to.
            query: `[batch, heads, queries, head_dim]`, or `[batch, kv_heads, group * queries, head_dim]`: so are the
                queries of a group of heads shown by transformers' "sdpa" beside a mask, and by "kvlayers".
        """
        tokens, new = self._awaited, self._unstored
        if seen != self._seen or not tokens or query.shape[2] % tokens:
            # Queries of another layer, which reads the same states, or of states that were rolled back.
            return
        progress = self._progress.with_queries(query.reshape(query.shape[0], -1, tokens, query.shape[3]))
        # If the eviction fails, nothing waits any longer, and tokens that were not stored are taken back.
        self._awaited, self._unstored = 0, None
        if new is None:
            self._progress = progress
            return
        self._seen -= tokens
        self._evict(attended_with(self.store, *new), tokens, progress, seen)

    def _evict(self, states: KVPair | None, new: int, progress: EvictionProgress, seen: int) -> None:
        """Keep fewer tokens of each sequence that has too many. If scores are wrong, nothing has changed.

        Args:
            states: keys and values of the held tokens, and of new ones that are not stored yet; `None` if all are.
            new: how many are not stored yet.
            progress: how far the layer has evicted, with the queries that the rule may ask for.
            seen: tokens seen, the new ones included.

        Raises:
            StateMismatchError: the rule returned something other than scores of these tokens.
        """
        tokens = held_tokens(self.store, states)
        counts = progress.unpadded(tokens.counts)
        # Tokens that come one by one are evicted in steps.
        wanted = progress.wanted(seen, 0 if new > 1 else STEP - 1, counts.shape[0])
        # A sequence that keeps everything needs no scores, and its queries wait for its own eviction.
        scored = counts * counts.new_tensor(wanted).lt(seen)[:, None]
        kept = select(
            scores_of(self.options.rule, tokens.keys, tokens.values, progress.queries, scored, progress.observed),
            wanted,
            sinks=self.options.sink_tokens,
            recent=self.options.recent_tokens,
            padding=tokens.keys.shape[2] - counts,
            floor=HEAD_FLOOR if self.options.heads_differ else 1.0,
            blocks=tokens.blocks,
        )
        self.store = evicted(self.store, tokens, kept)
        self._progress, self._seen = progress.after_eviction(seen, counts, kept.counts), seen

    def _check_settled(self) -> None:
        """Raise `UnsupportedLayerError` if an eviction waits for queries that attention has not shown."""
        if self._unstored is not None:
            raise UnsupportedLayerError(
                f"The eviction rule {self.options.rule_shown} needs the queries of the newest {self._awaited} tokens, "
                "but the attention of the model has not shown them: use attn_implementation='sdpa', 'eager' or "
                "'kvlayers' without torch.compile, or a rule without queries, such as 'keydiff'. reset() or crop() "
                "takes these tokens back."
            )

    @property
    def _waiting(self) -> int:
        """Tokens that are not stored yet."""
        return 0 if self._unstored is None else self._awaited

    # What the layer is and holds

    @property
    @override
    def length(self) -> int:
        return self._seen

    @override
    def count(self, tokens: int) -> None:
        self._seen = self._seen + tokens

    @property
    @override
    def batch_size(self) -> int | None:
        return super().batch_size if self._unstored is None else int(self._unstored[0].shape[0])

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = max(self.columns, self._announced)
        return held + query_length, self._seen - held

    def announce(self, columns: int) -> None:
        """Return states with this many columns for held tokens from the next update.

        Layers that share a mask may hold different numbers of tokens. Columns without a token come first.
        """
        self._announced = columns

    @property
    def columns(self) -> int:
        """Tokens that a head attends to at most, besides the next token."""
        return self.store.length + self._waiting

    @property
    @override
    def held_tokens(self) -> int:
        return int(self._progress.held(self._seen).max())

    @property
    @override
    def exact_from(self) -> int | None:
        first = self.store.exact_from
        return None if first is None else max(self._progress.whole_from, self._seen - self.store.length + first)

    @property
    def left_padding(self) -> Tensor | None:
        """Tokens of padding before each sequence, int64 `[batch]` on the host; `None` without padding."""
        return self._progress.padding

    @left_padding.setter
    def left_padding(self, padding: Sequence[int] | Tensor | None) -> None:
        if self._seen:
            raise StateMismatchError(
                f"`left_padding` must be given before the first token, got it after {self._seen} tokens: reset the "
                "cache first."
            )
        self._start_over(EvictionProgress(self.options, padding_of(padding)))

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from super().held_tensors()
        yield from self._unstored or ()

    @override
    def _handed_out(self, side: Side) -> Tensor | None:
        self._check_settled()
        return super()._handed_out(side)

    @override
    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        self._check_settled()
        return super().peek()

    @override
    def _assignable(self, states: Tensor) -> Tensor:
        if self._progress.whole_from or states.shape[2] != self._seen:
            raise StateMismatchError(
                f"States can only be assigned to an evicting layer for all of its {self._seen} tokens while none is "
                f"evicted, got states of {states.shape[2]} tokens: use state() and load_state()."
            )
        return states

    # Rolling back

    @override
    def check_truncate(self, length: int) -> None:
        check_rollback(length, self._seen)
        if self._seen > length > self._seen - self._waiting:
            self._check_settled()
        self._progress.check_truncate(length, self._seen)

    @override
    def truncate(self, length: int) -> None:
        length = whole_number(length, "`length`")
        self.check_truncate(length)
        if not length:
            padding = self.left_padding
            self.reset()
            self.left_padding = padding
            return
        if length == self._seen and self._unstored is not None:
            return
        self.store.truncate(self.store.length - (self._seen - self._waiting - length))
        # Attention had shown the queries of so many tokens.
        shown = self._seen - self._awaited
        self._start_over(self._progress.without_queries(shown - length if length <= shown else shown), length)
        self._evict_recorded()

    @override
    def activate_past_recording(self) -> None:
        """Hold every token between one `truncate` or `crop` and the next, which may then go back to any of them."""
        self.record_past = True

    @override
    def deactivate_past_recording(self) -> None:
        """Evict as usual from now on."""
        self._check_settled()
        self._evict_recorded()
        self.record_past = False

    def _evict_recorded(self) -> None:
        """Evict what recording has held beyond the step that is allowed while single tokens come."""
        can_score = not self.options.rule.queries or self._progress.shown
        if self.record_past and can_score and self._progress.is_due(self._seen, STEP - 1):
            self._evict(None, 0, self._progress, self._seen)

    # The batch, copies and state

    @override
    def _with_beside(self, indices: Tensor, change: Callable[[], None]) -> None:
        self._check_settled()
        super()._with_beside(indices, change)

    @override
    def share_prefix(self, other: CacheLayer, tokens: int) -> None:
        # After an eviction the first tokens of the store are no longer those of the text.
        if isinstance(other, EvictingLayer) and not self._progress.whole_from and not other._progress.whole_from:
            super().share_prefix(other, tokens)

    @override
    def reset(self) -> None:
        """Forget all tokens, and the padding before them; the memory is kept for the next ones."""
        super().reset()
        if isinstance(self.store, RaggedStore):
            self.store = self._empty.fork()
        self._start_over(EvictionProgress(self.options))

    @override
    def fork(self) -> Self:
        self._check_settled()
        return super().fork()

    @override
    def state(self) -> LayerState:
        self._check_settled()
        tensors = self.store.state()
        if tensors:
            tensors |= self._progress.state(tensors["keys"].device)
        facts = {**self.describe(), "length": self.length, WHOLE_FROM: self._progress.whole_from}
        return LayerState(self.kind, tensors, facts)

    @override
    def check_state(self, state: LayerState) -> None:
        stored = state.split(PROGRESS_NAMES)[1]
        # As a layer with a store of the same kind checks it.
        twin = self._twin()
        twin.store = RaggedStore(self._empty.fork())
        super(EvictingLayer, twin).check_state(stored)
        self._progress.of_state(state)

    @override
    def check_held(self, held: int, seen: int) -> None:
        if not (held <= seen and (held or not seen)):
            raise StateMismatchError(
                f"A state must hold at least one and at most all of its {seen} tokens, got {held}: take the state "
                "again."
            )

    @override
    def load_state(self, state: LayerState) -> None:
        self.check_state(state)
        store = RaggedStore(self._empty.fork())
        store.load_state(state.split(PROGRESS_NAMES)[1].tensors)
        self.store = store.tail if store.flat is None else store
        self._start_over(self._progress.of_state(state), state.length)
