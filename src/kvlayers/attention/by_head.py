"""Attention of many queries on a CPU where each KV head reads its own tokens: torch's attention, head after head.

The tokens of one KV head of one sequence are a dense tensor, whatever other heads hold. It is copied, or unpacked, for
as long as this head is computed, so no more than one head is in full precision at once.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlayers.attention.dense_segment import DenseSegment
from kvlayers.attention.fused import unexpanded
from kvlayers.attention.gathered_segment import GatheredSegment
from kvlayers.attention.packed_segment import PackedSegment
from kvlayers.attention.segments import KVSegments, is_packed

Runs = list[tuple[int, int]]
"""Begin and end of consecutive tokens, or columns."""


MINIMUM_ROWS_OF_PACKED = 128
"""Queries of one KV head for which unpacking all its tokens at once pays. Measured on a CPU."""


def pays(query: Tensor, segments: KVSegments) -> bool:
    """Whether `attend` takes less time than attention block by block, as measured on a CPU."""
    if query.shape[2] == 1 or not segments.gathered:
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
            if not columns:
                continue
            own = slice(head * group, (head + 1) * group)
            seen = None
            if own_mask is not None:
                seen = _joined(own_mask if own_mask.shape[1] == 1 else own_mask[:, own], columns, 3)
            # The queries of a KV head are heads that read the same memory.
            keys, values = (states.expand(1, group, -1, -1) for states in (keys, values))
            out[one, own] = scaled_dot_product_attention(query[one, own].to(dtype), keys, values, seen, scale=scale)
    return out


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch's attention would make of a bool mask for each head anew."""
    if mask.dtype != torch.bool:
        return mask if mask.dtype == dtype else mask.float()
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _tokens_of(segments: KVSegments, sequence: int, head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Runs]:
    """Keys and values `[tokens, head_dim]` of one KV head of one sequence, and the columns of its tokens."""
    sides: list[tuple[Tensor, Tensor]] = []
    columns: Runs = []
    position = 0
    smoothing = segments.smoothing
    if smoothing is not None:
        smoothing = smoothing.mapped(lambda vectors: vectors[sequence, head])
    for segment in segments.in_order:
        if isinstance(segment, GatheredSegment):
            blocks, tokens, own_columns = _pieces_of(segment, sequence, head)
            keys, values = _states(segment.source, sequence, head, blocks, dtype)
            keys, values = _joined(keys, tokens, 0), _joined(values, tokens, 0)
        else:
            own_columns = [(0, segment.tokens)]
            keys, values = _states(segment, sequence, head, None, dtype)
        if smoothing is not None and is_packed(segment):
            keys = smoothing.restored(keys)
        sides.append((keys, values))
        columns += ((position + begin, position + end) for begin, end in own_columns)
        position += segment.tokens
    keys, values = (torch.cat([states.to(dtype) for states in parts]) for parts in zip(*sides, strict=True))
    return keys, values, _merged(columns)


def _pieces_of(segment: GatheredSegment, sequence: int, head: int) -> tuple[Tensor, Runs, Runs]:
    """The pieces of a head.

    Returns:
        Where they start, their tokens in a dense source or among these blocks of a packed one, and their columns.
    """
    is_read = segment.counts[sequence, head] > 0
    starts, counts, columns = (
        table[sequence, head][is_read] for table in (segment.starts, segment.counts, segment.columns)
    )
    first = starts
    if isinstance(segment.source, PackedSegment):
        evicted = torch.where(starts == 0, segment.source.first, 0)
        first = torch.arange(len(starts), device=starts.device) * segment.source.keys.block_tokens + evicted
    tokens, own_columns = (
        _merged(zip(begin.tolist(), (begin + counts).tolist(), strict=True)) for begin in (first, columns)
    )
    return starts, tokens, own_columns


def _states(
    source: DenseSegment | PackedSegment, sequence: int, head: int, blocks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values `[tokens, head_dim]` of a head; if they are packed, of the blocks at int64 `[any]` alone."""
    row = sequence if source.rows is None else int(source.rows.on(torch.device("cpu"))[0][sequence])
    if isinstance(source, DenseSegment):
        return source.keys[row, head], source.values[row, head]
    own = slice(row, row + 1), slice(head, head + 1)
    keys, values = (
        replace(side, codes=side.codes[own], parameters=side.parameters[own], format=side.format.for_head(head))
        for side in (source.keys, source.values)
    )
    chosen = PackedSegment(keys, values, source.first, source.ends)
    if blocks is not None:
        keys, values = (
            replace(side, codes=side.codes.index_select(2, blocks), parameters=side.parameters.index_select(2, blocks))
            for side in (keys, values)
        )
        chosen = PackedSegment(keys, values)
    return chosen.states("keys", dtype)[0, 0], chosen.states("values", dtype)[0, 0]


def _merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The runs that are not empty. Those next to each other are one."""
    merged: Runs = []
    for begin, end in runs:
        if merged and merged[-1][1] == begin:
            merged[-1] = merged[-1][0], end
        elif end > begin:
            merged.append((begin, end))
    return merged


def _joined(states: Tensor, runs: Runs, dim: int) -> Tensor:
    """The runs of a dimension side by side: a view, if there is one."""
    parts = [states.narrow(dim, begin, end - begin) for begin, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else states.narrow(dim, 0, 0)
