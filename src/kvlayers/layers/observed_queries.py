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
        parts: queries `[batch, heads, observed, head_dim]`, rotated and not scaled, in the order of their tokens. A
            part is joined with the next one when that is as long: so a query is copied a few times, and not once for
            each later token.
    """

    wanted: int
    parts: tuple[Tensor, ...] = ()

    @property
    def count(self) -> int:
        """Tokens whose queries are held."""
        return sum(part.shape[2] for part in self.parts)

    def newest(self, tokens: int) -> Tensor | None:
        """The wanted queries of at most the newest `tokens` tokens, `[batch, heads, observed, head_dim]`."""
        if not self.parts:
            return None
        joined = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, dim=2)
        most = tokens if self.wanted == ALL_QUERIES else min(tokens, self.wanted)
        return joined[:, :, -most:]

    def with_newest(self, queries: Tensor) -> "ObservedQueries":
        """The same with the queries of further tokens, `[batch, heads, new, head_dim]`, as far as they are wanted."""
        parts = [*self.parts, queries.detach()]
        while len(parts) > 1 and parts[-2].shape[2] <= parts[-1].shape[2]:
            parts[-2:] = [torch.cat(parts[-2:], dim=2)]
        known = replace(self, parts=tuple(parts))
        if self.wanted != ALL_QUERIES and known.count >= 2 * self.wanted:
            newest = known.newest(self.wanted)
            # A copy, so that the other queries are not kept in memory.
            return known if newest is None else replace(self, parts=(newest.clone(),))
        return known

    def without_newest(self, tokens: int) -> "ObservedQueries":
        """The same without the queries of the newest `tokens` tokens."""
        parts, left = [], self.count - tokens
        for part in self.parts:
            if left > 0:
                parts.append(part[:, :, :left])
            left -= part.shape[2]
        return replace(self, parts=tuple(parts))

    def selected(self, indices: Tensor) -> "ObservedQueries":
        """The queries of the sequences at `indices`, int64 `[new_batch]`."""
        return replace(self, parts=tuple(part.index_select(0, indices.to(part.device)) for part in self.parts))

    def emptied(self) -> "ObservedQueries":
        """The same before the first queries."""
        return ObservedQueries(self.wanted)

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive."""
        yield from self.parts

    def state(self) -> dict[str, Tensor]:
        """A copy of the queries, by name."""
        held = self.newest(self.count)
        return {} if held is None else {NAME: held.clone()}

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
        return replace(self, parts=(queries.clone(),))
