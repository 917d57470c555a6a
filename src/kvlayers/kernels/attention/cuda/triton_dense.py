"""Attention to tokens in full precision within a Triton kernel. Importing this module imports triton."""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, N806
# Compile-time constants are in capitals, as in triton itself.

from __future__ import annotations

try:
    import triton.language as tl
except ImportError:  # Tools that import every module, such as a collector of doctests, may still import this one.
    tl = None

from kvlayers.kernels.attention.cuda.triton_codes import add_product
from kvlayers.kernels.attention.cuda.triton_steps import (
    finite_base,
    jit,
    logsumexp_of,
    mask_part,
    normalised,
    result_rows,
    rows_of_program,
)


@jit
def attend_tokens(
    query,
    keys,
    values,
    counts,
    first_columns,
    pieces,
    mask,
    key_token,
    value_token,
    rows_of_mask,
    mask_token,
    begin,
    end,
    column,
    scale,
    outs,
    lses,
    splits,
    rows_of_head,
    readers,
    SPEC: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """Attention of queries `[rows, channels]` to tokens `begin` to `end` of a kv head, by an online softmax.

    If they are gathered, each `block_tokens` of these have an entry in the tables: tokens `begin` to `end` are those of
    all pieces if each had as many.

    Args:
        keys: pointer to the keys of the kv head, as `values`.
        counts: pointer to the tokens of each piece.
        first_columns: pointer to the column of the first token of each piece, counted from `column`.
        pieces: pointer to the first token of each piece.
        key_token: states between the keys of neighbouring tokens, as `value_token`.
        column: column of the mask that belongs to token 0.
        scale: factor of the scores, in units of log2(e).
        outs: pointer to where the first of `result_rows` has its sums, `splits` rows before the second.
        lses: pointer to where it has its log-sum-exp.
        rows_of_head: rows of queries of the kv head, of all sequences that read the segment.
        readers: how many these are.
    """
    DTYPE: tl.constexpr = query.dtype
    HEAD_DIM: tl.constexpr = SPEC.values.head_dim
    ROWS: tl.constexpr = SPEC.rows
    TOKENS: tl.constexpr = SPEC.dense_tokens
    VALUE_CHANNELS: tl.constexpr = SPEC.value_channels
    channels = tl.arange(0, SPEC.key_channels)
    value_channels = tl.arange(0, SPEC.value_channels)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_CHANNELS], tl.float32)
    # These are few tokens: copying them ahead would take shared memory from the packed blocks.
    for start in tl.range(begin, end, SPEC.dense_tokens, num_stages=1):
        tokens = start + tl.arange(0, SPEC.dense_tokens)
        held = tokens < end
        columns = column + tokens
        if GATHERED:
            piece = start // SPEC.block_tokens
            tokens = start % SPEC.block_tokens + tl.arange(0, SPEC.dense_tokens)
            held = tokens < tl.load(counts + piece)
            if SPEC.mask != 0:
                columns = column + tl.load(first_columns + piece) + tokens
            tokens = tl.load(pieces + piece) + tokens
        key = tl.load(
            keys + tokens[None, :].to(tl.int64) * key_token + channels[:, None],
            mask=held[None, :] & (channels < SPEC.keys.head_dim)[:, None],
            other=0.0,
        )
        scores = add_product(query, key, tl.zeros([ROWS, TOKENS], tl.float32), SPEC.emulated)
        scores = tl.where(held[None, :], scores, float("-inf"))
        factor = scale
        if SPEC.mask != 0:
            seen = (rows_of_program(SPEC) < rows_of_head)[:, None] & held[None, :]
            scores = mask_part(scores, seen, mask, rows_of_mask, columns, mask_token, scale, SPEC.mask)
            if SPEC.mask == 2:
                factor = 1.0
        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * factor)
        base = finite_base(new_largest)
        decay = tl.exp2(largest - base)
        largest = new_largest
        shares = tl.exp2(scores * factor - base[:, None])
        total = total * decay + tl.sum(shares, axis=1)
        value = tl.load(
            values + tokens[:, None].to(tl.int64) * value_token + value_channels[None, :],
            mask=held[:, None] & (value_channels < HEAD_DIM)[None, :],
            other=0.0,
        )
        sums = add_product(shares.to(DTYPE), value, sums * decay[:, None], SPEC.emulated)
    asked = rows_of_program(SPEC) < rows_of_head
    rows = result_rows(rows_of_head, readers, SPEC)
    tl.store(lses + rows * splits, logsumexp_of(largest, total), mask=asked)
    if GATHERED:
        # Nobody reads sums of no tokens.
        asked = rows_of_program(SPEC) < tl.where(begin < end, rows_of_head, 0)
    tl.store(
        outs + (rows * (splits * HEAD_DIM))[:, None] + value_channels[None, :],
        normalised(sums, total, 1.0),
        mask=asked[:, None] & (value_channels < HEAD_DIM)[None, :],
    )
