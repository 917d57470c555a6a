"""A layer that keeps the tokens that a rule scores highest."""

import functools
from collections.abc import Iterator, Sequence

from torch import Tensor
from typing_extensions import Self, override

from kvlayers.attention.packed_ops import observed
from kvlayers.errors import RollbackError, StateMismatchError, UnsupportedLayerError
from kvlayers.eviction import ALL_QUERIES, EvictionRule
from kvlayers.eviction.scoring import scores_of
from kvlayers.eviction.selection import select
from kvlayers.eviction.settings import STEP, EvictionSettings, name_of
from kvlayers.eviction.whole_blocks import block_scores, without_parts
from kvlayers.layers.arguments import repeated_rows, whole_number
from kvlayers.layers.dynamic import check_rollback
from kvlayers.layers.evicting_states import TokensToScore, joined_states, with_empty_columns
from kvlayers.layers.eviction_account import NAMES as ACCOUNT_NAMES
from kvlayers.layers.eviction_account import EvictionAccount
from kvlayers.layers.observed_queries import NAME as QUERIES_NAME
from kvlayers.layers.observed_queries import ObservedQueries
from kvlayers.layers.operations import LayerOperations, LayerState
from kvlayers.layers.registry import register_layer
from kvlayers.layers.sink_tokens import padding_of
from kvlayers.layers.token_layer import DEFAULT_STORE, TokenLayer
from kvlayers.quantizers.contract import Side
from kvlayers.rope.rotary import Rotary
from kvlayers.stores import TokenStore
from kvlayers.stores.contract import Fidelity, KVPair
from kvlayers.stores.dense import dense_in_small_steps
from kvlayers.stores.description import DescriptionContext, Fact, Facts
from kvlayers.stores.eviction import evicted
from kvlayers.stores.held_tokens import held_tokens
from kvlayers.stores.ragged import RaggedStore
from kvlayers.stores.ragged_state import is_ragged
from kvlayers.utils.options import checks_options

WHOLE_FROM = "whole_from"
"""The name, in a state, of the position from which on every head holds every token."""


@register_layer
class EvictingLayer(TokenLayer):
    """Full attention of limited memory: keeps the sinks, the newest tokens, and those that a rule scores highest.

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
        rule: which tokens are evicted first: the name of a rule, or an `EvictionRule`.
        keep: part of the tokens that an average KV head keeps, larger than 0 and at most 1.
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

    described = ("rule", "keep", "budget", "sink_tokens", "recent_tokens", "per_head", "scale")
    hints = ("left_padding",)
    evicts_by_states = True

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
        settings = EvictionSettings.of(rule, keep, budget, sink_tokens, recent_tokens, per_head, rotary, scale)
        self.settings, self.rotary, self.scale = settings, rotary, scale
        self._empty = dense_in_small_steps() if store is None else store
        super().__init__(self._empty.fork())
        self.record_past = False
        self._start_over(EvictionAccount(settings, padding_of(left_padding)))

    def _start_over(self, account: EvictionAccount) -> None:
        """Count as before the first token."""
        self._seen = 0
        self._whole_from = 0
        """Position from which on every head holds every token."""
        self._announced = 0
        """Columns of held tokens that the mask of the next update has, if more than are held."""
        self._set_account(account)
        self._queries = ObservedQueries(self.settings.rule.queries)
        self._expect(None, 0, waits=False)

    def _set_account(self, account: EvictionAccount) -> None:
        self._account = account
        # Asked for at every token.
        self._next_eviction = account.next_eviction

    def _expect(self, new: KVPair | None, tokens: int, waits: bool) -> None:
        """Expect attention to show the queries of the newest `tokens` tokens.

        Args:
            new: states of these tokens, if they are not stored yet.
            tokens: how many.
            waits: whether an eviction waits for the queries.
        """
        self._new, self._unseen, self._waits = new, tokens, waits

    # Taking in states

    @override
    def update(self, key_states: Tensor, value_states: Tensor) -> KVPair:
        self._check_settled()
        store, account = self._store, self._account
        tokens = store.validate(key_states, value_states)
        account.check_batch(key_states.shape[0])
        seen = self._seen + tokens
        if tokens > 1 and not self.record_past and account.is_due(seen, slack=0):
            return self._update_and_evict(key_states, value_states)
        wider = self._announced - store.length
        attended = store.extend(key_states, value_states)
        if wider > 0:
            attended = with_empty_columns(attended, wider)
        self._announced = 0
        self._seen = seen
        is_due = self._next_eviction is not None and seen >= self._next_eviction and not self.record_past
        if not self.settings.rule.queries:
            if is_due:
                self._evict(None, self._queries, STEP - 1, seen)
            return attended
        if self.settings.budget is None and not self.record_past:
            return attended
        self._expect(None, tokens, waits=is_due)
        return observed(*attended, functools.partial(self._observe, seen))

    def _update_and_evict(self, keys: Tensor, values: Tensor) -> KVPair:
        """Attend to everything, but store the kept tokens alone."""
        states = joined_states(self._held_states(), keys, values)
        if self._announced > self.columns:
            states = with_empty_columns(states, self._announced - self.columns)
        self._announced = 0
        if self.settings.rule.queries:
            self._seen += keys.shape[2]
            self._expect((keys, values), keys.shape[2], waits=True)
            return observed(*states, functools.partial(self._observe, self._seen))
        self._evict((keys, values), self._queries, 0, self._seen + keys.shape[2])
        return states

    def _held_states(self) -> KVPair | None:
        """Keys and values of the held tokens, for attention; `None` if no token is held."""
        store = self._store
        if not store.length:
            return None
        return store.attended_states() if isinstance(store, RaggedStore) else store.newest(store.length)

    def _observe(self, seen: int, query: Tensor) -> None:
        """Take note of the queries of the newest tokens, and evict if an eviction has waited for them.

        Args:
            seen: tokens seen when the states were returned that the queries attend to.
            query: `[batch, heads, queries, head_dim]`.
        """
        if seen != self._seen or query.shape[2] != self._unseen:
            # Queries of another layer, which reads the same states, or of states that were rolled back.
            return
        new, waits, queries = self._new, self._waits, self._queries.with_newest(query)
        if waits:
            try:
                self._evict(new, queries, STEP - 1 if new is None else 0, seen)
            except BaseException:
                # Nothing waits any longer, and tokens that were not stored are taken back.
                self._seen -= 0 if new is None else self._unseen
                self._expect(None, 0, waits=False)
                raise
        elif self.settings.budget is not None or self.record_past:
            self._queries = queries
        self._expect(None, 0, waits=False)

    def _evict(self, new: KVPair | None, queries: ObservedQueries, slack: int, seen: int) -> None:
        """Keep fewer tokens of each sequence that holds more than `slack` tokens too many.

        Args:
            new: states of the newest tokens, if they are not stored yet.
            queries: the queries that the rule may ask for.
            slack: tokens that a sequence may hold beyond what is allowed.
            seen: tokens seen, the new ones included.
        """
        settings, account = self.settings, self._account
        tokens = TokensToScore.of(held_tokens(self._store), new, None if self._whole_from else account.padding)
        # Queries of tokens that some head has evicted would not stand beside their keys.
        observed_tokens = queries.newest(seen - self._whole_from)
        scores = scores_of(settings.rule, tokens.keys, tokens.values, observed_tokens, tokens.counts)
        front = scores.shape[2] - tokens.counts
        if tokens.blocks is not None:
            scores = block_scores(scores, tokens.blocks, settings.sink_tokens, settings.recent_tokens, front)
        kept = select(
            scores,
            account.wanted(seen, slack, scores.shape[0]),
            sinks=settings.sink_tokens,
            recent=settings.recent_tokens,
            padding=front,
            head_budgets=settings.head_budgets,
        )
        if tokens.blocks is not None:
            kept = without_parts(kept, tokens.blocks, scores)
        self._store = evicted(self._store, new, kept)
        self._set_account(account.with_counts(seen, kept.counts))
        self._whole_from = max(self._whole_from, seen - settings.recent_tokens)
        keeps_queries = settings.budget is not None and settings.rule.queries != ALL_QUERIES
        self._queries = queries if keeps_queries else queries.emptied()
        self._seen = seen

    def _check_settled(self) -> None:
        """Raise `UnsupportedLayerError` if an eviction waits for queries that attention has not shown."""
        if self._waits:
            raise UnsupportedLayerError(
                f"The eviction rule {self._rule_shown} needs the queries of the newest {self._unseen} tokens, but the "
                "attention of the model has not shown them: use attn_implementation='sdpa', 'eager' or 'kvlayers', or "
                "a rule without queries, such as 'keydiff'. reset() or crop() takes these tokens back."
            )

    @property
    def _rule_shown(self) -> str:
        name = self.settings.rule_name
        return type(self.settings.rule).__name__ if name is None else repr(name)

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
        return super().batch_size if self._new is None else int(self._new[0].shape[0])

    @property
    @override
    def capacity(self) -> int | None:
        return None

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = max(self.columns, self._announced)
        return held + query_length, self._seen - held

    def announce(self, columns: int) -> None:
        """Return states with this many columns for held tokens from the next update.

        The layers of a model share a mask, but need not hold as many tokens. Columns without a token come first.
        """
        self._announced = columns

    @property
    def columns(self) -> int:
        """Tokens that a head attends to at most, besides the next token."""
        return self._store.length + (0 if self._new is None else self._unseen)

    @property
    @override
    def held_tokens(self) -> int:
        return int(self._account.held(self._seen).max())

    @property
    @override
    def fidelity(self) -> Fidelity:
        return "evicting"

    @property
    @override
    def exact_from(self) -> int | None:
        first = self._store.exact_from
        if not first:
            return None if first is None else self._whole_from
        return max(self._whole_from, self._seen - self._store.length + first)

    @override
    def planned_tokens(self, tokens: int) -> int:
        return min(tokens, self.settings.allowed(tokens))

    @property
    def left_padding(self) -> Tensor | None:
        """Tokens of padding before each sequence, int64 `[batch]` on the host; `None` without padding."""
        return self._account.padding

    @left_padding.setter
    def left_padding(self, padding: Sequence[int] | Tensor | None) -> None:
        if self._seen:
            raise StateMismatchError(
                f"`left_padding` must be given before the first token, got it after {self._seen} tokens: reset the "
                "cache first."
            )
        self._set_account(self._account.with_padding(padding_of(padding)))

    @override
    def note_left_padding(self, padding: Tensor | None) -> None:
        self.left_padding = padding

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from super().held_tensors()
        yield from self._queries.held_tensors()
        yield from self._new or ()

    @override
    def _handed_out(self, side: Side) -> Tensor | None:
        self._check_settled()
        return super()._handed_out(side)

    @override
    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        self._check_settled()
        return super().peek()

    @override
    def assignable(self, states: Tensor) -> Tensor:
        if self._whole_from or states.shape[2] != self._seen:
            raise StateMismatchError(
                f"States can only be assigned to an evicting layer for all of its {self._seen} tokens while none is "
                f"evicted, got states of {states.shape[2]} tokens: use state() and load_state()."
            )
        return states

    # Rolling back

    @override
    def check_truncate(self, length: int) -> None:
        check_rollback(length, self._seen)
        stored = self._seen - (0 if self._new is None else self._unseen)
        if length > stored and length != self._seen:
            self._check_settled()
        if length and length < self._whole_from:
            raise RollbackError(
                f"The layer can be rolled back to {self._whole_from} to {self._seen} tokens, or to 0, got {length}: "
                "some of the tokens before have been evicted. Call activate_past_recording() before the tokens that "
                "may be taken back, protect more recent_tokens, or fork() the cache."
            )

    @override
    def truncate(self, length: int) -> None:
        length = whole_number(length, "a length")
        self.check_truncate(length)
        dropped = self._seen - length
        if not length:
            padding = self._account.padding
            self.reset()
            self.left_padding = padding
            return
        if not dropped and self._waits:
            return
        stored = self._seen - (0 if self._new is None else self._unseen)
        self._store.truncate(self._store.length - (stored - length))
        self._queries = self._queries.without_newest(stored - length)
        self._seen = length
        self._expect(None, 0, waits=False)
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
        rule = self.settings.rule
        if (
            self.record_past
            and self._account.is_due(self._seen, STEP - 1)
            and not (rule.queries and not self._queries.count)
        ):
            self._evict(None, self._queries, STEP - 1, self._seen)

    # The batch, copies and state

    @override
    def select(self, indices: Tensor) -> None:
        self._check_settled()
        super().select(indices)
        self._select_others(indices)

    def _select_others(self, indices: Tensor) -> None:
        self._set_account(self._account.selected(indices))
        self._queries = self._queries.selected(indices)

    @override
    def expand(self, repeats: int) -> None:
        self._check_settled()
        batch_size = self.batch_size
        super().expand(repeats)
        if batch_size is not None:
            self._select_others(repeated_rows(repeats, batch_size))

    @override
    def share_prefix(self, other: LayerOperations, tokens: int) -> None:
        # After an eviction the first tokens of the store are no longer those of the text.
        if isinstance(other, EvictingLayer) and not self._whole_from and not other._whole_from:
            super().share_prefix(other, tokens)

    @override
    def reset(self) -> None:
        """Forget all tokens, and the padding before them; the memory is kept for the next ones."""
        super().reset()
        if isinstance(self._store, RaggedStore):
            self._store = self._empty.fork()
        self._start_over(EvictionAccount(self.settings))

    @override
    def fork(self) -> Self:
        self._check_settled()
        return super().fork()

    @property
    def rotaries(self) -> tuple[Rotary, ...]:  # type: ignore[override]
        """The rotation of the keys, if the rule was told."""
        return () if self.rotary is None else (self.rotary,)

    @property
    def rule(self) -> str:
        """Name of the rule.

        Raises:
            OptionError: the rule has no name, so that the layer can be neither saved nor described.
        """
        name = self.settings.rule_name
        return name_of(self.settings.rule) if name is None else name

    @override
    def described_arguments(self) -> dict[str, Fact]:
        settings = self.settings
        return {
            "rule": self.rule,
            "keep": settings.keep,
            "budget": settings.budget,
            "sink_tokens": settings.sink_tokens,
            "recent_tokens": settings.recent_tokens,
            "per_head": settings.per_head,
            "scale": self.scale,
        }

    @override
    def describe(self) -> dict[str, Fact]:
        store = self._empty.describe()
        return {
            **({} if store == DEFAULT_STORE else store),
            **self.described_arguments(),
            "rotary": None if self.rotary is None else self.rotary.fingerprint,
        }

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        return cls(**cls.arguments_from(facts), rotary=context.rotary(facts["rotary"]), store=context.store(facts))

    @override
    def state(self) -> LayerState:
        self._check_settled()
        tensors = self._store.state()
        if tensors:
            device = tensors["keys"].device
            tensors |= dict(self._account.state(device)) | self._queries.state()
        facts = {**self.describe(), "length": self.length, WHOLE_FROM: self._whole_from}
        return LayerState(self.kind, tensors, facts)

    @override
    def check_state(self, state: LayerState) -> None:
        own, stored = _split(state)
        self._check_stored(stored)
        whole_from = state.facts.get(WHOLE_FROM)
        if not isinstance(whole_from, int) or not 0 <= whole_from <= state.length:
            raise StateMismatchError(
                f"`{WHOLE_FROM}` must be a position among the {state.length} tokens of the state, got {whole_from!r}: "
                "take the state again."
            )
        account = self._account.of_state({name: own[name] for name in own if name in ACCOUNT_NAMES}, state.length)
        if not whole_from and bool(account.evicted.any()):
            raise StateMismatchError(
                f"`{WHOLE_FROM}` must be 0 only if no token is evicted, got 0: take the state again."
            )
        self._queries.of_state(own)

    def _check_stored(self, state: LayerState) -> None:
        """Check the state of the store, as a store of its kind does."""
        before = self._store
        try:
            if is_ragged(state.tensors) and not isinstance(before, RaggedStore):
                self._store = RaggedStore(self._empty.fork())
            super().check_state(state)
        finally:
            self._store = before

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
        own, stored = _split(state)
        store = self._empty.fork()
        if is_ragged(stored.tensors):
            store = RaggedStore(store)
        store.load_state(stored.tensors)
        self._start_over(self._account.of_state({n: own[n] for n in own if n in ACCOUNT_NAMES}, state.length))
        self._store, self._seen = store, state.length
        self._whole_from = int(state.facts[WHOLE_FROM] or 0)
        self._queries = self._queries.of_state(own)


def _split(state: LayerState) -> tuple[dict[str, Tensor], LayerState]:
    """The tensors beside those of the store, and the state of the store."""
    names = {*ACCOUNT_NAMES, QUERIES_NAME}
    own = {name: tensor for name, tensor in state.tensors.items() if name in names}
    stored = {name: tensor for name, tensor in state.tensors.items() if name not in names}
    return own, LayerState(state.kind, stored, state.facts)
