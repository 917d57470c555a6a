"""Steps that the Triton kernels share. Importing this module imports triton.

Scores are in units of log2(e), so that `exp2` takes them as they are. The scores of a block come in *parts*, a tuple of
tensors `[rows, tokens]`.
"""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, N806, RUF005
# Compile-time constants are in capitals, as in triton itself; and its language lacks some of Python.

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # Tools that import every module, such as a collector of doctests, may still import this one.
    triton = tl = None

jit = triton.jit if triton is not None else lambda function: function


@jit
def rotate(states, ROTATION: tl.constexpr):
    """Rotate float32 `[rows, channels]` as `quantizers.groups.rotate`, in runs of `2**ROTATION` channels.

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


@jit
def filled_pieces(counts, begin, end):
    """The first of the pieces from `begin` to `end` that has tokens, and the piece behind the last one that has.

    If no piece has tokens, they are `end` and `begin`. So a program whose pieces are all empty reads nothing else, and
    empty pieces at either end cost nothing.
    """
    first = end
    behind = begin
    for start in range(begin, end, 32):
        pieces = start + tl.arange(0, 32)
        filled = tl.load(counts + pieces, mask=pieces < end, other=0) > 0
        first = tl.minimum(first, tl.min(tl.where(filled, pieces, end), axis=0))
        behind = tl.maximum(behind, tl.max(tl.where(filled, pieces + 1, begin), axis=0))
    return first, behind


@jit
def block_of_piece(pieces, counts, piece):
    """The block that a piece is in. An empty piece may name no block: it is in the first."""
    return tl.where(tl.load(counts + piece) > 0, tl.load(pieces + piece), 0)


@jit
def rows_of_program(SPEC: tl.constexpr):
    """Rows of queries that a program takes, among those of its kv head."""
    return tl.program_id(2) * SPEC.rows + tl.arange(0, SPEC.rows)


@jit
def result_rows(rows_of_head, readers, SPEC: tl.constexpr):
    """Where the rows of a program are among results: of its kv head, or of all if several sequences read a segment.

    Results are `[batch, heads, q_tokens]`, so the rows of a kv head of one sequence follow one another.
    """
    rows = rows_of_program(SPEC)
    if SPEC.shared:
        rows_of_reader = rows_of_head // readers
        reader = (tl.program_id(1) // SPEC.kv_heads).to(tl.int64) * readers + rows // rows_of_reader
        rows = (reader * SPEC.kv_heads + tl.program_id(1) % SPEC.kv_heads) * rows_of_reader + rows % rows_of_reader
    return rows


@jit
def mask_part(scores, seen, mask, rows_of_mask, columns, mask_token, scale, KIND: tl.constexpr):
    """Scores `[rows, tokens]` under a mask, bool (kind 1) or additive (kind 2, which also scales them).

    Args:
        seen: `[rows, tokens]`, which entries of the mask may be read.
        mask: pointer to the mask.
        rows_of_mask: offset of the row of each query in it.
        columns: columns of the mask that belong to the tokens.
    """
    places = rows_of_mask[:, None] + columns[None, :].to(tl.int64) * mask_token
    entries = tl.load(mask + places, mask=seen, other=0)
    if KIND == 1:
        masked = tl.where(entries != 0, scores, float("-inf"))
    else:
        masked = scores * scale + entries.to(tl.float32) * 1.4426950408889634
    return masked


@jit
def row_maxima(scores, PARTS: tl.constexpr):
    """The largest score of each row in all parts."""
    peaks = scores[0]
    for part in tl.static_range(1, PARTS):
        peaks = tl.maximum(peaks, scores[part])
    return tl.max(peaks, axis=1)


@jit
def weigh_scores(scores, factor, base, PARTS: tl.constexpr):
    """For each part, `2 ** (score * factor - base)`: the weights of its tokens before they are normalised."""
    shares = ()
    for part in tl.static_range(PARTS):
        shares = shares + (tl.exp2(scores[part] * factor - base[:, None]),)
    return shares


@jit
def row_sums(shares, PARTS: tl.constexpr):
    """The sum of each row over all parts."""
    summed = tl.zeros(shares[0].shape, tl.float32)
    for part in tl.static_range(PARTS):
        summed += shares[part]
    return tl.sum(summed, axis=1)


@jit
def finite_base(largest):
    """The number to subtract from scores: a row that has seen no token yet would get nan from its -inf."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@jit
def logsumexp_of(largest, total):
    """The log-sum-exp of each row, `-inf` if it has seen no token, nan if a score is nan."""
    return tl.where(total != 0, largest + tl.log2(total), float("-inf"))


@jit
def normalised(sums, total, DIVISOR: tl.constexpr):
    """Sums `[rows, channels]` divided by the total of the weights, 0 for a row that has seen no token.

    The total is nan if a score is: such a row is not one that has seen no token.
    """
    seen = total != 0
    share_of_sum = 1.0 / tl.where(seen, total, 1.0)
    if DIVISOR != 1.0:
        share_of_sum = share_of_sum / DIVISOR
    # Sums of values that are nan are nan even if all weights are 0.
    return tl.where(seen[:, None], sums * share_of_sum[:, None], 0.0)
