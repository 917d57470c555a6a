"""The tokens that a store holds, as attention and the selection of tokens to keep look at them."""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from kvlayers.core.token_store import KVPair, TokenStore
from kvlayers.errors import UnsupportedLayerError
from kvlayers.eviction.flat_tokens import FlatTokens
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.kernels.attention.packed_ops import packed_like, snapshot_of
from kvlayers.kernels.attention.packed_tensor import PackedStates, as_dense
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, Segment
from kvlayers.quantized.packed_blocks import SIDES
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.utils.transforms import without_autocast


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
        packed: the segments with packed blocks, whose pieces are blocks. Numbers of blocks count the pieces of a head
            over all of these.
    """

    keys: Tensor
    values: Tensor
    counts: Tensor
    blocks: Tensor | None = None
    packed: tuple[GatheredSegment, ...] = ()


def held_tokens(store: TokenStore, states: KVPair | None = None) -> HeldTokens:
    """The tokens of a store, with a column for each of its `length`, and new tokens behind them.

    Args:
        store: a `DenseStore`, a `QuantizedStore` or a `RaggedStore`.
        states: what `attended_with` has returned for the store and the new tokens, if there are any.

    Raises:
        UnsupportedLayerError: the oldest tokens of a packed block were dropped.
    """
    store = store.complete
    keys, values = _attended(store) if states is None else states
    # New tokens alone may be what another cache has returned.
    if not isinstance(keys, PackedStates) or not store.length:
        return HeldTokens(as_dense(keys), as_dense(values), torch.full(keys.shape[:2], keys.shape[2]))
    snapshot = keys.snapshot
    segments = snapshot.segments
    with without_autocast(snapshot.device):
        in_full, held = segments.in_full_precision(snapshot.dtype)
        # New tokens may have wider dtypes.
        newest = cast("DenseSegment", in_full.in_order[-1])
        keys, values = (
            in_full.dense(side, torch.promote_types(snapshot.dtype, own.dtype))
            for side, own in zip(SIDES, newest.tensors, strict=True)
        )
    counts = torch.full(keys.shape[:2], keys.shape[2]) if held is None else held.sum(2).cpu()
    blocks, packed = _blocks_of(segments)
    # Copies in another order do not need memory beside these.
    del in_full, newest
    if isinstance(store, RaggedStore) and store.flat is not None and store.flat.sinks:
        order = _columns_in_order(store.flat, keys.shape[2])
        keys, values = taken((keys, values), order)
        blocks = None if blocks is None else blocks.gather(2, order)
    return HeldTokens(keys, values, counts, blocks, packed)


def _blocks_of(segments: KVSegments) -> tuple[Tensor | None, tuple[GatheredSegment, ...]]:
    """The number of the block of each column, as `HeldTokens.blocks`, and the segments that the blocks are in."""
    if not segments.holds_packed:
        return None, ()
    packed: list[GatheredSegment] = []
    numbers = torch.full((segments.batch, segments.kv_heads, segments.tokens), -1, device=segments.device)
    before = 0
    for first, segment in segments.with_columns:
        if isinstance(segment.source, PackedSegment):
            pieces = _in_pieces(segment)
            packed.append(pieces)
            # Tokens are right-aligned, and columns in front of them stand for none.
            ends = pieces.counts.cumsum(2)
            columns = torch.arange(pieces.width, device=ends.device) - (pieces.width - ends[..., -1:])
            numbers[..., first : first + pieces.width] = torch.where(
                columns < 0, -1, torch.searchsorted(ends, columns, right=True) + before
            )
            before += ends.shape[2]
    return numbers, tuple(packed)


def _in_pieces(segment: Segment) -> GatheredSegment:
    """A segment with packed blocks as each head of each sequence of the batch reads them."""
    if not isinstance(segment, PackedSegment):
        return cast("GatheredSegment", segment)
    if segment.first:
        raise UnsupportedLayerError(
            "Tokens cannot be evicted from a block whose oldest tokens were dropped: drop no oldest tokens of a "
            "store from which tokens are evicted."
        )
    size, blocks = segment.keys.layout.block_tokens, segment.blocks
    source = next(segment.pieces(blocks * size))
    device, shape = source.keys.codes.device, source.keys.codes.shape[:3]
    starts = torch.arange(blocks, device=device).expand(shape)
    counts = torch.tensor(segment.ends or [size] * blocks, device=device).expand(shape)
    return GatheredSegment(source, starts, counts, starts * size, segment.tokens)


def _columns_in_order(flat: FlatTokens, length: int) -> Tensor:
    """The columns of a store of `length` columns in the order of the text, int64 `[batch, kv_heads, length]`.

    The sinks, which are in the tail, come first. Columns without a token come in front of them.
    """
    tokens = flat.tokens[..., None]
    columns = torch.arange(length, device=tokens.device)
    first = flat.width - tokens
    of_flat = torch.where(columns < first + flat.sinks, columns + tokens, columns - flat.sinks)
    return torch.where((columns < first) | (columns >= flat.width + flat.sinks), columns, of_flat)


def taken(states: KVPair, columns: Tensor) -> KVPair:
    """Keys and values `[batch, kv_heads, tokens, head_dim]` in these columns, int64 `[batch, kv_heads, chosen]`."""
    device = states[0].device
    sequences, heads = (torch.arange(size, device=device)[:, None] for size in columns.shape[:2])
    at = sequences[..., None], heads, columns.to(device)
    return states[0][at], states[1][at]


def attended_with(store: TokenStore, keys: Tensor, values: Tensor) -> KVPair:
    """Keys and values of held tokens, and of new ones behind them, which are not stored, for attention."""
    if not store.length:
        return keys, values
    if isinstance(store, QuantizedStore):
        # In the dtype that new tokens may have widened: a kernel reads all segments as of one.
        store = store.in_validated_form()
    held = _attended(store)
    keys, values = as_dense(keys), as_dense(values)
    if not isinstance(held[0], PackedStates):
        return torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)
    snapshot = held[0].snapshot
    # Kernels read all segments in one dtype.
    keys, values = (states.to(torch.promote_types(states.dtype, snapshot.dtype)) for states in (keys, values))
    return _of_segments(held, (*snapshot.segments.in_order, DenseSegment(keys, values)))


def _attended(store: TokenStore) -> KVPair:
    """Keys and values of held tokens, for attention."""
    return store.attended_states() if isinstance(store, RaggedStore) else store.newest(store.length)


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
