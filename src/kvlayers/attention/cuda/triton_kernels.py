"""The Triton kernels of attention. Only `launch` imports this module, because it imports triton."""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, N806
# Compile-time constants are in capitals, as in triton itself.

from __future__ import annotations

import inspect

try:
    import triton
    import triton.language as tl
except ImportError:  # Tools that import every module, such as a collector of doctests, may still import this one.
    triton = tl = None

from kvlayers.attention.cuda.triton_dense import attend_tokens
from kvlayers.attention.cuda.triton_hadamard import rotate
from kvlayers.attention.cuda.triton_packed import attend_blocks
from kvlayers.attention.cuda.triton_softmax import finite_base, logsumexp_of, rows_of_program

_GROWING = (
    *("mask_batch", "mask_head", "mask_query", "mask_token"),
    *("blocks", "blocks_per_split", "packed_splits", "first", "packed_tokens"),
    *("tokens_before", "splits_before", "tokens_after", "splits_after", "tokens_per_split", "q_tokens", "splits"),
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
    keys_before,
    values_before,
    keys_after,
    values_after,
    mask,
    partials,
    query_strides,
    packed_strides,
    strides_before,
    strides_after,
    mask_batch,
    mask_head,
    mask_query,
    mask_token,
    blocks,
    blocks_per_split,
    packed_splits,
    first,
    packed_tokens,
    tokens_before,
    splits_before,
    tokens_after,
    splits_after,
    tokens_per_split,
    q_tokens,
    scale,
    SPEC: tl.constexpr,
):
    """Attention of the queries of one kv head to one split of its tokens.

    The first splits are of packed blocks, then come those of the tokens before them, then those of the tokens after
    them. `scale` makes scores of units of log2(e).
    """
    split = tl.program_id(0)
    sequence = (tl.program_id(1) // SPEC.kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % SPEC.kv_heads).to(tl.int64)
    rows = rows_of_program(SPEC)
    heads = kv_head * SPEC.groups + rows // q_tokens
    tokens = rows % q_tokens
    channels = tl.arange(0, SPEC.key_channels)
    query = tl.load(
        query_pointer
        + sequence * query_strides[0]
        + (heads * query_strides[1] + tokens * query_strides[2])[:, None]
        + channels[None, :],
        mask=(rows < SPEC.groups * q_tokens)[:, None] & (channels < SPEC.keys.head_dim)[None, :],
        other=0.0,
    )
    # Results are `[batch, heads, q_tokens, splits, channels]`, so the rows of a kv head follow one another. The
    # log-sum-exps come behind them.
    splits = packed_splits + splits_before + splits_after
    rows_of_head = SPEC.groups * q_tokens
    place = tl.program_id(1).to(tl.int64) * rows_of_head * splits + split
    results = tl.num_programs(1).to(tl.int64) * rows_of_head * splits
    outs = partials + place * SPEC.values.head_dim
    lses = partials + results * SPEC.values.head_dim + place
    rows_of_mask = sequence * mask_batch + heads * mask_head + tokens * mask_query
    if split < packed_splits:
        begin = split * blocks_per_split
        attend_blocks(
            query,
            key_codes + sequence * packed_strides[0] + kv_head * packed_strides[1],
            key_parameters + sequence * packed_strides[3] + kv_head * packed_strides[4],
            value_codes + sequence * packed_strides[6] + kv_head * packed_strides[7],
            value_parameters + sequence * packed_strides[9] + kv_head * packed_strides[10],
            ends,
            starts,
            mask,
            packed_strides[2],
            packed_strides[5],
            packed_strides[8],
            packed_strides[11],
            rows_of_mask,
            mask_token,
            begin,
            tl.minimum(begin + blocks_per_split, blocks),
            first,
            tokens_before,
            scale,
            outs,
            lses,
            splits,
            rows_of_head,
            SPEC,
        )
    else:
        # One loop for the tokens on both sides: it reads from one of them or from the other.
        after = split >= packed_splits + splits_before
        begin = (split - packed_splits - tl.where(after, splits_before, 0)) * tokens_per_split
        keys = tl.where(after, keys_after, keys_before)
        values = tl.where(after, values_after, values_before)
        key_sequence = tl.where(after, strides_after[0], strides_before[0])
        key_head = tl.where(after, strides_after[1], strides_before[1])
        value_sequence = tl.where(after, strides_after[3], strides_before[3])
        value_head = tl.where(after, strides_after[4], strides_before[4])
        attend_tokens(
            query,
            keys + sequence * key_sequence + kv_head * key_head,
            values + sequence * value_sequence + kv_head * value_head,
            mask,
            tl.where(after, strides_after[2], strides_before[2]),
            tl.where(after, strides_after[5], strides_before[5]),
            rows_of_mask,
            mask_token,
            begin,
            tl.minimum(begin + tokens_per_split, tl.where(after, tokens_after, tokens_before)),
            tl.where(after, tokens_before + packed_tokens, 0),
            scale,
            outs,
            lses,
            splits,
            rows_of_head,
            SPEC,
        )


@launched
def merge_splits(partials, outs, lses, packed_splits, splits, q_tokens, SPEC: tl.constexpr):
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
        parts = tl.load(
            partials + (row * splits + some)[:, None] * SPEC.head_dim + channels[None, :],
            mask=(some < splits)[:, None] & (channels < SPEC.head_dim)[None, :],
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
    if SPEC.logsumexp:
        # Back from units of log2(e).
        tl.store(lses + row + tl.arange(0, 1), logsumexp_of(largest, total) * 0.6931471805599453)
