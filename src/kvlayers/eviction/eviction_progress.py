"""What an evicting layer knows of its text beside the states of the tokens that it holds, and what an eviction does."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlayers.core.dense_store import may_share, store_of, without_spare_room
from kvlayers.core.layer_operations import LayerState
from kvlayers.core.preparation import PADDING_NAME
from kvlayers.core.token_store import KVPair, TokenStore
from kvlayers.errors import RollbackError, StateMismatchError
from kvlayers.eviction.evicting_attention import QUERIES_NAME, ObservedQueries
from kvlayers.eviction.flat_tokens import FlatTokens, pieces_in_a_row
from kvlayers.eviction.held_tokens import HeldTokens, cannot_evict_from, held_tokens, taken
from kvlayers.eviction.packed_eviction import packed_evicted, packed_pieces
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.eviction.rule import scores_of
from kvlayers.eviction.selection import KeptTokens, block_scores, select, without_parts
from kvlayers.eviction.settings import STEP, EvictionSettings
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS
from kvlayers.quantized.quantized_store import QuantizedStore

EVICTED_NAME = "evicted_tokens"
"""The name of the numbers of evicted tokens in a state."""

ACCOUNT_NAMES = (EVICTED_NAME, PADDING_NAME)
"""The names of all numbers in a state."""

PROGRESS_NAMES = (*ACCOUNT_NAMES, QUERIES_NAME)
"""The names of all tensors in a state that the store does not hold."""

_NOTHING = torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class EvictionAccount:
    """Numbers of tokens of each sequence, for an average KV head. Every change makes a new object.

    Attributes:
        settings: how the layer evicts.
        padding: tokens of padding before each sequence, int64 `[batch]` on the host; `None` without padding.
        evicted: tokens evicted of each sequence without its padding, int64 `[batch]` on the host, or `[1]` if it is the
            same number for all.
    """

    settings: EvictionSettings
    padding: Tensor | None = None
    evicted: Tensor = _NOTHING

    def is_due_in_steps(self, seen: int) -> bool:
        """Whether any sequence, whose tokens come one by one, holds a step too many. With `keep`, none ever does."""
        return self.settings.budget is not None and seen >= self._next_eviction

    @functools.cached_property
    def _next_eviction(self) -> int:
        """Tokens seen when the first sequence is due, if tokens come one by one."""
        absent = self.evicted if self.padding is None else self.evicted + self.padding
        return int(absent.min()) + self.settings.allowed(0) + STEP

    def lengths(self, seen: int) -> Tensor:
        """Tokens of each sequence without its padding, int64 `[batch]`, or `[1]` without padding."""
        return torch.full((1,), seen) if self.padding is None else (seen - self.padding).clamp(min=0)

    def held(self, seen: int) -> Tensor:
        """Tokens that an average head holds of each sequence, int64 `[batch]` or `[1]`."""
        return self.lengths(seen) - self.evicted

    def is_due(self, seen: int, slack: int) -> bool:
        """Whether any sequence holds more than `slack` tokens too many."""
        return bool((self.held(seen) > self._allowed(seen) + slack).any())

    def wanted(self, seen: int, slack: int, batch: int) -> list[int]:
        """Tokens that each sequence is to hold: all, unless it holds more than `slack` tokens too many."""
        # An average is rounded down, so that `held` would evict a token of a sequence whose heads hold 3 and 4.
        allowed = self._allowed(seen)
        return torch.where(self.held(seen) > allowed + slack, allowed, seen).expand(batch).tolist()

    def _allowed(self, seen: int) -> Tensor:
        return torch.tensor([self.settings.allowed(tokens) for tokens in self.lengths(seen).tolist()])

    def with_counts(self, seen: int, counts: Tensor) -> "EvictionAccount":
        """The account after heads have kept `counts` tokens, int64 `[batch, kv_heads]` on the host."""
        evicted = self.lengths(seen) - counts.sum(1) // counts.shape[1]
        return replace(self, evicted=evicted[:1] if bool((evicted == evicted[0]).all()) else evicted)

    def selected(self, indices: Tensor) -> "EvictionAccount":
        """The account of the sequences at `indices`, int64 `[new_batch]`."""
        if self.padding is None and self.evicted.shape[0] == 1:
            return self
        indices = indices.cpu()
        return replace(
            self,
            padding=None if self.padding is None else self.padding[indices],
            evicted=self.evicted if self.evicted.shape[0] == 1 else self.evicted[indices],
        )

    def check_batch(self, batch_size: int) -> None:
        """Raise `StateMismatchError` if the padding is for another number of sequences."""
        if self.padding is not None and self.padding.shape[0] != batch_size:
            raise StateMismatchError(
                f"`left_padding` has {self.padding.shape[0]} entries, got states of {batch_size} sequences: give one "
                "entry for each sequence, beams included, or reset the cache."
            )

    def state(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Copies of the numbers on a device, with their names."""
        for name, numbers in ((EVICTED_NAME, self.evicted), (PADDING_NAME, self.padding)):
            if numbers is not None:
                yield name, numbers.to(device, copy=True)

    def of_state(self, tensors: dict[str, Tensor], seen: int) -> "EvictionAccount":
        """The account that `state` returned these tensors for, of a layer that has seen `seen` tokens.

        Raises:
            StateMismatchError: the tensors are no such numbers.
        """
        for name, numbers in tensors.items():
            if numbers.dim() != 1 or not numbers.numel() or numbers.dtype != torch.int64 or bool((numbers < 0).any()):
                raise StateMismatchError(
                    f"`{name}` must be int64 [batch] and not negative, got {list(numbers.shape)} of {numbers.dtype}: "
                    "take the state again."
                )
        padding = tensors.get(PADDING_NAME)
        account = EvictionAccount(
            self.settings,
            None if padding is None else padding.to("cpu", copy=True),
            tensors.get(EVICTED_NAME, _NOTHING).to("cpu", copy=True),
        )
        sizes = {account.evicted.shape[0], 1 if padding is None else padding.shape[0]} - {1}
        if len(sizes) > 1 or bool((account.held(seen) < 0).any()):
            raise StateMismatchError(
                f"`{EVICTED_NAME}` must be at most the {seen} tokens seen, with a number for each sequence, got "
                f"{account.evicted.tolist()}: take the state again."
            )
        return account


WHOLE_FROM = "whole_from"
"""The name of this position in a state."""


@dataclass(frozen=True, eq=False)
class EvictionProgress:
    """How far a layer has evicted. Every change makes a new object.

    Attributes:
        account: tokens of each sequence that are padding, or evicted.
        queries: the queries of the newest tokens, as far as the rule asks for them.
        whole_from: position from which on every head holds every token.
    """

    account: EvictionAccount
    queries: ObservedQueries
    whole_from: int = 0

    @classmethod
    def start(cls, settings: EvictionSettings, padding: Tensor | None = None) -> "EvictionProgress":
        """The progress of a layer without tokens.

        Args:
            settings: how the layer evicts.
            padding: tokens of padding before each sequence, int64 `[batch]` on the host.
        """
        return cls(EvictionAccount(settings, padding), ObservedQueries(settings.rule.queries))

    @property
    def settings(self) -> EvictionSettings:
        """How the layer evicts."""
        return self.account.settings

    @property
    def front(self) -> Tensor | None:
        """Tokens since the last eviction that are padding of each sequence, int64 `[batch]` on the host.

        There are fewer as long as the padding of a sequence goes on.
        """
        padding = self.account.padding
        if padding is None or not self.whole_from:
            return padding
        return (padding - self.whole_from - self.settings.recent_tokens).clamp(min=0)

    def after_eviction(self, seen: int, counts: Tensor, queries: ObservedQueries) -> "EvictionProgress":
        """The progress after an eviction.

        Args:
            seen: tokens of the text.
            counts: how many each head has kept, int64 `[batch, kv_heads]` on the host.
            queries: the queries of the newest tokens.
        """
        settings = self.settings
        return EvictionProgress(
            self.account.with_counts(seen, counts),
            queries if settings.keeps_queries else queries.emptied(),
            max(self.whole_from, seen - settings.recent_tokens),
        )

    def with_padding(self, padding: Tensor | None, seen: int) -> "EvictionProgress":
        """The progress of a layer behind this padding.

        Raises:
            StateMismatchError: `seen`, the tokens that the layer has seen, is not 0.
        """
        if seen:
            raise StateMismatchError(
                f"`left_padding` must be given before the first token, got it after {seen} tokens: reset the cache "
                "first."
            )
        return EvictionProgress.start(self.settings, padding)

    def with_queries(self, queries: ObservedQueries) -> "EvictionProgress":
        """The same with these queries of the newest tokens."""
        return replace(self, queries=queries)

    def rolled_back(self, length: int, shown: int) -> "EvictionProgress":
        """The progress after a rollback to `length` tokens, if attention had shown the queries of `shown` tokens."""
        queries = self.queries.without_newest(shown - length) if length <= shown else self.queries.emptied()
        return self.with_queries(queries)

    def selected(self, indices: Tensor) -> "EvictionProgress":
        """The progress of the sequences at `indices`, int64 `[new_batch]`."""
        return replace(self, account=self.account.selected(indices), queries=self.queries.selected(indices))

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor of a device that keeps memory alive."""
        yield from self.queries.held_tensors()

    def check_truncate(self, length: int, seen: int) -> None:
        """Raise `RollbackError` if some head lacks a token that a text of `length` of the `seen` tokens ends with."""
        if length and length < self.whole_from:
            raise RollbackError(
                f"The layer can be rolled back to {self.whole_from} to {seen} tokens, or be emptied by reset(), got "
                f"{length}: some of the tokens before have been evicted. Call activate_past_recording() before the "
                "tokens that may be taken back, protect more recent_tokens, or fork() the cache."
            )

    def check_assigned(self, tokens: int, seen: int) -> None:
        """Raise `StateMismatchError` if states of `tokens` tokens cannot replace those of a text of `seen` tokens."""
        if self.whole_from or tokens != seen:
            raise StateMismatchError(
                f"States can only be assigned to an evicting layer for all of its {seen} tokens while none is evicted, "
                f"got states of {tokens} tokens: use state() and load_state()."
            )

    def state(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Copies of all tensors on a device, with their names."""
        yield from self.account.state(device)
        yield from self.queries.state().items()

    def of_state(self, state: LayerState) -> "EvictionProgress":
        """The progress of the layer that `state` was taken from.

        Raises:
            StateMismatchError: the tensors and facts are not those of such a layer.
        """
        whole_from = state.facts.get(WHOLE_FROM)
        if not isinstance(whole_from, int) or not 0 <= whole_from <= state.length:
            raise StateMismatchError(
                f"`{WHOLE_FROM}` must be a position among the {state.length} tokens of the state, got {whole_from!r}: "
                "take the state again."
            )
        account = self.account.of_state(state.split(ACCOUNT_NAMES)[0], state.length)
        if not whole_from and bool(account.evicted.any()):
            raise StateMismatchError(
                f"`{WHOLE_FROM}` must be 0 only if no token is evicted, got 0: take the state again."
            )
        return EvictionProgress(account, self.queries.of_state(state.tensors), whole_from)


def evict(
    store: TokenStore, progress: EvictionProgress, new: KVPair | None, queries: ObservedQueries, slack: int, seen: int
) -> tuple[TokenStore, EvictionProgress]:
    """A store with fewer tokens of each sequence that has more than `slack` tokens too many, and the progress.

    Args:
        store: the held tokens. It does not change.
        progress: how far the layer has evicted.
        new: states of the newest tokens, if they are not stored yet.
        queries: the queries that the rule may ask for.
        slack: tokens that a sequence may hold beyond what is allowed.
        seen: tokens seen, the new ones included.

    Raises:
        StateMismatchError: the rule returned something other than scores of these tokens.
    """
    tokens, front = held_tokens(store, new), progress.front
    counts = tokens.counts if front is None else (tokens.counts - front[:, None]).clamp(min=0)
    wanted = progress.account.wanted(seen, slack, counts.shape[0])
    # Queries of tokens that some head has evicted would not stand beside their keys.
    kept = _chosen(progress.settings, tokens, counts, queries.newest(seen - progress.whole_from), wanted)
    return evicted(store, tokens, kept), progress.after_eviction(seen, kept.counts, queries)


def _chosen(
    settings: EvictionSettings, tokens: HeldTokens, counts: Tensor, queries: Tensor | None, wanted: Sequence[int]
) -> KeptTokens:
    """The tokens that are kept.

    Args:
        settings: the rule, and which tokens are always kept.
        tokens: the tokens.
        counts: tokens of each head that are not padding, in its last columns, int64 `[batch, kv_heads]` on the host.
        queries: queries of the newest tokens, `[batch, heads, observed, key_head_dim]`.
        wanted: tokens that an average head is to keep of each sequence.

    Raises:
        StateMismatchError: the rule returned something other than scores of these tokens.
    """
    sinks, recent, blocks = settings.sink_tokens, settings.recent_tokens, tokens.blocks
    scores = scores_of(settings.rule, tokens.keys, tokens.values, queries, counts)
    front = scores.shape[2] - counts
    if blocks is not None:
        scores = block_scores(scores, blocks, sinks, recent, front)
    kept = select(scores, wanted, sinks=sinks, recent=recent, padding=front, head_budgets=settings.head_budgets)
    return kept if blocks is None else without_parts(kept, blocks, scores)


def evicted(store: TokenStore, tokens: HeldTokens, kept: KeptTokens) -> TokenStore:
    """A store that holds only some of the tokens of a store and of new ones. The store does not change.

    Kept tokens are held as they were: states in full precision as they came, and codes as they were packed. If all
    heads keep the same number, the result is a store of the same kind. If not, it is a `RaggedStore`, which has the
    newest tokens that all heads keep in its tail.

    Args:
        store: a `DenseStore`, a `QuantizedStore` or a `RaggedStore`, empty or not.
        tokens: what `held_tokens` has returned for the store and the new tokens.
        kept: the tokens to keep. The tokens of a packed block are kept or evicted together.

    Raises:
        StateMismatchError: the numbers are not those of tokens that there are, or only a part of a block is kept.
        UnsupportedLayerError: the store is of another kind.
    """
    inner = store.tail if isinstance(store, RaggedStore) else store
    states = tokens.keys, tokens.values
    with torch.inference_mode(False), torch.no_grad():
        _check_kept(kept, states)
        run = 0 if kept.are_even else _common_run(kept, states[0].shape[2])
        if isinstance(inner, QuantizedStore):
            left = packed_evicted(inner.quantization, tokens, kept, packed_pieces(store), run)
        elif may_share(inner):
            left = _dense((inner.growth_divisor, inner.minimum_growth), states, kept, run)
        else:
            raise cannot_evict_from(inner)
    return RaggedStore(left) if isinstance(store, RaggedStore) and not isinstance(left, RaggedStore) else left


def _check_kept(kept: KeptTokens, states: KVPair) -> None:
    keys, values = states
    shape, most = keys.shape[:2], kept.indices.shape[-1]
    if kept.indices.shape[:-1] != shape or kept.counts.shape != shape or values.shape[1] != shape[1]:
        raise StateMismatchError(
            f"Kept tokens must be [batch, kv_heads, most] = [{shape[0]}, {shape[1]}, most] for keys of {shape[1]} and "
            f"values of {values.shape[1]} kv_heads, got {list(kept.indices.shape)}: choose them from `held_tokens`."
        )
    if not 0 <= int(kept.counts.min()) <= int(kept.counts.max()) <= most or not 0 < most <= keys.shape[2]:
        raise StateMismatchError(
            f"Heads must keep 0 to {keys.shape[2]} tokens, got counts from {int(kept.counts.min())} to "
            f"{int(kept.counts.max())} with {most} indices: choose them from `held_tokens`."
        )


def _common_run(kept: KeptTokens, tokens: int) -> int:
    """How many of the newest of `tokens` tokens every head keeps."""
    most = kept.indices.shape[2]
    newest = torch.arange(tokens - most, tokens, device=kept.indices.device)
    are_newest = (kept.indices == newest).flip(-1).flatten(0, 1).all(0)
    return min(int(are_newest.long().cumprod(0).sum()), int(kept.counts.min()))


def _dense(growth: tuple[int, int], states: KVPair, kept: KeptTokens, run: int) -> TokenStore:
    """A store in full precision of kept tokens among `states`, of which every head keeps the newest `run`."""
    keys, values = (side.detach() for side in states)
    if kept.are_even:
        return store_of(taken(keys, kept.indices), taken(values, kept.indices), *growth)
    first = keys.shape[2] - run
    tail = store_of(keys[:, :, first:], values[:, :, first:], *growth)
    counts = kept.counts - run
    places = _first_places(kept, counts)
    starts, pieces = (table.to(keys.device) for table in pieces_in_a_row(counts, DENSE_PIECE_TOKENS, 1))
    part = without_spare_room(keys[places][None, None], values[places][None, None])
    return RaggedStore.of(tail, FlatTokens.of(part, starts, pieces))


def _first_places(kept: KeptTokens, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences, heads and tokens, each int64 `[sum of counts]`, of the first kept tokens of each head.

    Args:
        kept: the kept tokens.
        counts: how many to take of each head, int64 `[batch, kv_heads]` on the host.
    """
    indices = kept.indices
    first = (indices.shape[2] - kept.counts)[..., None]
    columns = torch.arange(indices.shape[2])
    sequences, heads, places = ((columns >= first) & (columns < first + counts[..., None])).nonzero(as_tuple=True)
    sequences, heads, places = (part.to(indices.device) for part in (sequences, heads, places))
    return sequences, heads, indices[sequences, heads, places]
