"""Merges attention to two sets of tokens, such as a shared prefix and the tokens behind it, in one launch."""

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
def merge_pair(
    first,
    second,
    first_lse,
    second_lse,
    merged,
    first_sequence,
    first_head,
    first_query,
    second_sequence,
    second_head,
    second_query,
    first_lse_sequence,
    first_lse_head,
    first_lse_query,
    second_lse_sequence,
    second_lse_head,
    second_lse_query,
    rows,
    heads,
    queries,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge rows of `[batch, heads, queries, value_head_dim]`, given by the strides of three dimensions.

    The result is `[batch, queries, heads, value_head_dim]`.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = row % heads
    query = row // heads % queries
    sequence = row // heads // queries
    channels = tl.arange(0, CHANNELS)
    exists = row < rows
    of_first = tl.load(
        first_lse + sequence * first_lse_sequence + head * first_lse_head + query * first_lse_query,
        mask=exists,
        other=0.0,
    )
    of_second = tl.load(
        second_lse + sequence * second_lse_sequence + head * second_lse_head + query * second_lse_query,
        mask=exists,
        other=0.0,
    )
    share = tl.sigmoid(of_second - of_first)[:, None]
    inside = exists[:, None] & (channels < VALUE_DIM)[None, :]
    one = tl.load(
        first + (sequence * first_sequence + head * first_head + query * first_query)[:, None] + channels[None, :],
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    other = tl.load(
        second + (sequence * second_sequence + head * second_head + query * second_query)[:, None] + channels[None, :],
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    result = one * (1 - share) + other * share
    tl.store(merged + row[:, None] * VALUE_DIM + channels[None, :], result.to(merged.dtype.element_ty), mask=inside)
