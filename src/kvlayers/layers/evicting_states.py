"""The states that attention reads of an evicting layer."""

from dataclasses import replace

import torch
from torch import Tensor

from kvlayers.attention.packed_ops import packed_pair, snapshot_of
from kvlayers.attention.packed_tensor import PackedStates
from kvlayers.attention.segments import DenseSegment, GatheredSegment, KVSegments
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
    return _with_segments(held, (), (DenseSegment(keys, values),))


def with_columns(states: KVPair, columns: int) -> KVPair:
    """States with at least `columns` columns: if there are fewer, columns without a token are added in front."""
    missing = columns - states[0].shape[2]
    if missing <= 0:
        return states
    source = states if not isinstance(states[0], PackedStates) else _some_states(states[0].snapshot.segments)
    dense = DenseSegment(source[0].as_subclass(Tensor)[:, :, :1], source[1][:, :, :1])
    nothing = torch.zeros(*dense.keys.shape[:2], 1, dtype=torch.int64, device=dense.keys.device)
    return _with_segments(states, (GatheredSegment(dense, nothing, nothing, nothing, missing),), ())


def _some_states(segments: KVSegments) -> KVPair:
    """Keys and values of any dense segment: the newest tokens are in full precision."""
    last = segments.in_order[-1]
    if not isinstance(last, DenseSegment):
        raise TypeError("the newest tokens must be in full precision")
    return last.keys, last.values


def _with_segments(states: KVPair, before: tuple[GatheredSegment, ...], behind: tuple[DenseSegment, ...]) -> KVPair:
    """States with further segments."""
    keys, values = states
    snapshot = snapshot_of(keys, values)
    segments = KVSegments((*before, *snapshot.segments.in_order, *behind))
    return packed_pair(replace(snapshot, segments=segments), keys.shape[1], (keys.shape[3], values.shape[3]))
