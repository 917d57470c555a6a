"""Steps of the Triton kernels that find codes, with one group of states in each row. It imports triton.

They do what `search.h` does on a CPU, in the same order, so that both find the same codes except where states are
rounded differently.
"""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, SIM300
# Compile-time constants are in capitals, as in triton itself; and its language lacks some of Python.

from __future__ import annotations

from kvlayers.kernels.codes.triton_language import jit, tl


@jit
def rounded_to(numbers, DTYPE: tl.constexpr):
    """Float32 numbers, rounded to the precision of a dtype, to nearest even."""
    if DTYPE == tl.bfloat16:
        # The interpreter does not round to nearest even when it converts.
        bits = numbers.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        # The bits of the NaN that a GPU computes, 0x7FFFFFFF, would turn into those of -0.
        numbers = tl.where(numbers == numbers, bits.to(tl.float32, bitcast=True), numbers)
    elif DTYPE == tl.float16:
        numbers = numbers.to(tl.float16).to(tl.float32)
    return numbers


@jit
def to_nearest(numbers):
    """Numbers of a magnitude below 2**22, rounded to whole ones, to nearest even."""
    return (numbers + 12582912.0) - 12582912.0


@jit
def stored_grid(scale, zero, C: tl.constexpr, DTYPE: tl.constexpr):
    """A grid as it is stored: its scale can be a divisor, and the dtype can hold its last state."""
    zero = rounded_to(tl.minimum(tl.maximum(zero, -C.LARGEST_NUMBER), C.LARGEST_NUMBER), DTYPE)
    largest = (C.LARGEST_NUMBER / C.TOP - tl.maximum(zero, 0.0) / C.TOP) * (1.0 - C.EPSILON)
    smallest = tl.maximum(tl.abs(zero) * (C.EPSILON / C.TOP / 8), C.SMALLEST_SCALE)
    return rounded_to(tl.maximum(tl.minimum(scale, largest), smallest), DTYPE), zero


@jit
def codes_and_residues(states, scale, zero, C: tl.constexpr):
    """Codes, and what they leave over in units of the scale. Exact codes are clamped before they are rounded."""
    exact = tl.div_rn(states - zero[:, None], scale[:, None])
    codes = to_nearest(tl.minimum(tl.maximum(exact, 0.0), C.TOP))
    return codes, exact - codes


@jit
def error(states, weights, scale, zero, unit, C: tl.constexpr):
    """Squared error of each group, in units of `unit`, because squares of the largest states would overflow.

    With the inverse of the scale: codes for a comparison need not be exactly those of a division.
    """
    exact = (states - zero[:, None]) * tl.div_rn(1.0, scale)[:, None]
    residues = exact - to_nearest(tl.minimum(tl.maximum(exact, 0.0), C.TOP))
    if C.PADDED:
        residues *= weights
    ratio = scale / unit
    return tl.sum(residues * residues, axis=1) * ratio * ratio


@jit
def mean(numbers, weights, C: tl.constexpr):
    """Mean over a group."""
    if C.PADDED:
        numbers *= weights
    return tl.sum(numbers, axis=1) / C.GROUP


@jit
def refitted(states, weights, scale, zero, C: tl.constexpr, DTYPE: tl.constexpr):
    """The least-squares grid for the codes: first the zero, then the scale that suits the stored zero."""
    codes, residues = codes_and_residues(states, scale, zero, C)
    code = mean(codes, weights, C)
    residue = mean(residues, weights, C)
    squares = mean(codes * codes, weights, C)
    products = mean(codes * residues, weights, C)
    slope = (products - code * residue) / tl.maximum(squares - code * code, 0.5 / C.GROUP)
    new_zero = rounded_to(zero + scale * (residue - slope * code), DTYPE)
    moved = (zero - new_zero) / scale
    growth = (products + moved * code) / tl.maximum(squares, 1.0 / C.GROUP)
    return stored_grid(scale * (1 + growth), new_zero, C, DTYPE)


@jit
def stretched(codes, residues, weights, scale, zero, C: tl.constexpr, DTYPE: tl.constexpr):
    """The grid on which the codes have the same variance as the states, and the same mean."""
    code = mean(codes, weights, C)
    residue = mean(residues, weights, C)
    variance = mean(codes * codes, weights, C) - code * code
    covariance = mean(codes * residues, weights, C) - code * residue
    residue_variance = mean(residues * residues, weights, C) - residue * residue
    stretch = (covariance + residue_variance) / tl.maximum(variance + covariance, 1.0 / C.GROUP)
    wider = scale * (1 + tl.minimum(tl.maximum(stretch, 0.0), C.LARGEST_STRETCH))
    middle = scale * (code + residue)
    _, new_zero = stored_grid(wider, zero + (middle - wider * code), C, DTYPE)
    exact = (middle + (zero - new_zero)) / tl.maximum(code, 1.0 / C.GROUP)
    return stored_grid(tl.minimum(tl.maximum(exact, wider * 0.95), wider * 1.05), new_zero, C, DTYPE)


@jit
def clip_at(start, index, END: tl.constexpr, C: tl.constexpr):
    """The fraction of the range that is cut off at one end in the range with this index."""
    steps = 0.0
    for position in tl.static_range(len(C.CLIPS)):
        steps = tl.where(index == position, C.CLIPS[position][END], steps)
    return tl.maximum(start + C.CLIP_STEP * steps, 0.0)


@jit
def affine_codes(states, weights, C: tl.constexpr, DTYPE: tl.constexpr):
    """Codes, as numbers, and the scale and zero of each group."""
    if C.PADDED:
        lowest = tl.min(tl.where(weights > 0, states, float("inf")), axis=1)
        highest = tl.max(tl.where(weights > 0, states, float("-inf")), axis=1)
        states = tl.where(weights > 0, states, lowest[:, None])
    else:
        lowest = tl.min(states, axis=1)
        highest = tl.max(states, axis=1)
    # The range itself may exceed the largest float32.
    step = highest / C.TOP - lowest / C.TOP
    scale, zero = stored_grid(step, lowest, C, DTYPE)
    if C.CLIP_STEP > 0:
        unit = scale
        least = error(states, weights, scale, zero, unit, C)
        best_even = tl.zeros_like(scale)
        for index in range(1, len(C.CLIPS)):
            is_even = index < len(C.CLIPS) // 2
            low = clip_at(tl.where(is_even, 0.0, best_even), index, 0, C)
            high = clip_at(tl.where(is_even, 0.0, best_even), index, 1, C)
            clipped_scale, clipped_zero = stored_grid(
                step * (1.0 - low - high), lowest + step * (C.TOP * low), C, DTYPE
            )
            wrong = error(states, weights, clipped_scale, clipped_zero, unit, C)
            scale = tl.where(wrong < least, clipped_scale, scale)
            zero = tl.where(wrong < least, clipped_zero, zero)
            best_even = tl.where(is_even & (wrong < least), low, best_even)
            least = tl.minimum(wrong, least)
        fitted_scale, fitted_zero = scale, zero
        for _ in range(C.REFITS):
            fitted_scale, fitted_zero = refitted(states, weights, fitted_scale, fitted_zero, C, DTYPE)
            wrong = error(states, weights, fitted_scale, fitted_zero, unit, C)
            scale = tl.where(wrong < least, fitted_scale, scale)
            zero = tl.where(wrong < least, fitted_zero, zero)
            least = tl.minimum(wrong, least)
    codes, residues = codes_and_residues(states, scale, zero, C)
    if C.CLIP_STEP > 0:
        scale, zero = stretched(codes, residues, weights, scale, zero, C, DTYPE)
    return codes, scale, zero


@jit
def float8_codes(states, weights, C: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes of float8 numbers (e4m3fn), as integers, and the scale of each group."""
    if C.PADDED:
        states *= weights
    numbers = tl.div_rn(tl.max(tl.abs(states), axis=1), 448.0)
    # Rounded up, so that the largest state has a code.
    nearest = rounded_to(numbers, DTYPE)
    scale = tl.where(nearest < numbers, rounded_to(numbers * (1 + C.EPSILON), DTYPE), nearest)
    scale = tl.minimum(tl.maximum(scale, C.SMALLEST_SCALE), C.LARGEST_SCALE)
    exact = tl.div_rn(states, scale[:, None])
    bits = tl.minimum(tl.maximum(exact, -448.0), 448.0).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # In integers, because not every GPU has the conversion: 20 bits of the mantissa are rounded away, to nearest even.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = to_nearest(magnitude.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    codes = tl.where(magnitude >= 0x3C800000, normal, subnormal)
    return codes | ((bits >> 24) & 0x80), scale
