"""The Triton kernel that finds the vectors of `KeySmoothing`. Only a launch imports it."""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, N806
# Compile-time constants are in capitals, as in triton itself.

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # Tools that import every module, such as a collector of doctests, may still import this one.
    triton = tl = None

from kvlayers.kernels.packing.cuda.triton_search import rounded_to

jit = triton.jit if triton is not None else lambda function: function


@jit
def find_vectors(keys, factors, means, batch_stride, head_stride, token_stride, channel_stride, C: tl.constexpr):
    """Factors and means of the keys of one head, as `KeySmoothing.for_keys` finds them."""
    head = tl.program_id(0).to(tl.int64)
    sequence = tl.program_id(1).to(tl.int64)
    DTYPE: tl.constexpr = factors.dtype.element_ty
    tokens = tl.arange(0, C.TOKENS)
    channels = tl.arange(0, C.CHANNELS)
    is_token = tokens < C.BLOCK_TOKENS
    is_channel = channels < C.HEAD_DIM
    states = tl.load(
        keys
        + (sequence * batch_stride + head * head_stride)
        + (tokens * token_stride)[:, None]
        + (channels * channel_stride)[None, :],
        mask=is_token[:, None] & is_channel[None, :],
        other=0.0,
    ).to(tl.float32)
    finite = (tl.min((tl.abs(states) < float("inf")).to(tl.int32), axis=1) > 0) & is_token
    states = tl.where(finite[:, None], states, 0.0)
    # Squares of the largest keys would overflow.
    largest = tl.maximum(tl.max(tl.max(tl.abs(states), axis=1), axis=0), C.SMALLEST)
    states = tl.div_rn(states, tl.full(states.shape, 0.0, tl.float32) + largest)
    count = tl.maximum(tl.sum(finite.to(tl.float32), axis=0), 1.0)
    mean = tl.sum(states, axis=0) / count
    place = (sequence * tl.num_programs(0) + head) * C.HEAD_DIM + channels
    distance = tl.where(finite[:, None], states - mean[None, :], 0.0)
    variance = tl.sum(distance * distance, axis=0) / count
    if C.MEANS:
        is_large = tl.sum(mean * mean, axis=0) >= C.LARGE_MEAN * tl.sum(variance, axis=0)
        subtracted = tl.where(is_large, mean * largest, 0.0)
        tl.store(means + place, rounded_to(subtracted, DTYPE).to(DTYPE), mask=is_channel)
    if C.FACTORS:
        ascending = tl.sort(tl.where(is_channel, variance, float("inf")))
        median = tl.sum(tl.where(channels == (C.HEAD_DIM - 1) // 2, ascending, 0.0), axis=0)
        relative = tl.minimum(tl.maximum(variance / tl.maximum(median, C.SMALLEST), 1.0), C.MOST)
        taken_out = tl.maximum(tl.exp2(tl.log2(relative) * C.POWER), relative / C.LARGEST_VARIANCE)
        uneven = tl.max(tl.where(is_channel, relative, 0.0), axis=0) > C.UNEVEN
        factor = tl.minimum(tl.where(uneven, tl.sqrt(taken_out), 1.0), C.LARGEST_FACTOR)
        tl.store(factors + place, rounded_to(factor, DTYPE).to(DTYPE), mask=is_channel)
