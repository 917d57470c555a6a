"""The Triton kernels. Only `launch` imports this module, because it imports triton."""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, N806, RUF005, SIM108
# Compile-time constants are in capitals, as in triton itself; and its language lacks some of Python.

from __future__ import annotations

import inspect

try:
    import triton
    import triton.language as tl
except ImportError:  # Tools that import every module, such as a collector of doctests, may still import this one.
    triton = tl = None

from kvlayers.attention.cuda.triton_codes import (
    load_key_parameters,
    load_value_parameters,
    split_by_part,
    times_scale,
    zero_unseen,
)
from kvlayers.attention.cuda.triton_softmax import (
    add_values_of_block,
    find_seen_tokens,
    mask_scores,
    row_maxima,
    row_sums,
    score_block,
    store_split,
    weigh_scores,
)

_GROWING = (
    *("mask_batch", "mask_head", "mask_query", "mask_token"),
    *("blocks", "blocks_per_split", "splits", "first"),
)
"""Numbers that change as tokens arrive: no kernel is recompiled because one of them is, say, a multiple of 16."""


def launched(function):
    """Decorator for a kernel that is launched: it is compiled once for all values of the growing numbers."""
    if triton is None:
        return function
    names = [name for name in inspect.signature(function).parameters if name in _GROWING]
    return triton.jit(function, do_not_specialize=names)


@launched
def attend_split(
    query_pointer,
    key_codes,
    key_parameters,
    value_codes,
    value_parameters,
    ends,
    starts,
    mask,
    partial_outs,
    partial_lses,
    query_batch,
    query_head,
    query_token,
    key_codes_batch,
    key_codes_head,
    key_codes_block,
    key_parameters_batch,
    key_parameters_head,
    key_parameters_block,
    value_codes_batch,
    value_codes_head,
    value_codes_block,
    value_parameters_batch,
    value_parameters_head,
    value_parameters_block,
    mask_batch,
    mask_head,
    mask_query,
    mask_token,
    blocks,
    blocks_per_split,
    splits,
    first,
    scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    Q_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_FLOATING: tl.constexpr,
    VALUE_FLOATING: tl.constexpr,
    KEY_ROW_GROUP: tl.constexpr,
    KEY_COLUMN_GROUP: tl.constexpr,
    VALUE_ROW_GROUP: tl.constexpr,
    VALUE_COLUMN_GROUP: tl.constexpr,
    KEY_FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr,
    VALUE_CHUNKS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASK: tl.constexpr,
    FIRST: tl.constexpr,
    ENDS: tl.constexpr,
    BOOST: tl.constexpr,
    KEY_ASSEMBLY: tl.constexpr,
    VALUE_ASSEMBLY: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Attention of the queries of one kv head to a split of its blocks, by an online softmax.

    Scores are in units of log2(e), so that `exp2` takes them as they are; `scale` is in these units too.
    """
    split = tl.program_id(0)
    sequence = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    begin = split * blocks_per_split
    end = tl.minimum(begin + blocks_per_split, blocks)

    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    heads = kv_head * GROUPS + rows // Q_TOKENS
    q_tokens = rows % Q_TOKENS
    asked = rows < GROUPS * Q_TOKENS
    channels = tl.arange(0, CHANNELS)
    query = tl.load(
        query_pointer
        + sequence.to(tl.int64) * query_batch
        + (heads * query_head + q_tokens * query_token)[:, None]
        + channels[None, :],
        mask=asked[:, None] & (channels < KEY_DIM)[None, :],
        other=0.0,
    )

    DTYPE: tl.constexpr = query_pointer.dtype.element_ty
    KEY_WORDS: tl.constexpr = BLOCK_TOKENS * KEY_BITS // 16
    KEY_TILES: tl.constexpr = 16 // KEY_BITS
    VALUE_TILES: tl.constexpr = 16 // VALUE_BITS
    VALUE_GROUPS: tl.constexpr = VALUE_DIM // VALUE_COLUMN_GROUP
    # The columns of a part become the inner dimension of a product, which must be at least 16.
    JOINED: tl.constexpr = KEY_WORDS < 16
    PARTS: tl.constexpr = KEY_TILES // 2 if JOINED else KEY_TILES
    CUT: tl.constexpr = FIRST or ENDS

    key_words = tl.arange(0, KEY_WORDS)
    sequence64 = sequence.to(tl.int64)
    key_codes += sequence64 * key_codes_batch + kv_head.to(tl.int64) * key_codes_head
    value_codes += sequence64 * value_codes_batch + kv_head.to(tl.int64) * value_codes_head
    key_parameters += sequence64 * key_parameters_batch + kv_head.to(tl.int64) * key_parameters_head
    value_parameters += sequence64 * value_parameters_batch + kv_head.to(tl.int64) * value_parameters_head
    key_places = channels[:, None] * KEY_WORDS + key_words[None, :]

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = ()
    for _ in tl.static_range(VALUE_CHUNKS * VALUE_TILES):
        sums = sums + (tl.zeros([ROWS, COLUMNS], tl.float32),)

    # Parameters are too narrow to be copied ahead asynchronously, so they are read one block ahead.
    if KEY_FOLD:
        key_scale, key_zero = load_key_parameters(
            key_parameters + begin * key_parameters_block, channels, KEY_FLOATING, KEY_ROW_GROUP, KEY_DIM
        )
    loaded = ()
    if VALUE_FOLD:
        loaded = load_value_parameters(
            value_parameters + begin * value_parameters_block,
            PARTS,
            JOINED,
            KEY_WORDS,
            VALUE_FLOATING,
            VALUE_ROW_GROUP,
            VALUE_COLUMN_GROUP,
            VALUE_DIM,
            BLOCK_TOKENS,
        )

    for block in range(begin, end):
        following = tl.minimum(block + 1, end - 1)
        if CHANNELS == KEY_DIM:
            words = tl.load(key_codes + block * key_codes_block + key_places)
        else:
            words = tl.load(
                key_codes + block * key_codes_block + key_places, mask=(channels < KEY_DIM)[:, None], other=0
            )

        offset = tl.zeros([ROWS], tl.float32)
        rows_of_block = query
        if KEY_FOLD:
            rows_of_block = times_scale(query, key_scale, EMULATED)
            if not KEY_FLOATING:
                centre = key_zero.to(tl.float32) + (1 << (KEY_BITS - 1)) * key_scale.to(tl.float32)
                offset = tl.sum(query.to(tl.float32) * centre[None, :], axis=1)
            key_scale, key_zero = load_key_parameters(
                key_parameters + following * key_parameters_block, channels, KEY_FLOATING, KEY_ROW_GROUP, KEY_DIM
            )

        lead = tl.where(block == 0, first, 0)
        seen_of_parts = find_seen_tokens(ends, block, lead, PARTS, JOINED, KEY_WORDS, ENDS)
        scores = score_block(
            rows_of_block,
            words,
            offset,
            key_parameters + block * key_parameters_block,
            channels,
            seen_of_parts,
            PARTS,
            JOINED,
            KEY_BITS,
            KEY_FLOATING,
            KEY_FOLD,
            KEY_ROW_GROUP,
            KEY_COLUMN_GROUP,
            KEY_DIM,
            BLOCK_TOKENS,
            KEY_WORDS,
            CUT,
            KEY_ASSEMBLY,
            EMULATED,
        )
        if MASK != 0:
            if ENDS:
                start = tl.load(starts + block) - lead
            else:
                start = block * BLOCK_TOKENS - first
            scores = mask_scores(
                scores,
                seen_of_parts,
                mask + sequence64 * mask_batch,
                heads * mask_head + q_tokens * mask_query,
                mask_token,
                start,
                asked,
                scale,
                PARTS,
                JOINED,
                KEY_WORDS,
                BLOCK_TOKENS,
                CUT,
                MASK,
            )

        # `scale` is positive, so the largest score can be found before scaling: then scaling and subtraction are one
        # instruction.
        factor = 1.0 if MASK == 2 else scale
        new_largest = tl.maximum(largest, row_maxima(scores, PARTS) * factor)
        # A row that has seen no token yet must subtract a finite number, or it would get nan.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay = tl.exp2(largest - base)
        largest = new_largest
        shares = weigh_scores(scores, factor, base, PARTS)
        total = total * decay + row_sums(shares, PARTS)

        scales = ()
        zeros = ()
        if VALUE_FOLD:
            scales = split_by_part(loaded, 0, PARTS, JOINED, VALUE_GROUPS)
            if not VALUE_FLOATING:
                zeros = split_by_part(loaded, 1, PARTS, JOINED, VALUE_GROUPS)
            if CUT:
                scales = zero_unseen(scales, seen_of_parts, PARTS, VALUE_GROUPS)
                if not VALUE_FLOATING:
                    zeros = zero_unseen(zeros, seen_of_parts, PARTS, VALUE_GROUPS)
            loaded = load_value_parameters(
                value_parameters + following * value_parameters_block,
                PARTS,
                JOINED,
                KEY_WORDS,
                VALUE_FLOATING,
                VALUE_ROW_GROUP,
                VALUE_COLUMN_GROUP,
                VALUE_DIM,
                BLOCK_TOKENS,
            )
        sums = add_values_of_block(
            sums,
            decay,
            shares,
            value_codes + block * value_codes_block,
            scales,
            zeros,
            value_parameters + block * value_parameters_block,
            seen_of_parts,
            PARTS,
            JOINED,
            KEY_WORDS,
            VALUE_CHUNKS,
            VALUE_TILES,
            VALUE_BITS,
            VALUE_FLOATING,
            VALUE_FOLD,
            CUT,
            VALUE_ROW_GROUP,
            VALUE_COLUMN_GROUP,
            VALUE_DIM,
            BLOCK_TOKENS,
            VALUE_WORDS,
            COLUMNS,
            DTYPE,
            BOOST,
            VALUE_ASSEMBLY,
            EMULATED,
        )

    rows_of_result = ((sequence64 * (KV_HEADS * GROUPS) + heads) * Q_TOKENS + q_tokens) * splits + split
    store_split(
        partial_outs,
        partial_lses,
        rows_of_result,
        asked,
        sums,
        largest,
        total,
        VALUE_DIM,
        VALUE_CHUNKS,
        VALUE_TILES,
        VALUE_WORDS,
        COLUMNS,
        BOOST if VALUE_FOLD and not VALUE_FLOATING else 1.0,
    )


@launched
def merge_splits(
    partial_outs,
    partial_lses,
    outs,
    lses,
    splits,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    SOME_SPLITS: tl.constexpr,
):
    """Merge the results of the splits of one row."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, ALL_SPLITS)
    of_splits = tl.load(partial_lses + row * splits + every, mask=every < splits, other=float("-inf"))
    largest = tl.max(of_splits, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(of_splits - base), axis=0)
    channels = tl.arange(0, CHANNELS)
    merged = tl.zeros([CHANNELS], tl.float32)
    for begin in range(0, splits, SOME_SPLITS):
        some = begin + tl.arange(0, SOME_SPLITS)
        part = tl.load(partial_lses + row * splits + some, mask=some < splits, other=float("-inf"))
        weights = tl.exp2(part - base)
        values = tl.load(
            partial_outs + (row * splits + some)[:, None] * VALUE_DIM + channels[None, :],
            mask=(some < splits)[:, None] & (channels < VALUE_DIM)[None, :],
            other=0.0,
        )
        merged += tl.sum(values * weights[:, None], axis=0)
    merged = tl.where(total > 0, merged / total, 0.0)
    tl.store(outs + row * VALUE_DIM + channels, merged, mask=channels < VALUE_DIM)
    # Back from units of log2(e).
    lse = tl.where(total > 0, (base + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lses + row, lse)
