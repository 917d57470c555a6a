"""The tokens that a store holds, as attention and the selection of tokens to keep look at them."""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvlayers.core.token_store import KVPair, TokenStore
from kvlayers.eviction.flat_tokens import FlatTokens
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.kernels.attention.packed_ops import packed_like, snapshot_of
from kvlayers.kernels.attention.packed_tensor import PackedStates, as_dense
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, Segment
from kvlayers.quantized.packed_blocks import SIDES, PackedBlocks
from kvlayers.quantized.quantized_store import QuantizedStore


@dataclass(frozen=True, eq=False)
class HeldTokens:
    """The tokens of each sequence and KV head, right-aligned in the order of the text.

    `KeptTokens.mask` has the same columns.

    Attributes:
        keys: `[batch, kv_heads, columns, key_head_dim]` in full precision, any where a head holds no token. Packed
            keys are brought to full precision for scores alone: their codes stay as they are.
        values: `[batch, kv_heads, columns, value_head_dim]`, likewise.
        counts: tokens of each head, int64 `[batch, kv_heads]` on the host. They are in its last columns.
        blocks: int64 `[batch, kv_heads, columns]`, number of the packed block that each token is in, and -1 for tokens
            in full precision. The tokens of a block are kept or evicted together. `None` if no token is packed.
    """

    keys: Tensor
    values: Tensor
    counts: Tensor
    blocks: Tensor | None = None


def held_tokens(store: TokenStore, new: KVPair | None = None) -> HeldTokens:
    """The tokens of a store, with a column for each of its `length`, and new tokens behind them.

    Args:
        store: a `DenseStore`, a `QuantizedStore` or a `RaggedStore`.
        new: keys and values of the new tokens, each `[batch, kv_heads, new, head_dim]`; `None` if the store has tokens
            and no new ones follow them.
    """
    if new is None:
        return _of_store(store.complete)
    keys, values = map(as_dense, new)
    if not store.length:
        return HeldTokens(keys, values, torch.full(keys.shape[:2], keys.shape[2]))
    held = _of_store(store.complete)
    return HeldTokens(
        torch.cat([held.keys, keys], 2),
        torch.cat([held.values, values], 2),
        held.counts + keys.shape[2],
        None if held.blocks is None else pad(held.blocks, (0, keys.shape[2]), value=-1),
    )


def _of_store(store: TokenStore) -> HeldTokens:
    if isinstance(store, RaggedStore):
        return _of_ragged(store, store.flat) if store.flat is not None else _of_store(store.tail)
    keys, values = map(as_dense, store.newest(store.length))
    counts = torch.full(keys.shape[:2], store.length)
    return HeldTokens(keys, values, counts, _blocks_of(store, keys))


def _blocks_of(store: TokenStore, keys: Tensor) -> Tensor | None:
    """The blocks of a store that is not ragged."""
    if not isinstance(store, QuantizedStore) or not store.blocks:
        return None
    held = torch.tensor(store.blocks.held_counts())
    numbers = torch.arange(len(held)).repeat_interleave(held)
    numbers = pad(numbers, (store.sinks.length, store.residual.length), value=-1)
    return numbers.to(keys.device).expand(*keys.shape[:2], -1)


def _of_ragged(store: RaggedStore, flat: FlatTokens) -> HeldTokens:
    tail = _of_store(store.tail)
    segment = flat.gathered(store.smoothing or DenseSegment.smoothing)
    dtype, absent = torch.promote_types(tail.keys.dtype, tail.values.dtype), ~segment.held
    in_full = KVSegments((segment,)).in_full_precision(dtype)[0]
    keys, values = (
        torch.cat([in_full.dense(side, own.dtype), own], 2)
        for side, own in zip(SIDES, (tail.keys, tail.values), strict=True)
    )
    blocks = None
    if isinstance(flat.part, PackedBlocks):
        ends, columns = flat.counts.cumsum(2), torch.arange(flat.width, device=flat.counts.device)
        numbers = torch.searchsorted(ends, columns - (flat.width - ends[..., -1:]), right=True)
        numbers = numbers.masked_fill(absent, -1)
        of_tail = numbers.new_full(tail.keys.shape[:3], -1) if tail.blocks is None else tail.blocks
        # Blocks of the tail have numbers behind those of the flat part.
        blocks = torch.cat([numbers, torch.where(of_tail < 0, of_tail, of_tail + flat.counts.shape[2])], 2)
    if flat.sinks:
        order = _columns_in_order(flat, store.length)
        keys, values = taken(keys, order), taken(values, order)
        blocks = None if blocks is None else blocks.gather(2, order)
    return HeldTokens(keys, values, flat.tokens.cpu() + store.tail.length, blocks)


def _columns_in_order(flat: FlatTokens, length: int) -> Tensor:
    """The columns of a store of `length` columns in the order of the text, int64 `[batch, kv_heads, length]`.

    The sinks, which are in the tail, come first. Columns without a token come in front of them.
    """
    tokens = flat.tokens[..., None]
    columns = torch.arange(length, device=tokens.device)
    first = flat.width - tokens
    of_flat = torch.where(columns < first + flat.sinks, columns + tokens, columns - flat.sinks)
    return torch.where((columns < first) | (columns >= flat.width + flat.sinks), columns, of_flat)


def taken(states: Tensor, columns: Tensor) -> Tensor:
    """The states `[batch, kv_heads, tokens, head_dim]` in these columns, int64 `[batch, kv_heads, chosen]`."""
    device = states.device
    sequences, heads = (torch.arange(size, device=device)[:, None] for size in columns.shape[:2])
    return states[sequences[..., None], heads, columns.to(device)]


def attended_with(store: TokenStore, keys: Tensor, values: Tensor) -> KVPair:
    """Keys and values of held tokens, and of new ones behind them, which are not stored, for attention."""
    if not store.length:
        return keys, values
    held = store.attended_states() if isinstance(store, RaggedStore) else store.newest(store.length)
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
    # The newest tokens, which are in full precision.
    last = cast("DenseSegment", segments.in_order[-1])
    dense = DenseSegment(last.keys[:, :, :1], last.values[:, :, :1], last.rows)
    nothing = torch.zeros(segments.batch, segments.kv_heads, 1, dtype=torch.int64, device=segments.device)
    return _of_segments(states, (GatheredSegment(dense, nothing, nothing, nothing, missing), *segments.in_order))


def _of_segments(states: KVPair, segments: tuple[Segment, ...]) -> KVPair:
    """The same states with other segments."""
    keys, values = states
    snapshot = snapshot_of(keys, values)
    whole = replace(snapshot, segments=KVSegments(segments))
    return packed_like(keys, values, whole)
