"""The Hadamard transform within a Triton kernel. Importing this module imports triton."""

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

jit = triton.jit if triton is not None else lambda function: function


@jit
def rotate(states, ROTATION: tl.constexpr):
    """Rotate float32 `[rows, channels]` as `quantizers.hadamard.rotate`, in runs of `2**ROTATION` channels.

    This is the fast Walsh-Hadamard transform: each step adds and subtracts the states whose channels differ in the
    lowest bit, and makes that bit the highest one. After `ROTATION` steps all bits are where they were.
    """
    ROWS: tl.constexpr = states.shape[0]
    CHANNELS: tl.constexpr = states.shape[1]
    SIZE: tl.constexpr = 1 << ROTATION
    RUNS: tl.constexpr = ROWS * CHANNELS // SIZE
    rotated = tl.reshape(states * (SIZE**-0.5), [RUNS, SIZE])
    for _ in tl.static_range(ROTATION):
        even, odd = tl.split(tl.reshape(rotated, [RUNS, SIZE // 2, 2]))
        rotated = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), [RUNS, SIZE])
    return tl.reshape(rotated, [ROWS, CHANNELS])
