"""What attention reads of an evicting layer, and the queries that it shows in return."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlayers.core.token_store import KVPair, TokenStore
from kvlayers.errors import StateMismatchError, UnsupportedLayerError
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.eviction.rule import ALL_QUERIES
from kvlayers.eviction.settings import EvictionSettings
from kvlayers.kernels.attention.packed_ops import packed_like, snapshot_of
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, Segment


def held_states(store: TokenStore) -> KVPair | None:
    """Keys and values of the held tokens, for attention; `None` if no token is held."""
    if not store.length:
        return None
    return store.attended_states() if isinstance(store, RaggedStore) else store.newest(store.length)


def joined_states(held: KVPair | None, keys: Tensor, values: Tensor) -> KVPair:
    """Keys and values of held tokens, and of new ones behind them, which are not stored."""
    if held is None:
        return keys, values
    if not isinstance(held[0], PackedStates):
        return torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)
    return _of_segments(held, (*held[0].snapshot.segments.in_order, DenseSegment(keys, values)))


def with_columns(states: KVPair, columns: int) -> KVPair:
    """States with at least `columns` columns: if there are fewer, columns without a token are added in front."""
    missing = columns - states[0].shape[2]
    if missing <= 0:
        return states
    segments = snapshot_of(*states).segments
    first, *others = segments.in_order
    if isinstance(first, GatheredSegment):
        wider = replace(first, columns=first.columns + missing, width=first.width + missing)
        return _of_segments(states, (wider, *others))
    last = segments.in_order[-1]
    if not isinstance(last, DenseSegment):
        raise TypeError("the newest tokens must be in full precision")
    dense = DenseSegment(last.keys[:, :, :1], last.values[:, :, :1], last.rows)
    nothing = torch.zeros(segments.batch, segments.kv_heads, 1, dtype=torch.int64, device=segments.device)
    return _of_segments(states, (GatheredSegment(dense, nothing, nothing, nothing, missing), *segments.in_order))


def _of_segments(states: KVPair, segments: tuple[Segment, ...]) -> KVPair:
    """The same states with other segments."""
    keys, values = states
    snapshot = snapshot_of(keys, values)
    whole = replace(snapshot, segments=KVSegments(segments))
    return packed_like(keys, values, whole)


QUERIES_NAME = "observed_queries"
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
        return {} if held is None else {QUERIES_NAME: held.clone()}

    def of_state(self, tensors: dict[str, Tensor]) -> "ObservedQueries":
        """The queries that `state` returned these tensors for.

        Raises:
            StateMismatchError: the tensor is not of queries.
        """
        queries = tensors.get(QUERIES_NAME)
        if queries is None:
            return self.emptied()
        if queries.dim() != 4 or not queries.is_floating_point():
            raise StateMismatchError(
                f"`{QUERIES_NAME}` must be [batch, heads, tokens, head_dim], got {list(queries.shape)} of "
                f"{queries.dtype}: take the state again."
            )
        return replace(self, parts=(queries.clone(),))


@dataclass(frozen=True, eq=False, slots=True)
class AwaitedQueries:
    """The newest tokens, whose queries attention has not shown. Without tokens, nothing is expected.

    Attributes:
        tokens: how many.
        new: their keys and values, if an eviction waits for the queries: they are not stored yet.
    """

    tokens: int = 0
    new: KVPair | None = None

    @property
    def unstored(self) -> int:
        """Tokens that are not stored yet."""
        return 0 if self.new is None else self.tokens

    def check_shown(self, settings: EvictionSettings) -> None:
        """Raise `UnsupportedLayerError` if an eviction still waits for the queries."""
        if self.new is not None:
            raise UnsupportedLayerError(
                f"The eviction rule {settings.rule_shown} needs the queries of the newest {self.tokens} tokens, but "
                "the attention of the model has not shown them: use attn_implementation='sdpa', 'eager' or 'kvlayers' "
                "without torch.compile, or a rule without queries, such as 'keydiff'. reset() or crop() takes these "
                "tokens back."
            )


NOTHING = AwaitedQueries()
