"""Steps of the Triton kernels of attention. Importing this module imports triton.

Scores are in units of log2(e), so that `exp2` takes them as they are. The scores of a block come in *parts*, a tuple of
tensors `[rows, tokens]`.

Codes are read as 16-bit words: two neighbouring bytes of a row. One shift brings a *tile* to the lowest bits of all
words: tile `i` holds byte `i % 2` of each word, and of that byte the codes of slot `i // 2`. So the words of a row give
`16 / bits` tiles of codes, whose columns are two apart, and each tile is an operand of one product. Words rather than
bytes, because tensor cores take operands of 16 bits: a word goes to the thread that multiplies it before it is
unpacked, and four instructions turn a register of two words into a register of two operands.

Scores stay in *parts* of one tile each (or of a pair of tiles, if one has too few columns): values are read by the
tokens of a part, so that weights are an operand of the next product in the registers that they were computed in.
"""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, N806, RUF005, SIM108, SIM300
# Compile-time constants are in capitals, as in triton itself; and its language lacks some of Python.

from __future__ import annotations

from kvlayers.kernels.codes.triton_language import jit, tl


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


@jit
def unpack_tile(words, TILE: tl.constexpr, SIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of a tile in the dtype of a product: integers minus `2**(bits - 1)`, float8 divided by 256."""
    SHIFT: tl.constexpr = (TILE % 2) * 8 + (TILE // 2) * SIDE.bits
    if len(SIDE.assembly) > 0:
        # Not every version of triton takes a dtype that is an argument.
        if DTYPE == tl.bfloat16:
            codes = tl.inline_asm_elementwise(
                asm=SIDE.assembly[TILE], constraints="=r,r", args=[words], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            codes = tl.inline_asm_elementwise(
                asm=SIDE.assembly[TILE], constraints="=r,r", args=[words], dtype=tl.float16, is_pure=True, pack=2
            )
    elif SIDE.floating:
        # The exponent of float8 within that of float16: right apart from their biases, for subnormal numbers too.
        byte = (words >> SHIFT).to(tl.uint16)
        bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        codes = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        code = (words >> SHIFT).to(tl.uint16) & ((1 << SIDE.bits) - 1)
        codes = (code.to(tl.float32) - (1 << (SIDE.bits - 1))).to(DTYPE)
    return codes


@jit
def scaled_codes(codes, scale, parameters, places, held, SIDE: tl.constexpr, DTYPE: tl.constexpr):
    """States in a dtype, from the codes of a tile and the scale of each."""
    if SIDE.floating:
        states = codes.to(tl.float32) * (256 * scale)
    else:
        zeros: tl.constexpr = SIDE.row_groups * SIDE.column_groups
        zero = tl.load(parameters + zeros + places, mask=held, other=0.0).to(tl.float32)
        states = (codes.to(tl.float32) + (1 << (SIDE.bits - 1))) * scale + zero
    return states.to(DTYPE)


@jit
def add_product(a, b, sums, EMULATED: tl.constexpr):
    """A product in float32, added to `sums`."""
    # The interpreter cannot multiply bfloat16. Three products of tf32 are as exact as float32, to a few roundings.
    if EMULATED:
        sums = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    elif a.dtype == tl.float32:
        sums = tl.dot(a, b, sums, input_precision="tf32x3")
    else:
        sums = tl.dot(a, b, sums)
    return sums


@jit
def times_scale(query, scale, EMULATED: tl.constexpr):
    """The query times a scale of each channel, rounded once."""
    if EMULATED:
        scaled = (query.to(tl.float32) * scale.to(tl.float32)[None, :]).to(query.dtype)
    else:
        scaled = query * scale[None, :]
    return scaled


@jit
def score_tile(query, words, offset, parameters, channels, TILE: tl.constexpr, SPEC: tl.constexpr):
    """Scores of a tile `[rows, words]`, plus an offset of each row.

    If all tokens of a block share the scales, the query has been multiplied by them already.
    """
    SIDE: tl.constexpr = SPEC.keys
    codes = unpack_tile(words, TILE, SIDE, query.dtype)
    if not SIDE.folded:
        tokens = (TILE // 2) * (2 * SIDE.words) + 2 * tl.arange(0, SIDE.words) + TILE % 2
        places = (channels // SIDE.row_group)[:, None] * SIDE.column_groups + (tokens // SIDE.column_group)[None, :]
        held = channels[:, None] < SIDE.head_dim
        scale = tl.load(parameters + places, mask=held, other=0.0).to(tl.float32)
        codes = scaled_codes(codes, scale, parameters, places, held, SIDE, query.dtype)
    start = tl.broadcast_to(offset[:, None], [query.shape[0], SIDE.words])
    return add_product(query, codes, start, SPEC.emulated)


@jit
def tokens_of_part(PART: tl.constexpr, SPEC: tl.constexpr):
    """Tokens of a block that the columns of a part of the scores belong to."""
    WORDS: tl.constexpr = SPEC.keys.words
    if SPEC.joined:
        tokens = PART * (2 * WORDS) + tl.arange(0, 2 * WORDS)
    else:
        tokens = (PART // 2) * (2 * WORDS) + 2 * tl.arange(0, WORDS) + PART % 2
    return tokens


@jit
def load_key_parameters(parameters, channels, SIDE: tl.constexpr):
    """Scale and zero of each channel of a block whose tokens share them."""
    held = channels < SIDE.head_dim
    scale = tl.load(parameters + channels // SIDE.row_group, mask=held, other=0.0)
    zero = scale
    if not SIDE.floating:
        zero = tl.load(parameters + SIDE.row_groups + channels // SIDE.row_group, mask=held, other=0.0)
    return scale, zero


@jit
def load_value_parameters(parameters, SPEC: tl.constexpr):
    """Scales of the tokens of a block, then their zeros, for each group of channels, as `split_by_part` takes them."""
    SIDE: tl.constexpr = SPEC.values
    WORDS: tl.constexpr = SPEC.keys.words
    loaded = ()
    for number in tl.static_range(1 if SIDE.floating else 2):
        if SPEC.joined:
            for part in tl.static_range(tl.constexpr(SPEC.parts)):
                places = (tokens_of_part(part, SPEC) // SIDE.row_group) * SIDE.column_groups
                for group in tl.static_range(tl.constexpr(SIDE.column_groups)):
                    place = parameters + number * SIDE.row_groups * SIDE.column_groups + group
                    loaded = loaded + (tl.load(place + places),)
        else:
            # One load for two parts, whose tokens alternate.
            for pair in tl.static_range(SPEC.parts // 2):
                tokens = pair * (2 * WORDS) + 2 * tl.arange(0, WORDS)[:, None] + tl.arange(0, 2)[None, :]
                places = (tokens // SIDE.row_group) * SIDE.column_groups
                for group in tl.static_range(tl.constexpr(SIDE.column_groups)):
                    place = parameters + number * SIDE.row_groups * SIDE.column_groups + group
                    loaded = loaded + (tl.load(place + places),)
    return loaded


@jit
def split_by_part(loaded, NUMBER: tl.constexpr, SPEC: tl.constexpr):
    """Scales, or zeros, for each part, and in it for each group of channels."""
    GROUPS: tl.constexpr = SPEC.values.column_groups
    numbers = ()
    if SPEC.joined:
        for place in tl.static_range(SPEC.parts * GROUPS):
            numbers = numbers + (loaded[NUMBER * SPEC.parts * GROUPS + place].to(tl.float32),)
    else:
        for pair in tl.static_range(SPEC.parts // 2):
            of_odd = ()
            for group in tl.static_range(GROUPS):
                even, odd = tl.split(loaded[(NUMBER * (SPEC.parts // 2) + pair) * GROUPS + group])
                numbers = numbers + (even.to(tl.float32),)
                of_odd = of_odd + (odd.to(tl.float32),)
            numbers = numbers + of_odd
    return numbers


@jit
def zero_unseen(numbers, seen, SPEC: tl.constexpr):
    """Scales, or zeros, set to 0 for tokens that are not seen: they may be nan, which no weight of 0 removes."""
    kept = ()
    for part in tl.static_range(tl.constexpr(SPEC.parts)):
        for group in tl.static_range(tl.constexpr(SPEC.values.column_groups)):
            kept = kept + (tl.where(seen[part], numbers[part * SPEC.values.column_groups + group], 0.0),)
    return kept


@jit
def sum_of_centres(shares, scales, zeros, GROUP: tl.constexpr, SPEC: tl.constexpr):
    """The part of the sums of a group of channels that does not depend on codes, `[rows]`.

    It is the weighted state of code `2**(bits - 1)`.
    """
    sums = tl.zeros(shares[0].shape, tl.float32)
    for part in tl.static_range(tl.constexpr(SPEC.parts)):
        scale = scales[part * SPEC.values.column_groups + GROUP]
        zero = zeros[part * SPEC.values.column_groups + GROUP]
        centre = (zero + (1 << (SPEC.values.bits - 1)) * scale) * SPEC.boost
        sums += shares[part] * centre[None, :]
    return tl.sum(sums, axis=1)


@jit
def add_weighted_tile(
    sums,
    shares,
    words,
    scales,
    parameters,
    tokens,
    seen,
    INDEX: tl.constexpr,
    FIRST_CHANNEL: tl.constexpr,
    PART: tl.constexpr,
    SPEC: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`sums` plus the weighted values of a part of the tokens, for every second channel of a tile.

    If blocks are cut, `seen` are the tokens that count; `scales` are already 0 for the others.
    """
    SIDE: tl.constexpr = SPEC.values
    codes = unpack_tile(words, INDEX, SIDE, DTYPE)
    if SIDE.folded:
        scale = scales[PART * SIDE.column_groups + FIRST_CHANNEL // SIDE.column_group]
        if SIDE.floating:
            weights = shares * (256 * scale)[None, :]
        else:
            weights = shares * (SPEC.boost * scale)[None, :]
        sums = add_product(weights.to(DTYPE), codes, sums, SPEC.emulated)
    else:
        columns = tl.arange(0, SPEC.columns)
        channels = FIRST_CHANNEL + 2 * columns + INDEX % 2
        held = ((channels < SIDE.head_dim) & (columns < SIDE.words))[None, :]
        if SPEC.first or SPEC.ends:
            held = held & seen[:, None]
        places = (tokens // SIDE.row_group)[:, None] * SIDE.column_groups + (channels // SIDE.column_group)[None, :]
        scale = tl.load(parameters + places, mask=held, other=0.0).to(tl.float32)
        states = scaled_codes(codes, scale, parameters, places, held, SIDE, DTYPE)
        sums = add_product(shares.to(DTYPE), states, sums, SPEC.emulated)
    return sums
