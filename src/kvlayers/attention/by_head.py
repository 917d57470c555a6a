"""Attention of many queries on a CPU where each KV head reads its own tokens: torch's attention, head after head.

The tokens of one KV head of one sequence are a dense tensor, whatever other heads hold. It is copied, or unpacked, for
as long as this head is computed, so no more than one head is in full precision at once.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlayers.attention.fused import unexpanded
from kvlayers.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.attention.segments import GatheredSegment, KVSegments, is_packed

MINIMUM_ROWS_OF_PACKED = 128
"""Queries of one KV head for which unpacking all its tokens at once pays. Measured on a CPU."""


def pays(query: Tensor, segments: KVSegments) -> bool:
    """Whether `attend` takes less time than attention block by block, as measured on a CPU."""
    if query.shape[2] == 1 or not segments.holds_gathered:
        return False
    rows = query.shape[1] // segments.kv_heads * query.shape[2]
    return not segments.holds_packed or rows >= MINIMUM_ROWS_OF_PACKED


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`."""
    batch, heads, queries, _ = query.shape
    group = heads // segments.kv_heads
    out = query.new_zeros((batch, queries, heads, segments.head_dims[1])).transpose(1, 2)
    # Torch's attention is slow for float16 on a CPU.
    dtype = torch.float32 if query.dtype == torch.float16 else query.dtype
    for sequence in range(batch):
        one = slice(sequence, sequence + 1)
        own_mask = None if mask is None else _additive(unexpanded(mask[one]), dtype)
        for head in range(segments.kv_heads):
            keys, values, columns = _tokens_of(segments, sequence, head, dtype)
            if not len(columns):
                continue
            own = slice(head * group, (head + 1) * group)
            seen = None
            if own_mask is not None:
                seen = (own_mask if own_mask.shape[1] == 1 else own_mask[:, own]).index_select(3, columns)
            # The queries of a KV head are heads that read the same memory.
            keys, values = (states.expand(1, group, -1, -1) for states in (keys, values))
            out[one, own] = scaled_dot_product_attention(query[one, own].to(dtype), keys, values, seen, scale=scale)
    return out


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch's attention would make of a bool mask for each head anew."""
    if mask.dtype != torch.bool:
        return mask if mask.dtype == dtype else mask.float()
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _tokens_of(segments: KVSegments, sequence: int, head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values `[tokens, head_dim]` of one KV head of one sequence, and the columns of its tokens."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    smoothing = segments.smoothing
    if smoothing is not None:
        smoothing = smoothing.mapped(lambda vectors: vectors[sequence, head])
    for position, segment in segments.with_columns:
        if isinstance(segment, GatheredSegment):
            found = _gathered(segment, sequence, head, dtype)
        else:
            keys, values = _states(_of_head(segment, sequence, head), dtype)
            found = iter([(keys, values, torch.arange(segment.tokens))])
        for keys, values, columns in found:
            if smoothing is not None and is_packed(segment):
                keys = smoothing.restored(keys)
            parts.append((keys.to(dtype), values.to(dtype), columns + position))
    keys, values, columns = (torch.cat(each) for each in zip(*parts, strict=True))
    return keys, values, columns


def _gathered(
    segment: GatheredSegment, sequence: int, head: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Keys, values and columns of the tokens that a head reads of a segment."""
    starts, counts, columns = (
        table[sequence, head][None, None] for table in (segment.starts, segment.counts, segment.columns)
    )
    own = GatheredSegment(_of_head(segment.source, sequence, head), starts, counts, columns, segment.width)
    for padded, where in own.padded_pieces(segment.width):
        of_tokens = where.of_tokens[0, 0]
        is_read = of_tokens < segment.width
        keys, values = _states(padded, dtype)
        yield keys[is_read], values[is_read], of_tokens[is_read]


def _of_head(source: DenseSegment | PackedSegment, sequence: int, head: int) -> DenseSegment | PackedSegment:
    """A segment of one head of one sequence."""
    row = sequence if source.rows is None else int(source.rows.on(torch.device("cpu"))[0][sequence])
    own = source.with_tensors(states[row : row + 1, head : head + 1] for states in source.tensors).with_rows(None)
    if isinstance(own, DenseSegment):
        return own
    keys, values = (replace(side, format=side.format.for_head(head)) for side in (own.keys, own.values))
    return replace(own, keys=keys, values=values)


def _states(segment: DenseSegment | PackedSegment, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values `[tokens, head_dim]` of a segment of one head."""
    if isinstance(segment, DenseSegment):
        return segment.keys[0, 0], segment.values[0, 0]
    return segment.states("keys", dtype)[0, 0], segment.states("values", dtype)[0, 0]
