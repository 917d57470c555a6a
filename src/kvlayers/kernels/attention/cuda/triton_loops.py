"""Attention to packed blocks, and to tokens in full precision, within a Triton kernel. It imports triton."""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, N806, RUF005, SIM108
# Compile-time constants are in capitals, as in triton itself; and its language lacks some of Python.

from __future__ import annotations

from kvlayers.kernels.attention.cuda.triton_steps import (
    add_product,
    add_weighted_tile,
    block_of_piece,
    finite_base,
    load_key_parameters,
    load_value_parameters,
    logsumexp_of,
    mask_part,
    normalised,
    result_rows,
    rotate,
    row_maxima,
    row_sums,
    rows_of_program,
    score_tile,
    split_by_part,
    sum_of_centres,
    times_scale,
    tokens_of_part,
    weigh_scores,
    zero_unseen,
)
from kvlayers.kernels.codes.triton_language import jit, tl


@jit
def find_seen_tokens(ends, entry, lead, SPEC: tl.constexpr):
    """For each part, which of its tokens are held: neither evicted (the first `lead`) nor beyond the block's end.

    The end of a gathered block is counted from its first token that is held.
    """
    seen_of_parts = ()
    for part in tl.static_range(tl.constexpr(SPEC.parts)):
        tokens = tokens_of_part(part, SPEC)
        seen = tokens >= lead
        if SPEC.ends:
            end = tl.load(ends + entry)
            if SPEC.gathered:
                end += lead
            seen = seen & (tokens < end)
        seen_of_parts = seen_of_parts + (seen,)
    return seen_of_parts


@jit
def score_block(query, words, offset, parameters, channels, seen_of_parts, SPEC: tl.constexpr):
    """Scores of a block for each part of its tokens, before the mask; -inf for tokens that are not seen."""
    scores = ()
    for part in tl.static_range(tl.constexpr(SPEC.parts)):
        if SPEC.joined:
            even = score_tile(query, words, offset, parameters, channels, 2 * part, SPEC)
            odd = score_tile(query, words, offset, parameters, channels, 2 * part + 1, SPEC)
            of_part = tl.reshape(tl.join(even, odd), [query.shape[0], 2 * SPEC.keys.words])
        else:
            of_part = score_tile(query, words, offset, parameters, channels, part, SPEC)
        if SPEC.first or SPEC.ends:
            of_part = tl.where(seen_of_parts[part][None, :], of_part, float("-inf"))
        scores = scores + (of_part,)
    return scores


@jit
def mask_block(scores, seen_of_parts, mask, rows_of_mask, mask_token, start, rows_of_head, scale, SPEC: tl.constexpr):
    """Scores of each part under a mask, of which column `start` belongs to the first token of the block."""
    masked = ()
    for part in tl.static_range(tl.constexpr(SPEC.parts)):
        tokens = tokens_of_part(part, SPEC)
        seen = (rows_of_program(SPEC) < rows_of_head)[:, None] & (tokens < SPEC.block_tokens)[None, :]
        if SPEC.first or SPEC.ends:
            seen = seen & seen_of_parts[part][None, :]
        masked = masked + (
            mask_part(scores[part], seen, mask, rows_of_mask, start + tokens, mask_token, scale, SPEC.mask),
        )
    return masked


@jit
def add_values_of_block(
    sums, decay, shares, codes, scales, zeros, parameters, seen_of_parts, SPEC: tl.constexpr, DTYPE: tl.constexpr
):
    """The sums of all tiles times `decay`, plus the values of a block weighted by `shares`.

    Args:
        codes: pointer to the value codes of the block.
        parameters: pointer to its value parameters.
    """
    SIDE: tl.constexpr = SPEC.values
    ROW_WORDS: tl.constexpr = SIDE.chunks * SIDE.words
    columns = tl.arange(0, SPEC.columns)
    new_sums = ()
    for chunk in tl.static_range(tl.constexpr(SIDE.chunks)):
        words_of_parts = ()
        for part in tl.static_range(tl.constexpr(SPEC.parts)):
            place = codes + chunk * SIDE.words
            place += tokens_of_part(part, SPEC)[:, None] * ROW_WORDS + columns[None, :]
            if SPEC.columns == SIDE.words:
                words_of_parts = words_of_parts + (tl.load(place),)
            else:
                held = (columns < SIDE.words)[None, :]
                words_of_parts = words_of_parts + (tl.load(place, mask=held, other=0),)
        for index in tl.static_range(tl.constexpr(SIDE.tiles)):
            tile = sums[chunk * SIDE.tiles + index] * decay[:, None]
            if SIDE.folded and not SIDE.floating:
                tile += sum_of_centres(
                    shares,
                    scales,
                    zeros,
                    ((index // 2) * (2 * ROW_WORDS) + chunk * (2 * SIDE.words)) // SIDE.column_group,
                    SPEC,
                )[:, None]
            for part in tl.static_range(tl.constexpr(SPEC.parts)):
                tile = add_weighted_tile(
                    tile,
                    shares[part],
                    words_of_parts[part],
                    scales,
                    parameters,
                    tokens_of_part(part, SPEC),
                    seen_of_parts[part],
                    index,
                    (index // 2) * (2 * ROW_WORDS) + chunk * (2 * SIDE.words),
                    part,
                    SPEC,
                    DTYPE,
                )
            new_sums = new_sums + (tile,)
    return new_sums


@jit
def query_of_blocks(query, factors, places, held, SPEC: tl.constexpr):
    """Queries `[rows, channels]` for packed keys: times the factors of these, rotated as they are, and rounded once."""
    DTYPE: tl.constexpr = query.dtype
    if SPEC.factors:
        query = query.to(tl.float32) * tl.load(factors + places, mask=held, other=1.0).to(tl.float32)
    if SPEC.keys.rotation > 0:
        # Products stay the same if both sides are rotated, so keys need not be rotated back.
        query = rotate(query.to(tl.float32), SPEC.keys.rotation)
    return query.to(DTYPE)


@jit
def offsets_of_means(query, means, places, held, SPEC: tl.constexpr):
    """What is added to the products of queries and packed keys for their means, `[rows]`, in units of the products."""
    offsets = tl.zeros([SPEC.rows], tl.float32)
    if SPEC.means:
        mean = tl.load(means + places, mask=held, other=0.0).to(tl.float32)
        offsets = tl.sum(query.to(tl.float32) * mean, axis=1) / SPEC.unfold
    return offsets


@jit
def attend_blocks(
    query,
    factors,
    means,
    places,
    held,
    key_codes,
    key_parameters,
    value_codes,
    value_parameters,
    ends,
    starts,
    pieces,
    mask,
    key_block,
    key_parameters_block,
    value_block,
    value_parameters_block,
    rows_of_mask,
    mask_token,
    begin,
    end,
    first,
    column,
    scale,
    outs,
    lses,
    splits,
    rows_of_head,
    readers,
    SPEC: tl.constexpr,
):
    """Attention of queries to blocks `begin` to `end` of a kv head, by an online softmax.

    Args:
        query: `[rows, channels]`, not rotated.
        factors: pointer to the factors of packed keys.
        means: pointer to what was subtracted from them.
        places: where both have the channels of each row.
        held: which channels of which rows there are.
        key_codes: pointer to the key codes of the kv head, as the other pointers.
        pieces: pointer to the blocks that are read, if they are gathered: `begin` and `end` are those of this table.
        key_block: words between key codes of neighbouring blocks; the other strides count parameters and words.
        column: column of the mask that belongs to the first packed token.
        scale: factor of the scores, in units of log2(e).
        outs: pointer to where the first of `result_rows` has its sums, `splits` rows before the second.
        lses: pointer to where it has its log-sum-exp.
        rows_of_head: rows of queries of the kv head, of all sequences that read the segment.
        readers: how many these are.
    """
    KEYS: tl.constexpr = SPEC.keys
    VALUES: tl.constexpr = SPEC.values
    ROWS: tl.constexpr = SPEC.rows
    COLUMNS: tl.constexpr = SPEC.columns
    DTYPE: tl.constexpr = query.dtype
    CUT: tl.constexpr = SPEC.first or SPEC.ends
    offsets = offsets_of_means(query, means, places, held, SPEC)
    query = query_of_blocks(query, factors, places, held, SPEC)
    scale = scale * SPEC.unfold
    channels = tl.arange(0, SPEC.key_channels)
    key_places = channels[:, None] * KEYS.words + tl.arange(0, KEYS.words)[None, :]

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = ()
    for _ in tl.static_range(VALUES.chunks * VALUES.tiles):
        sums = sums + (tl.zeros([ROWS, COLUMNS], tl.float32),)

    # Parameters are too narrow to be copied ahead asynchronously, so they are read one block ahead.
    leading = begin
    if SPEC.gathered:
        # Without any piece, the table may have no entry `begin`.
        leading = block_of_piece(pieces, ends, tl.where(begin < end, begin, 0))
    if KEYS.folded:
        key_scale, key_zero = load_key_parameters(key_parameters + leading * key_parameters_block, channels, KEYS)
    loaded = ()
    if VALUES.folded:
        loaded = load_value_parameters(value_parameters + leading * value_parameters_block, SPEC)

    for entry in range(begin, end):
        block = entry
        following = tl.minimum(entry + 1, end - 1)
        if SPEC.gathered:
            block = block_of_piece(pieces, ends, entry)
            following = block_of_piece(pieces, ends, following)
        if SPEC.key_channels == KEYS.head_dim:
            words = tl.load(key_codes + block * key_block + key_places)
        else:
            words = tl.load(
                key_codes + block * key_block + key_places, mask=(channels < KEYS.head_dim)[:, None], other=0
            )

        offset = offsets
        rows_of_block = query
        if KEYS.folded:
            rows_of_block = times_scale(query, key_scale, SPEC.emulated)
            if not KEYS.floating:
                centre = key_zero.to(tl.float32) + (1 << (KEYS.bits - 1)) * key_scale.to(tl.float32)
                offset += tl.sum(query.to(tl.float32) * centre[None, :], axis=1)
            key_scale, key_zero = load_key_parameters(key_parameters + following * key_parameters_block, channels, KEYS)

        lead = tl.where(block == 0, first, 0)
        seen_of_parts = find_seen_tokens(ends, entry, lead, SPEC)
        scores = score_block(
            rows_of_block, words, offset, key_parameters + block * key_parameters_block, channels, seen_of_parts, SPEC
        )
        if SPEC.mask != 0:
            if SPEC.ends:
                start = column + tl.load(starts + entry) - lead
            else:
                start = column + block * SPEC.block_tokens - first
            scores = mask_block(scores, seen_of_parts, mask, rows_of_mask, mask_token, start, rows_of_head, scale, SPEC)

        # `scale` is positive, so the largest score can be found before scaling: then scaling and subtraction are one
        # instruction.
        factor = 1.0 if SPEC.mask == 2 else scale
        new_largest = tl.maximum(largest, row_maxima(scores, SPEC.parts) * factor)
        base = finite_base(new_largest)
        decay = tl.exp2(largest - base)
        largest = new_largest
        shares = weigh_scores(scores, factor, base, SPEC.parts)
        total = total * decay + row_sums(shares, SPEC.parts)

        scales = ()
        zeros = ()
        if VALUES.folded:
            scales = split_by_part(loaded, 0, SPEC)
            if not VALUES.floating:
                zeros = split_by_part(loaded, 1, SPEC)
            if CUT:
                scales = zero_unseen(scales, seen_of_parts, SPEC)
                if not VALUES.floating:
                    zeros = zero_unseen(zeros, seen_of_parts, SPEC)
            loaded = load_value_parameters(value_parameters + following * value_parameters_block, SPEC)
        sums = add_values_of_block(
            sums,
            decay,
            shares,
            value_codes + block * value_block,
            scales,
            zeros,
            value_parameters + block * value_parameters_block,
            seen_of_parts,
            SPEC,
            DTYPE,
        )

    asked = rows_of_program(SPEC) < rows_of_head
    rows = result_rows(rows_of_head, readers, SPEC)
    tl.store(lses + rows * splits, logsumexp_of(largest, total), mask=asked)
    if SPEC.gathered:
        # Nobody reads sums of no tokens.
        asked = rows_of_program(SPEC) < tl.where(begin < end, rows_of_head, 0)
    columns = tl.arange(0, SPEC.columns)
    for chunk in tl.static_range(tl.constexpr(VALUES.chunks)):
        for index in tl.static_range(tl.constexpr(VALUES.tiles)):
            of_tile = (index // 2) * (2 * VALUES.chunks * VALUES.words) + chunk * (2 * VALUES.words)
            of_tile += 2 * columns + index % 2
            tl.store(
                outs + (rows * (splits * VALUES.head_dim))[:, None] + of_tile[None, :],
                normalised(sums[chunk * VALUES.tiles + index], total, SPEC.divisor),
                mask=asked[:, None] & ((of_tile < VALUES.head_dim) & (columns < VALUES.words))[None, :],
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
