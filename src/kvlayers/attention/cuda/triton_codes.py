"""Steps of the Triton kernels that read codes, scales and zeros. Importing this module imports triton.

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

try:
    import triton
    import triton.language as tl
except ImportError:  # Tools that import every module, such as a collector of doctests, may still import this one.
    triton = tl = None

jit = triton.jit if triton is not None else lambda function: function


@jit
def unpack_tile(
    words, TILE: tl.constexpr, BITS: tl.constexpr, FLOATING: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Codes of a tile in the dtype of a product: integers minus `2**(bits - 1)`, float8 divided by 256."""
    SHIFT: tl.constexpr = (TILE % 2) * 8 + (TILE // 2) * BITS
    if len(ASSEMBLY) > 0:
        # Not every version of triton takes a dtype that is an argument.
        if DTYPE == tl.bfloat16:
            codes = tl.inline_asm_elementwise(
                asm=ASSEMBLY[TILE], constraints="=r,r", args=[words], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            codes = tl.inline_asm_elementwise(
                asm=ASSEMBLY[TILE], constraints="=r,r", args=[words], dtype=tl.float16, is_pure=True, pack=2
            )
    elif FLOATING:
        # The exponent of float8 within that of float16: right apart from their biases, for subnormal numbers too.
        byte = (words >> SHIFT).to(tl.uint16)
        bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        codes = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        code = (words >> SHIFT).to(tl.uint16) & ((1 << BITS) - 1)
        codes = (code.to(tl.float32) - (1 << (BITS - 1))).to(DTYPE)
    return codes


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
def score_tile(
    query,
    words,
    offset,
    parameters,
    channels,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    FLOATING: tl.constexpr,
    FOLD: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMN_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Scores of a tile `[rows, words]`, plus an offset of each row.

    If all tokens of a block share the scales, the query has been multiplied by them already.
    """
    codes = unpack_tile(words, TILE, BITS, FLOATING, query.dtype, ASSEMBLY)
    if not FOLD:
        tokens = (TILE // 2) * (2 * WORDS) + 2 * tl.arange(0, WORDS) + TILE % 2
        GROUPS: tl.constexpr = (HEAD_DIM // ROW_GROUP) * (BLOCK_TOKENS // COLUMN_GROUP)
        places = (channels // ROW_GROUP)[:, None] * (BLOCK_TOKENS // COLUMN_GROUP) + (tokens // COLUMN_GROUP)[None, :]
        held = channels[:, None] < HEAD_DIM
        scale = tl.load(parameters + places, mask=held, other=0.0).to(tl.float32)
        if FLOATING:
            states = codes.to(tl.float32) * (256 * scale)
        else:
            zero = tl.load(parameters + GROUPS + places, mask=held, other=0.0).to(tl.float32)
            states = (codes.to(tl.float32) + (1 << (BITS - 1))) * scale + zero
        codes = states.to(query.dtype)
    return add_product(query, codes, tl.broadcast_to(offset[:, None], [query.shape[0], WORDS]), EMULATED)


@jit
def tokens_of_part(PART: tl.constexpr, JOINED: tl.constexpr, WORDS: tl.constexpr):
    """Tokens of a block that the columns of a part of the scores belong to."""
    if JOINED:
        tokens = PART * (2 * WORDS) + tl.arange(0, 2 * WORDS)
    else:
        tokens = (PART // 2) * (2 * WORDS) + 2 * tl.arange(0, WORDS) + PART % 2
    return tokens


@jit
def load_key_parameters(
    parameters,
    channels,
    FLOATING: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Scale and zero of each channel of a block whose tokens share them."""
    held = channels < HEAD_DIM
    scale = tl.load(parameters + channels // ROW_GROUP, mask=held, other=0.0)
    zero = scale
    if not FLOATING:
        zero = tl.load(parameters + HEAD_DIM // ROW_GROUP + channels // ROW_GROUP, mask=held, other=0.0)
    return scale, zero


@jit
def load_value_parameters(
    parameters,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,
    WORDS: tl.constexpr,
    FLOATING: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMN_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Scales of the tokens of a block, then their zeros, for each group of channels, as `split_by_part` takes them."""
    GROUPS: tl.constexpr = HEAD_DIM // COLUMN_GROUP
    loaded = ()
    for number in tl.static_range(1 if FLOATING else 2):
        if JOINED:
            for part in tl.static_range(PARTS):
                places = (tokens_of_part(part, JOINED, WORDS) // ROW_GROUP) * GROUPS
                for group in tl.static_range(GROUPS):
                    place = parameters + number * (BLOCK_TOKENS // ROW_GROUP) * GROUPS + group
                    loaded = loaded + (tl.load(place + places),)
        else:
            # One load for two parts, whose tokens alternate.
            for pair in tl.static_range(PARTS // 2):
                tokens = pair * (2 * WORDS) + 2 * tl.arange(0, WORDS)[:, None] + tl.arange(0, 2)[None, :]
                places = (tokens // ROW_GROUP) * GROUPS
                for group in tl.static_range(GROUPS):
                    place = parameters + number * (BLOCK_TOKENS // ROW_GROUP) * GROUPS + group
                    loaded = loaded + (tl.load(place + places),)
    return loaded


@jit
def split_by_part(loaded, NUMBER: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, GROUPS: tl.constexpr):
    """Scales, or zeros, for each part, and in it for each group of channels."""
    numbers = ()
    if JOINED:
        for place in tl.static_range(PARTS * GROUPS):
            numbers = numbers + (loaded[NUMBER * PARTS * GROUPS + place].to(tl.float32),)
    else:
        for pair in tl.static_range(PARTS // 2):
            of_odd = ()
            for group in tl.static_range(GROUPS):
                even, odd = tl.split(loaded[(NUMBER * (PARTS // 2) + pair) * GROUPS + group])
                numbers = numbers + (even.to(tl.float32),)
                of_odd = of_odd + (odd.to(tl.float32),)
            numbers = numbers + of_odd
    return numbers


@jit
def zero_unseen(numbers, seen, PARTS: tl.constexpr, GROUPS: tl.constexpr):
    """Scales, or zeros, set to 0 for tokens that are not seen: they may be nan, which no weight of 0 removes."""
    kept = ()
    for part in tl.static_range(PARTS):
        for group in tl.static_range(GROUPS):
            kept = kept + (tl.where(seen[part], numbers[part * GROUPS + group], 0.0),)
    return kept


@jit
def sum_of_centres(
    shares,
    scales,
    zeros,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    BOOST: tl.constexpr,
):
    """The part of the sums of a group of channels that does not depend on codes, `[rows]`.

    It is the weighted state of code `2**(bits - 1)`.
    """
    sums = tl.zeros(shares[0].shape, tl.float32)
    for part in tl.static_range(PARTS):
        centre = (zeros[part * GROUPS + GROUP] + (1 << (BITS - 1)) * scales[part * GROUPS + GROUP]) * BOOST
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
    FIRST_SCALE: tl.constexpr,
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
    """`sums` plus the weighted values of a part of the tokens, for every second channel of a tile.

    If blocks are cut, `seen` are the tokens that count; `scales` are already 0 for the others.
    """
    codes = unpack_tile(words, INDEX, BITS, FLOATING, DTYPE, ASSEMBLY)
    if FOLD:
        scale = scales[FIRST_SCALE + FIRST_CHANNEL // COLUMN_GROUP]
        if FLOATING:
            weights = shares * (256 * scale)[None, :]
        else:
            weights = shares * (BOOST * scale)[None, :]
        sums = add_product(weights.to(DTYPE), codes, sums, EMULATED)
    else:
        GROUPS: tl.constexpr = HEAD_DIM // COLUMN_GROUP
        columns = tl.arange(0, COLUMNS)
        channels = FIRST_CHANNEL + 2 * columns + INDEX % 2
        held = ((channels < HEAD_DIM) & (columns < WORDS))[None, :]
        if CUT:
            held = held & seen[:, None]
        place = parameters + (tokens // ROW_GROUP)[:, None] * GROUPS + (channels // COLUMN_GROUP)[None, :]
        scale = tl.load(place, mask=held, other=0.0).to(tl.float32)
        if FLOATING:
            states = codes.to(tl.float32) * (256 * scale)
        else:
            zero = tl.load(place + (BLOCK_TOKENS // ROW_GROUP) * GROUPS, mask=held, other=0.0).to(tl.float32)
            states = (codes.to(tl.float32) + (1 << (BITS - 1))) * scale + zero
        sums = add_product(shares.to(DTYPE), states.to(DTYPE), sums, EMULATED)
    return sums
