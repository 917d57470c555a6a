"""The Triton kernels of attention. Only `launch` imports this module, because it imports triton."""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, N806
# Compile-time constants are in capitals, as in triton itself.

from __future__ import annotations

import inspect

from kvlayers.kernels.attention.cuda.triton_loops import attend_blocks, attend_tokens
from kvlayers.kernels.attention.cuda.triton_steps import (
    filled_pieces,
    finite_base,
    rotate,
    rows_of_program,
)
from kvlayers.kernels.codes.triton_language import jit, tl, triton

_GROWING = (
    *("mask_batch", "mask_head", "mask_query", "mask_token"),
    *("blocks", "blocks_per_split", "block_splits", "packed_splits", "first", "block_column"),
    *("tokens_a", "splits_a", "column_a", "tokens_b", "column_b"),
    *("tokens_per_split", "block_place", "dense_place", "splits", "q_tokens", "readers"),
)
"""Numbers that change as tokens arrive: no kernel is recompiled because one of them is, say, a multiple of 16.

triton specialises each number in a tuple, so these are parameters of their own.
"""


def launched(function):
    """Decorator for a kernel that is launched: it is compiled once for all values of the growing numbers."""
    if triton is None:
        return function
    names = [name for name in inspect.signature(function).parameters if name in _GROWING]
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=["mask"])


@launched
def attend_split(
    query_pointer,
    key_codes,
    key_parameters,
    value_codes,
    value_parameters,
    ends,
    starts,
    pieces,
    keys_a,
    values_a,
    keys_b,
    values_b,
    mask,
    partials,
    segment_rows,
    factors,
    means,
    query_strides,
    block_strides,
    strides_a,
    strides_b,
    mask_batch,
    mask_head,
    mask_query,
    mask_token,
    blocks,
    blocks_per_split,
    block_splits,
    first,
    block_column,
    tokens_a,
    splits_a,
    column_a,
    tokens_b,
    column_b,
    tokens_per_split,
    block_place,
    dense_place,
    splits,
    q_tokens,
    readers,
    scale,
    SPEC: tl.constexpr,
):
    """Attention of the queries of one kv head to a split of a segment in blocks, or of one of two dense ones, a and b.

    The first splits of a launch are of blocks, which are packed or in full precision (then `key_codes` and
    `value_codes` are keys and values), then come those of a, then those of b. Their results have the places from
    `block_place` and from `dense_place` on, among the `splits` of all launches. The columns are those of the mask that
    belong to the first token of each segment. `readers` sequences side by side read each sequence of the segments, or
    `segment_rows` has the sequence that each one reads. `factors` and `means` of packed keys are contiguous, `[batch,
    kv_heads, channels]`. `scale` makes scores of units of log2(e).

    If blocks are gathered, each kv head of each sequence has `blocks` entries in three tables: `pieces` has blocks, or
    first tokens, `ends` the tokens of each piece, and `starts` their first columns of the mask.
    """
    split = tl.program_id(0)
    sequence = (tl.program_id(1) // SPEC.kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % SPEC.kv_heads).to(tl.int64)
    rows = rows_of_program(SPEC)
    reader = sequence
    if SPEC.gathered:
        entries = (sequence * SPEC.kv_heads + kv_head) * blocks
        pieces += entries
        ends += entries
        if SPEC.mask != 0:
            starts += entries
    if SPEC.indexed:
        sequence = tl.load(segment_rows + sequence)
    rows_of_reader = SPEC.groups * q_tokens
    rows_of_head = rows_of_reader
    in_blocks = split < block_splits
    place = tl.where(in_blocks, split + block_place, split - block_splits + dense_place).to(tl.int64)
    if SPEC.shared:
        rows_of_head = rows_of_reader * readers
        reader = sequence * readers + rows // rows_of_reader
        rows = rows % rows_of_reader
    else:
        place += tl.program_id(1).to(tl.int64) * rows_of_head * splits
    heads = kv_head * SPEC.groups + rows // q_tokens
    tokens = rows % q_tokens
    channels = tl.arange(0, SPEC.key_channels)
    query = tl.load(
        query_pointer
        + (reader * query_strides[0] + heads * query_strides[1] + tokens * query_strides[2])[:, None]
        + channels[None, :],
        mask=(rows_of_program(SPEC) < rows_of_head)[:, None] & (channels < SPEC.keys.head_dim)[None, :],
        other=0.0,
    )
    # Results are `[batch, heads, q_tokens, splits, channels]`. The log-sum-exps come behind them.
    results = tl.num_programs(1).to(tl.int64) * rows_of_head * splits
    outs = partials + place * SPEC.values.head_dim
    lses = partials + results * SPEC.values.head_dim + place
    rows_of_mask = reader * mask_batch + heads * mask_head + tokens * mask_query
    if in_blocks:
        begin = split * blocks_per_split
        end = tl.minimum(begin + blocks_per_split, blocks)
        if SPEC.gathered:
            begin, end = filled_pieces(ends, begin, end)
        keys_of_head = key_codes + sequence * block_strides[0] + kv_head * block_strides[1]
        values_of_head = value_codes + sequence * block_strides[6] + kv_head * block_strides[7]
        if SPEC.packed:
            held = (rows_of_program(SPEC) < rows_of_head)[:, None] & (channels < SPEC.keys.head_dim)[None, :]
            vectors = ((reader + tl.zeros_like(rows)) * SPEC.kv_heads + kv_head) * SPEC.keys.head_dim
            places = vectors[:, None] + channels[None, :]
            attend_blocks(
                query,
                factors,
                means,
                places,
                held,
                keys_of_head,
                key_parameters + sequence * block_strides[3] + kv_head * block_strides[4],
                values_of_head,
                value_parameters + sequence * block_strides[9] + kv_head * block_strides[10],
                ends,
                starts,
                pieces,
                mask,
                block_strides[2],
                block_strides[5],
                block_strides[8],
                block_strides[11],
                rows_of_mask,
                mask_token,
                begin,
                end,
                first,
                block_column,
                scale,
                outs,
                lses,
                splits,
                rows_of_head,
                readers,
                SPEC,
            )
        else:
            attend_tokens(
                query,
                keys_of_head,
                values_of_head,
                ends,
                starts,
                pieces,
                mask,
                block_strides[2],
                block_strides[8],
                rows_of_mask,
                mask_token,
                begin * SPEC.block_tokens,
                end * SPEC.block_tokens,
                block_column,
                scale,
                outs,
                lses,
                splits,
                rows_of_head,
                readers,
                SPEC,
                SPEC.gathered,
            )
    else:
        # One loop for both dense segments: it reads from one of them or from the other.
        of_b = split >= block_splits + splits_a
        begin = (split - block_splits - tl.where(of_b, splits_a, 0)) * tokens_per_split
        keys = tl.where(of_b, keys_b, keys_a)
        values = tl.where(of_b, values_b, values_a)
        key_sequence = tl.where(of_b, strides_b[0], strides_a[0])
        key_head = tl.where(of_b, strides_b[1], strides_a[1])
        value_sequence = tl.where(of_b, strides_b[3], strides_a[3])
        value_head = tl.where(of_b, strides_b[4], strides_a[4])
        attend_tokens(
            query,
            keys + sequence * key_sequence + kv_head * key_head,
            values + sequence * value_sequence + kv_head * value_head,
            ends,
            starts,
            pieces,
            mask,
            tl.where(of_b, strides_b[2], strides_a[2]),
            tl.where(of_b, strides_b[5], strides_a[5]),
            rows_of_mask,
            mask_token,
            begin,
            tl.minimum(begin + tokens_per_split, tl.where(of_b, tokens_b, tokens_a)),
            tl.where(of_b, column_b, column_a),
            scale,
            outs,
            lses,
            splits,
            rows_of_head,
            readers,
            SPEC,
            False,
        )


@launched
def merge_splits(partials, outs, packed_splits, splits, q_tokens, SPEC: tl.constexpr):
    """Merge the results of the splits of one row, those of packed values rotated back."""
    CHANNELS: tl.constexpr = SPEC.channels
    row = tl.program_id(0).to(tl.int64)
    partial_lses = partials + tl.num_programs(0).to(tl.int64) * splits * SPEC.head_dim
    channels = tl.arange(0, SPEC.channels)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([1, CHANNELS], tl.float32)
    rotated = tl.zeros([1, CHANNELS], tl.float32)
    for begin in range(0, splits, SPEC.at_once):
        some = begin + tl.arange(0, SPEC.at_once)
        of_splits = tl.load(partial_lses + row * splits + some, mask=some < splits, other=float("-inf"))
        stored = some < splits
        if SPEC.gaps:
            stored = stored & (of_splits != float("-inf"))
        parts = tl.load(
            partials + (row * splits + some)[:, None] * SPEC.head_dim + channels[None, :],
            mask=stored[:, None] & (channels < SPEC.head_dim)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(of_splits[None, :], axis=1))
        base = finite_base(new_largest)
        decay = tl.exp2(largest - base)
        largest = new_largest
        weights = tl.exp2(of_splits - base)
        total = total * decay + tl.sum(weights[None, :], axis=1)
        weighted = parts * weights[:, None]
        if SPEC.rotation > 0:
            packed = (some < packed_splits)[:, None]
            rotated = rotated * decay[:, None] + tl.sum(tl.where(packed, weighted, 0.0), axis=0)[None, :]
            weighted = tl.where(packed, 0.0, weighted)
        merged = merged * decay[:, None] + tl.sum(weighted, axis=0)[None, :]
    if SPEC.rotation > 0:
        merged += rotate(rotated, SPEC.rotation)
    merged = tl.where((total != 0)[:, None], merged / total[:, None], 0.0)
    # The memory of torch's own attention: `[batch, q_tokens, heads, channels]`.
    sequence = row // (SPEC.heads * q_tokens)
    head = row // q_tokens % SPEC.heads
    place = (sequence * q_tokens + row % q_tokens) * SPEC.heads + head
    tl.store(
        outs + place * SPEC.head_dim + channels[None, :],
        merged.to(outs.dtype.element_ty),
        mask=(channels < SPEC.head_dim)[None, :],
    )


@jit
def merge_parts(
    outs,
    lses,
    strides,
    merged,
    merged_lse,
    rows,
    kv_heads,
    group,
    queries,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
):
    """Merge rows of `[batch, kv_heads, group, queries, value_head_dim]`, and their log-sum-exp if it is wanted.

    The result is `[batch, queries, kv_heads, group, value_head_dim]`, the log-sum-exp without the last dimension.

    Args:
        outs: a pointer for each part.
        lses: pointers to the log-sum-exps, `[batch, kv_heads, group, queries]`.
        strides: for each part, the strides of the first four dimensions of both.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    member = row % group
    head = row // group % kv_heads
    query = row // group // kv_heads % queries
    sequence = row // group // kv_heads // queries
    channels = tl.arange(0, CHANNELS)
    exists = row < rows
    inside = exists[:, None] & (channels < VALUE_DIM)[None, :]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    for part in tl.static_range(PARTS):
        place = sequence * strides[8 * part] + head * strides[8 * part + 1]
        place += member * strides[8 * part + 2] + query * strides[8 * part + 3]
        out = tl.load(outs[part] + place[:, None] + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        place = sequence * strides[8 * part + 4] + head * strides[8 * part + 5]
        place += member * strides[8 * part + 6] + query * strides[8 * part + 7]
        lse = tl.load(lses[part] + place, mask=exists, other=0.0)
        new_largest = tl.maximum(largest, lse)
        decay = tl.exp(largest - new_largest)
        weight = tl.exp(lse - new_largest)
        largest = new_largest
        total = total * decay + weight
        sums = sums * decay[:, None] + out * weight[:, None]
    result = (sums / total[:, None]).to(merged.dtype.element_ty)
    tl.store(merged + row[:, None] * VALUE_DIM + channels[None, :], result, mask=inside)
    if LOGSUMEXP:
        tl.store(merged_lse + row, largest + tl.log(total), mask=exists)
