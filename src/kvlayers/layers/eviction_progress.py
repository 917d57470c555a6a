"""What an evicting layer knows of its text, beside the states of the tokens that it holds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlayers.errors import RollbackError, StateMismatchError
from kvlayers.eviction.settings import EvictionSettings
from kvlayers.layers.eviction_account import NAMES as ACCOUNT_NAMES
from kvlayers.layers.eviction_account import EvictionAccount
from kvlayers.layers.observed_queries import NAME as QUERIES_NAME
from kvlayers.layers.observed_queries import ObservedQueries
from kvlayers.layers.operations import LayerState

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

    @property
    def can_score(self) -> bool:
        """Whether the rule has the queries that it asks for."""
        return not self.settings.rule.queries or self.queries.count > 0

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
        return replace(self, account=self.account.with_padding(padding))

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
        numbers = {name: state.tensors[name] for name in ACCOUNT_NAMES if name in state.tensors}
        account = self.account.of_state(numbers, state.length)
        if not whole_from and bool(account.evicted.any()):
            raise StateMismatchError(
                f"`{WHOLE_FROM}` must be 0 only if no token is evicted, got 0: take the state again."
            )
        return EvictionProgress(account, self.queries.of_state(state.tensors), whole_from)


def of_the_store(state: LayerState) -> LayerState:
    """The part of a layer's state that its store understands."""
    own = {*ACCOUNT_NAMES, QUERIES_NAME}
    return LayerState(state.kind, {n: tensor for n, tensor in state.tensors.items() if n not in own}, state.facts)
