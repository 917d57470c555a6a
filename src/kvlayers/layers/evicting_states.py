"""The states of an evicting layer: what attention reads, and what a rule scores."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.attention.dispatch import PathCounter
from kvlayers.attention.packed_ops import packed_pair
from kvlayers.attention.packed_tensor import PackedStates, Snapshot, Version, as_dense
from kvlayers.attention.segments import DenseSegment, GatheredSegment, KVSegments
from kvlayers.stores.contract import KVPair
from kvlayers.stores.held_tokens import HeldTokens


def joined_states(held: KVPair | None, keys: Tensor, values: Tensor) -> KVPair:
    """Keys and values of held tokens, and of new ones behind them, which are not stored."""
    if held is None:
        return keys, values
    if not isinstance(held[0], PackedStates):
        return torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)
    return _with_segments(held, (), (DenseSegment(keys, values),))


def with_empty_columns(states: KVPair, columns: int) -> KVPair:
    """States with `columns` further columns in front, in which no head has a token."""
    source = states if not isinstance(states[0], PackedStates) else _some_states(states[0].snapshot.segments)
    dense = DenseSegment(source[0].as_subclass(Tensor)[:, :, :1], source[1][:, :, :1])
    nothing = torch.zeros(*dense.keys.shape[:2], 1, dtype=torch.int64, device=dense.keys.device)
    empty = GatheredSegment(dense, nothing, nothing, nothing, columns)
    return _with_segments(states, (empty,), ())


def _some_states(segments: KVSegments) -> KVPair:
    """Keys and values of any dense segment: the newest tokens are in full precision."""
    last = segments.in_order[-1]
    if not isinstance(last, DenseSegment):
        raise TypeError("the newest tokens must be in full precision")
    return last.keys, last.values


def _with_segments(states: KVPair, before: tuple[GatheredSegment, ...], behind: tuple[DenseSegment, ...]) -> KVPair:
    """States with further segments."""
    keys, values = states
    if isinstance(keys, PackedStates):
        snapshot = keys.snapshot
        segments = KVSegments((*before, *snapshot.segments.in_order, *behind))
        whole = replace(snapshot, segments=segments)
    else:
        plain = DenseSegment(keys.as_subclass(Tensor), values)
        segments, version = KVSegments((*before, plain, *behind)), Version()
        whole = Snapshot(segments, keys.dtype, keys.device, version, version.number, segments.tokens, PathCounter())
    return packed_pair(whole, keys.shape[1], (keys.shape[3], values.shape[3]))


@dataclass(frozen=True, eq=False)
class TokensToScore:
    """The held tokens of a layer and new ones behind them.

    Attributes:
        keys: `[batch, kv_heads, columns, key_head_dim]`.
        values: `[batch, kv_heads, columns, value_head_dim]`.
        counts: tokens of each head, in its last columns, int64 `[batch, kv_heads]` on the host.
        blocks: number of the packed block of each token, -1 for tokens in full precision, int64
            `[batch, kv_heads, columns]`; `None` if no token is packed.
    """

    keys: Tensor
    values: Tensor
    counts: Tensor
    blocks: Tensor | None

    @classmethod
    def of(cls, held: HeldTokens | None, new: KVPair | None, padding: Tensor | None) -> Self:
        """Tokens of a store, if it has any, and new states.

        Args:
            held: the tokens of the store.
            new: states behind them.
            padding: places in front of each sequence that are padding, int64 `[batch]` on the host.
        """
        pairs = [] if held is None or not held.keys.shape[2] else [(held.keys, held.values)]
        if new is not None:
            pairs.append((as_dense(new[0]), as_dense(new[1])))
        keys, values = (torch.cat(side, 2) if len(side) > 1 else side[0] for side in zip(*pairs, strict=True))
        added = 0 if new is None else new[0].shape[2]
        counts = torch.full(keys.shape[:2], added)
        if held is not None and held.keys.shape[2]:
            counts = held.counts + added
        if padding is not None:
            counts = counts - padding[:, None]
        blocks = None if held is None else held.blocks
        if blocks is not None and added:
            blocks = torch.cat([blocks, blocks.new_full((*blocks.shape[:2], added), -1)], 2)
        return cls(keys, values, counts, blocks)
