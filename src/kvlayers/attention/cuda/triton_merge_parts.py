"""Merges attention to several sets of tokens, such as shared segments and the tokens behind them, in one launch."""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803
# Compile-time constants are in capitals, as in triton itself.

from __future__ import annotations

try:
    import triton.language as tl
except ImportError:  # Tools that import every module, such as a collector of doctests, may still import this one.
    tl = None

from kvlayers.attention.cuda.triton_hadamard import jit


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
