"""The states that attention reads of an evicting layer."""

from dataclasses import replace

import torch
from torch import Tensor

from kvlayers.attention.packed_ops import packed_like, snapshot_of
from kvlayers.attention.packed_tensor import PackedStates
from kvlayers.attention.segment_kinds import DenseSegment
from kvlayers.attention.segments import GatheredSegment, KVSegments, Segment
from kvlayers.stores.contract import KVPair, TokenStore
from kvlayers.stores.ragged import RaggedStore


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
    whole = replace(snapshot, segments=KVSegments(segments, snapshot.segments.smoothing))
    return packed_like(keys, values, whole)
