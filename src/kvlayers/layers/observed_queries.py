"""The queries of the newest tokens, for eviction rules that look at them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlayers.errors import StateMismatchError
from kvlayers.eviction import ALL_QUERIES

NAME = "observed_queries"
"""The name of the queries in a state."""


@dataclass(frozen=True, eq=False, slots=True)
class ObservedQueries:
    """Queries that attention has shown, those of the newest tokens. Every change makes a new object.

    Attributes:
        wanted: how many a rule asks for; see `EvictionRule.queries`.
        held: `[batch, heads, observed, head_dim]`, rotated and not scaled; `None` before the first queries.
    """

    wanted: int
    held: Tensor | None = None

    @property
    def count(self) -> int:
        """Tokens whose queries are held."""
        return 0 if self.held is None else int(self.held.shape[2])

    def newest(self, tokens: int) -> Tensor | None:
        """The queries of at most the newest `tokens` tokens."""
        return self.held if self.held is None or self.count <= tokens else self.held[:, :, -tokens:]

    def with_newest(self, queries: Tensor) -> "ObservedQueries":
        """The same with the queries of further tokens, `[batch, heads, new, head_dim]`, as far as they are wanted."""
        queries = queries.detach()
        known = queries if self.held is None else torch.cat([self.held, queries], dim=2)
        if self.wanted != ALL_QUERIES and known.shape[2] > self.wanted:
            # A copy, so that the other queries are not kept in memory.
            known = known[:, :, -self.wanted :].clone()
        return replace(self, held=known)

    def without_newest(self, tokens: int) -> "ObservedQueries":
        """The same without the queries of the newest `tokens` tokens."""
        if self.held is None or not tokens:
            return self
        return replace(self, held=self.held[:, :, :-tokens] if tokens < self.count else None)

    def selected(self, indices: Tensor) -> "ObservedQueries":
        """The queries of the sequences at `indices`, int64 `[new_batch]`."""
        held = self.held
        return self if held is None else replace(self, held=held.index_select(0, indices.to(held.device)))

    def emptied(self) -> "ObservedQueries":
        """The same before the first queries."""
        return ObservedQueries(self.wanted)

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive."""
        if self.held is not None:
            yield self.held

    def state(self) -> dict[str, Tensor]:
        """A copy of the queries, by name."""
        return {} if self.held is None else {NAME: self.held.clone()}

    def of_state(self, tensors: dict[str, Tensor]) -> "ObservedQueries":
        """The queries that `state` returned these tensors for.

        Raises:
            StateMismatchError: the tensor is not of queries.
        """
        queries = tensors.get(NAME)
        if queries is None:
            return self.emptied()
        if queries.dim() != 4 or not queries.is_floating_point():
            raise StateMismatchError(
                f"`{NAME}` must be [batch, heads, tokens, head_dim], got {list(queries.shape)} of {queries.dtype}: "
                "take the state again."
            )
        return replace(self, held=queries.clone())
