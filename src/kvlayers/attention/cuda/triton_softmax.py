"""Steps of the Triton kernels that turn scores into weights, and weights into sums of values."""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, N806, RUF005, SIM108
# Compile-time constants are in capitals, as in triton itself; and its language lacks some of Python.

from __future__ import annotations

try:
    import triton.language as tl
except ImportError:  # Tools that import every module, such as a collector of doctests, may still import this one.
    tl = None

from kvlayers.attention.cuda.triton_codes import (
    add_weighted_tile,
    jit,
    score_tile,
    sum_of_centres,
    tokens_of_part,
)


@jit
def find_seen_tokens(
    ends,
    block,
    lead,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,
    WORDS: tl.constexpr,
    ENDS: tl.constexpr,
):
    """For each part, which of its tokens are held: neither evicted (the first `lead`) nor beyond the block's end."""
    seen_of_parts = ()
    for part in tl.static_range(PARTS):
        tokens = tokens_of_part(part, JOINED, WORDS)
        seen = tokens >= lead
        if ENDS:
            seen = seen & (tokens < tl.load(ends + block))
        seen_of_parts = seen_of_parts + (seen,)
    return seen_of_parts


@jit
def score_block(
    query,
    words,
    offset,
    parameters,
    channels,
    seen_of_parts,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,
    BITS: tl.constexpr,
    FLOATING: tl.constexpr,
    FOLD: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMN_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    CUT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Scores of a block for each part of its tokens, before the mask; -inf for tokens that are not seen."""
    scores = ()
    for part in tl.static_range(PARTS):
        for half in tl.static_range(2 if JOINED else 1):
            tile = score_tile(
                query,
                words,
                offset,
                parameters,
                channels,
                (2 * part if JOINED else part) + half,
                BITS,
                FLOATING,
                FOLD,
                ROW_GROUP,
                COLUMN_GROUP,
                HEAD_DIM,
                BLOCK_TOKENS,
                WORDS,
                ASSEMBLY,
                EMULATED,
            )
            if half == 0:
                of_part = tile
            else:
                of_part = tl.reshape(tl.join(of_part, tile), [query.shape[0], 2 * WORDS])
        if CUT:
            of_part = tl.where(seen_of_parts[part][None, :], of_part, float("-inf"))
        scores = scores + (of_part,)
    return scores


@jit
def mask_scores(
    scores,
    seen_of_parts,
    mask,
    rows_of_mask,
    mask_token,
    start,
    asked,
    scale,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CUT: tl.constexpr,
    KIND: tl.constexpr,
):
    """Scores of each part under a mask, bool (kind 1) or additive (kind 2, which also scales them).

    Args:
        mask: pointer to the mask of the sequence.
        rows_of_mask: offset of the row of each query in it.
        start: column of the mask that belongs to the first token of the block.
        asked: rows that hold a query.
    """
    masked = ()
    for part in tl.static_range(PARTS):
        tokens = tokens_of_part(part, JOINED, WORDS)
        asking = asked[:, None] & (tokens < BLOCK_TOKENS)[None, :]
        if CUT:
            asking = asking & seen_of_parts[part][None, :]
        addend = tl.load(
            mask + rows_of_mask[:, None] + (start + tokens)[None, :].to(tl.int64) * mask_token,
            mask=asking,
            other=0,
        )
        if KIND == 1:
            masked = masked + (tl.where(addend != 0, scores[part], float("-inf")),)
        else:
            masked = masked + (scores[part] * scale + addend.to(tl.float32) * 1.4426950408889634,)
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
def add_values_of_block(
    sums,
    decay,
    shares,
    codes,
    scales,
    zeros,
    parameters,
    seen_of_parts,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    BITS: tl.constexpr,
    FLOATING: tl.constexpr,
    FOLD: tl.constexpr,
    CUT: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMN_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    BOOST: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """The sums of all tiles times `decay`, plus the values of a block weighted by `shares`.

    Args:
        codes: pointer to the value codes of the block.
        parameters: pointer to its value parameters.
    """
    GROUPS: tl.constexpr = HEAD_DIM // COLUMN_GROUP
    ROW_BYTES: tl.constexpr = CHUNKS * WORDS * 2
    columns = tl.arange(0, COLUMNS)
    new_sums = ()
    for chunk in tl.static_range(CHUNKS):
        words_of_parts = ()
        for part in tl.static_range(PARTS):
            place = codes + chunk * WORDS
            place += tokens_of_part(part, JOINED, KEY_WORDS)[:, None] * (CHUNKS * WORDS) + columns[None, :]
            if COLUMNS == WORDS:
                words_of_parts = words_of_parts + (tl.load(place),)
            else:
                held = (columns < WORDS)[None, :]
                words_of_parts = words_of_parts + (tl.load(place, mask=held, other=0),)
        for index in tl.static_range(TILES):
            tile = sums[chunk * TILES + index] * decay[:, None]
            if FOLD and not FLOATING:
                tile += sum_of_centres(
                    shares,
                    scales,
                    zeros,
                    ((index // 2) * ROW_BYTES + chunk * (2 * WORDS)) // COLUMN_GROUP,
                    GROUPS,
                    PARTS,
                    BITS,
                    BOOST,
                )[:, None]
            for part in tl.static_range(PARTS):
                tile = add_weighted_tile(
                    tile,
                    shares[part],
                    words_of_parts[part],
                    scales,
                    parameters,
                    tokens_of_part(part, JOINED, KEY_WORDS),
                    seen_of_parts[part],
                    index,
                    (index // 2) * ROW_BYTES + chunk * (2 * WORDS),
                    part * GROUPS,
                    BITS,
                    FLOATING,
                    FOLD,
                    CUT,
                    ROW_GROUP,
                    COLUMN_GROUP,
                    HEAD_DIM,
                    BLOCK_TOKENS,
                    WORDS,
                    COLUMNS,
                    DTYPE,
                    BOOST,
                    ASSEMBLY,
                    EMULATED,
                )
            new_sums = new_sums + (tile,)
    return new_sums


@jit
def store_split(
    outs,
    lses,
    rows,
    asked,
    sums,
    largest,
    total,
    HEAD_DIM: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIVISOR: tl.constexpr,
):
    """Store the attended values and the log-sum-exp of one split, for result rows `rows`."""
    lse = tl.where(total > 0, largest + tl.log2(total), float("-inf"))
    tl.store(lses + rows, lse, mask=asked)
    share_of_sum = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    if DIVISOR != 1.0:
        share_of_sum = share_of_sum / DIVISOR
    for chunk in tl.static_range(CHUNKS):
        for index in tl.static_range(TILES):
            channels = (index // 2) * (CHUNKS * WORDS * 2) + chunk * (2 * WORDS) + 2 * tl.arange(0, COLUMNS) + index % 2
            tl.store(
                outs + rows[:, None] * HEAD_DIM + channels[None, :],
                sums[chunk * TILES + index] * share_of_sum[:, None],
                mask=asked[:, None] & ((channels < HEAD_DIM) & (tl.arange(0, COLUMNS) < WORDS))[None, :],
            )
