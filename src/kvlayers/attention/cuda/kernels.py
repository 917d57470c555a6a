"""The kernels of `triton_decode`, which alone imports this module: it needs triton.

Codes are read as 16-bit words: two neighbouring bytes of a row. A *tile* is what one shift brings to the lowest bits of
all words: tile `i` holds byte `i % 2` of each word, and of that byte the codes of slot `i // 2`. So a tile of words
gives `16 / bits` tiles of codes, whose columns are two apart, and each is an operand of a product of its own. Words
rather than bytes, because tensor cores take operands of 16 bits: a word goes to the thread that multiplies it before
it is unpacked, and a register of two words becomes a register of two operands by four instructions.

Scores stay in *parts* of one such tile each (of a pair, where a tile has too few columns): values are read by the
tokens of a part, so that weights are an operand of the next product in the registers that they were computed in.
"""

# mypy: ignore-errors
# What is decorated is compiled by triton from its source: its annotations are triton's, not Python types.
# ruff: noqa: N803, N806, RUF005, SIM108, SIM300
# Compile-time constants are in capitals, as triton's own are; and not all of Python is in its language.

from __future__ import annotations

import inspect

try:
    import triton
    import triton.language as tl
except ImportError:  # Whatever walks through all modules, as a collector of doctests does, may still import this one.
    triton = tl = None

_jit = triton.jit if triton is not None else lambda function: function

_GROWING = (
    *("mask_batch", "mask_head", "mask_query", "mask_token"),
    *("blocks", "blocks_per_split", "splits", "first"),
)
"""Numbers that change as tokens come: no kernel is compiled anew because one of them is, say, a multiple of 16."""


def _launched(function):
    """A kernel that is launched, compiled once whatever the growing numbers are."""
    if triton is None:
        return function
    names = [name for name in inspect.signature(function).parameters if name in _GROWING]
    return triton.jit(function, do_not_specialize=names)


@_jit
def _codes(
    words, TILE: tl.constexpr, BITS: tl.constexpr, FLOATING: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Codes of a tile in the dtype of a product: less `2**(bits - 1)`, or floating ones divided by 256."""
    SHIFT: tl.constexpr = (TILE % 2) * 8 + (TILE // 2) * BITS
    if len(ASSEMBLY) > 0:
        # A dtype that is an argument is not taken by every version of triton.
        if DTYPE == tl.bfloat16:
            codes = tl.inline_asm_elementwise(
                asm=ASSEMBLY[TILE], constraints="=r,r", args=[words], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            codes = tl.inline_asm_elementwise(
                asm=ASSEMBLY[TILE], constraints="=r,r", args=[words], dtype=tl.float16, is_pure=True, pack=2
            )
    elif FLOATING:
        # The exponent of float8 within that of float16: right but for the difference of their biases, subnormal too.
        byte = (words >> SHIFT).to(tl.uint16)
        bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        codes = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        code = (words >> SHIFT).to(tl.uint16) & ((1 << BITS) - 1)
        codes = (code.to(tl.float32) - (1 << (BITS - 1))).to(DTYPE)
    return codes


@_jit
def _product(a, b, sums, EMULATED: tl.constexpr):
    """A product in float32, added to `sums`."""
    # The interpreter cannot multiply bfloat16. Three products of tf32 are as exact as float32, to a few roundings.
    if EMULATED:
        sums = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    elif a.dtype == tl.float32:
        sums = tl.dot(a, b, sums, input_precision="tf32x3")
    else:
        sums = tl.dot(a, b, sums)
    return sums


@_jit
def _scaled(query, scale, EMULATED: tl.constexpr):
    """The query times a scale of each channel, rounded once."""
    if EMULATED:
        scaled = (query.to(tl.float32) * scale.to(tl.float32)[None, :]).to(query.dtype)
    else:
        scaled = query * scale[None, :]
    return scaled


@_jit
def _key_tile(
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

    The query has the scales already, where all tokens of a block share them.
    """
    codes = _codes(words, TILE, BITS, FLOATING, query.dtype, ASSEMBLY)
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
    return _product(query, codes, tl.broadcast_to(offset[:, None], [query.shape[0], WORDS]), EMULATED)


@_jit
def _tokens(PART: tl.constexpr, JOINED: tl.constexpr, WORDS: tl.constexpr):
    """Tokens of a block that the columns of a part of the scores belong to."""
    if JOINED:
        tokens = PART * (2 * WORDS) + tl.arange(0, 2 * WORDS)
    else:
        tokens = (PART // 2) * (2 * WORDS) + 2 * tl.arange(0, WORDS) + PART % 2
    return tokens


@_jit
def _key_parameters(
    parameters,
    channels,
    FLOATING: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Scale and zero of each channel of a block that has one for all its tokens."""
    held = channels < HEAD_DIM
    scale = tl.load(parameters + channels // ROW_GROUP, mask=held, other=0.0)
    zero = scale
    if not FLOATING:
        zero = tl.load(parameters + HEAD_DIM // ROW_GROUP + channels // ROW_GROUP, mask=held, other=0.0)
    return scale, zero


@_jit
def _value_parameters(
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
    """Scales of the tokens of a block and then their zeros, for each group of channels, as `_of_parts` takes them."""
    GROUPS: tl.constexpr = HEAD_DIM // COLUMN_GROUP
    loaded = ()
    for number in tl.static_range(1 if FLOATING else 2):
        if JOINED:
            for part in tl.static_range(PARTS):
                places = (_tokens(part, JOINED, WORDS) // ROW_GROUP) * GROUPS
                for group in tl.static_range(GROUPS):
                    place = parameters + number * (BLOCK_TOKENS // ROW_GROUP) * GROUPS + group
                    loaded = loaded + (tl.load(place + places),)
        else:
            # Those of two parts, whose tokens alternate, by one load.
            for pair in tl.static_range(PARTS // 2):
                tokens = pair * (2 * WORDS) + 2 * tl.arange(0, WORDS)[:, None] + tl.arange(0, 2)[None, :]
                places = (tokens // ROW_GROUP) * GROUPS
                for group in tl.static_range(GROUPS):
                    place = parameters + number * (BLOCK_TOKENS // ROW_GROUP) * GROUPS + group
                    loaded = loaded + (tl.load(place + places),)
    return loaded


@_jit
def _of_parts(loaded, NUMBER: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, GROUPS: tl.constexpr):
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


@_jit
def _of_seen(numbers, seen, PARTS: tl.constexpr, GROUPS: tl.constexpr):
    """Scales, or zeros, with zeros for tokens that are not seen: theirs may be nan, which no weight of 0 takes away."""
    kept = ()
    for part in tl.static_range(PARTS):
        for group in tl.static_range(GROUPS):
            kept = kept + (tl.where(seen[part], numbers[part * GROUPS + group], 0.0),)
    return kept


@_jit
def _centres(
    shares,
    scales,
    zeros,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    BOOST: tl.constexpr,
):
    """What a group of channels gets whatever its codes are: the weighted states of code `2**(bits - 1)`, `[rows]`."""
    sums = tl.zeros(shares[0].shape, tl.float32)
    for part in tl.static_range(PARTS):
        centre = (zeros[part * GROUPS + GROUP] + (1 << (BITS - 1)) * scales[part * GROUPS + GROUP]) * BOOST
        sums += shares[part] * centre[None, :]
    return tl.sum(sums, axis=1)


@_jit
def _weighted_tile(
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
    """`sums` and the weighted values of a part of the tokens, of every second channel of a tile.

    Where blocks are cut, `seen` are the tokens that count; `scales` are zeros for the others already.
    """
    codes = _codes(words, INDEX, BITS, FLOATING, DTYPE, ASSEMBLY)
    if FOLD:
        scale = scales[FIRST_SCALE + FIRST_CHANNEL // COLUMN_GROUP]
        if FLOATING:
            weights = shares * (256 * scale)[None, :]
        else:
            weights = shares * (BOOST * scale)[None, :]
        sums = _product(weights.to(DTYPE), codes, sums, EMULATED)
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
        sums = _product(shares.to(DTYPE), states.to(DTYPE), sums, EMULATED)
    return sums


@_launched
def attend_split(
    query_pointer,
    key_codes,
    key_parameters,
    value_codes,
    value_parameters,
    ends,
    starts,
    mask,
    partial_outs,
    partial_lses,
    query_batch,
    query_head,
    query_token,
    key_codes_batch,
    key_codes_head,
    key_codes_block,
    key_parameters_batch,
    key_parameters_head,
    key_parameters_block,
    value_codes_batch,
    value_codes_head,
    value_codes_block,
    value_parameters_batch,
    value_parameters_head,
    value_parameters_block,
    mask_batch,
    mask_head,
    mask_query,
    mask_token,
    blocks,
    blocks_per_split,
    splits,
    first,
    scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    Q_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_FLOATING: tl.constexpr,
    VALUE_FLOATING: tl.constexpr,
    KEY_ROW_GROUP: tl.constexpr,
    KEY_COLUMN_GROUP: tl.constexpr,
    VALUE_ROW_GROUP: tl.constexpr,
    VALUE_COLUMN_GROUP: tl.constexpr,
    KEY_FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr,
    VALUE_CHUNKS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASK: tl.constexpr,
    FIRST: tl.constexpr,
    ENDS: tl.constexpr,
    DTYPE: tl.constexpr,
    BOOST: tl.constexpr,
    KEY_ASSEMBLY: tl.constexpr,
    VALUE_ASSEMBLY: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Attention of the queries of one kv head to a run of its blocks, by an online softmax.

    Scores are in units of log2(e), so that `exp2` takes them as they are; `scale` is in these units too.
    """
    split = tl.program_id(0)
    sequence = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    begin = split * blocks_per_split
    end = tl.minimum(begin + blocks_per_split, blocks)

    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    heads = kv_head * GROUPS + rows // Q_TOKENS
    q_tokens = rows % Q_TOKENS
    asked = rows < GROUPS * Q_TOKENS
    channels = tl.arange(0, CHANNELS)
    query = tl.load(
        query_pointer
        + sequence.to(tl.int64) * query_batch
        + (heads * query_head + q_tokens * query_token)[:, None]
        + channels[None, :],
        mask=asked[:, None] & (channels < KEY_DIM)[None, :],
        other=0.0,
    )

    KEY_WORDS: tl.constexpr = BLOCK_TOKENS * KEY_BITS // 16
    KEY_TILES: tl.constexpr = 16 // KEY_BITS
    VALUE_ROW_BYTES: tl.constexpr = VALUE_CHUNKS * VALUE_WORDS * 2
    VALUE_TILES: tl.constexpr = 16 // VALUE_BITS
    VALUE_GROUPS: tl.constexpr = VALUE_DIM // VALUE_COLUMN_GROUP
    # The inner dimension of a product, which the columns of a part become, is 16 at least.
    JOINED: tl.constexpr = KEY_WORDS < 16
    PARTS: tl.constexpr = KEY_TILES // 2 if JOINED else KEY_TILES
    CUT: tl.constexpr = FIRST or ENDS

    key_words = tl.arange(0, KEY_WORDS)
    value_words = tl.arange(0, COLUMNS)
    sequence64 = sequence.to(tl.int64)
    key_codes += sequence64 * key_codes_batch + kv_head.to(tl.int64) * key_codes_head
    value_codes += sequence64 * value_codes_batch + kv_head.to(tl.int64) * value_codes_head
    key_parameters += sequence64 * key_parameters_batch + kv_head.to(tl.int64) * key_parameters_head
    value_parameters += sequence64 * value_parameters_batch + kv_head.to(tl.int64) * value_parameters_head
    key_places = channels[:, None] * KEY_WORDS + key_words[None, :]

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = ()
    for _ in tl.static_range(VALUE_CHUNKS * VALUE_TILES):
        sums = sums + (tl.zeros([ROWS, COLUMNS], tl.float32),)

    # Parameters are too narrow to be copied ahead asynchronously, so each block's are read one block before.
    if KEY_FOLD:
        key_scale, key_zero = _key_parameters(
            key_parameters + begin * key_parameters_block, channels, KEY_FLOATING, KEY_ROW_GROUP, KEY_DIM
        )
    loaded = ()
    if VALUE_FOLD:
        loaded = _value_parameters(
            value_parameters + begin * value_parameters_block,
            PARTS,
            JOINED,
            KEY_WORDS,
            VALUE_FLOATING,
            VALUE_ROW_GROUP,
            VALUE_COLUMN_GROUP,
            VALUE_DIM,
            BLOCK_TOKENS,
        )

    for block in range(begin, end):
        following = tl.minimum(block + 1, end - 1)
        if CHANNELS == KEY_DIM:
            words = tl.load(key_codes + block * key_codes_block + key_places)
        else:
            words = tl.load(
                key_codes + block * key_codes_block + key_places, mask=(channels < KEY_DIM)[:, None], other=0
            )

        offset = tl.zeros([ROWS], tl.float32)
        rows_of_block = query
        if KEY_FOLD:
            rows_of_block = _scaled(query, key_scale, EMULATED)
            if not KEY_FLOATING:
                centre = key_zero.to(tl.float32) + (1 << (KEY_BITS - 1)) * key_scale.to(tl.float32)
                offset = tl.sum(query.to(tl.float32) * centre[None, :], axis=1)
            key_scale, key_zero = _key_parameters(
                key_parameters + following * key_parameters_block, channels, KEY_FLOATING, KEY_ROW_GROUP, KEY_DIM
            )

        lead = tl.where(block == 0, first, 0)
        scores = ()
        seen_of_parts = ()
        for part in tl.static_range(PARTS):
            tokens = _tokens(part, JOINED, KEY_WORDS)
            for half in tl.static_range(2 if JOINED else 1):
                tile = _key_tile(
                    rows_of_block,
                    words,
                    offset,
                    key_parameters + block * key_parameters_block,
                    channels,
                    (2 * part if JOINED else part) + half,
                    KEY_BITS,
                    KEY_FLOATING,
                    KEY_FOLD,
                    KEY_ROW_GROUP,
                    KEY_COLUMN_GROUP,
                    KEY_DIM,
                    BLOCK_TOKENS,
                    KEY_WORDS,
                    KEY_ASSEMBLY,
                    EMULATED,
                )
                if half == 0:
                    of_part = tile
                else:
                    of_part = tl.reshape(tl.join(of_part, tile), [ROWS, 2 * KEY_WORDS])
            seen = tokens >= lead
            if CUT:
                if ENDS:
                    seen = seen & (tokens < tl.load(ends + block))
                of_part = tl.where(seen[None, :], of_part, float("-inf"))
            if MASK != 0:
                if ENDS:
                    start = tl.load(starts + block) - lead
                else:
                    start = block * BLOCK_TOKENS - first
                asking = asked[:, None] & (tokens < BLOCK_TOKENS)[None, :]
                if CUT:
                    asking = asking & seen[None, :]
                addend = tl.load(
                    mask
                    + sequence64 * mask_batch
                    + (heads * mask_head + q_tokens * mask_query)[:, None]
                    + (start + tokens)[None, :].to(tl.int64) * mask_token,
                    mask=asking,
                    other=0,
                )
                if MASK == 1:
                    of_part = tl.where(addend != 0, of_part, float("-inf"))
                else:
                    of_part = of_part * scale + addend.to(tl.float32) * 1.4426950408889634
            scores = scores + (of_part,)
            seen_of_parts = seen_of_parts + (seen,)

        # `scale` is positive, so the largest is so before it also, and scaling and subtraction are one instruction.
        factor = 1.0 if MASK == 2 else scale
        peaks = scores[0]
        for part in tl.static_range(1, PARTS):
            peaks = tl.maximum(peaks, scores[part])
        new_largest = tl.maximum(largest, tl.max(peaks, axis=1) * factor)
        # What a row that has seen nothing yet subtracts must be finite, or it would get nan.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay = tl.exp2(largest - base)
        largest = new_largest
        shares = ()
        summed = tl.zeros(scores[0].shape, tl.float32)
        for part in tl.static_range(PARTS):
            share = tl.exp2(scores[part] * factor - base[:, None])
            summed += share
            shares = shares + (share,)
        total = total * decay + tl.sum(summed, axis=1)

        scales = ()
        zeros = ()
        if VALUE_FOLD:
            scales = _of_parts(loaded, 0, PARTS, JOINED, VALUE_GROUPS)
            if not VALUE_FLOATING:
                zeros = _of_parts(loaded, 1, PARTS, JOINED, VALUE_GROUPS)
            if CUT:
                scales = _of_seen(scales, seen_of_parts, PARTS, VALUE_GROUPS)
                if not VALUE_FLOATING:
                    zeros = _of_seen(zeros, seen_of_parts, PARTS, VALUE_GROUPS)
            loaded = _value_parameters(
                value_parameters + following * value_parameters_block,
                PARTS,
                JOINED,
                KEY_WORDS,
                VALUE_FLOATING,
                VALUE_ROW_GROUP,
                VALUE_COLUMN_GROUP,
                VALUE_DIM,
                BLOCK_TOKENS,
            )
        new_sums = ()
        for chunk in tl.static_range(VALUE_CHUNKS):
            words_of_parts = ()
            for part in tl.static_range(PARTS):
                place = value_codes + block * value_codes_block + chunk * VALUE_WORDS
                place += _tokens(part, JOINED, KEY_WORDS)[:, None] * (VALUE_CHUNKS * VALUE_WORDS) + value_words[None, :]
                if COLUMNS == VALUE_WORDS:
                    words_of_parts = words_of_parts + (tl.load(place),)
                else:
                    held = (value_words < VALUE_WORDS)[None, :]
                    words_of_parts = words_of_parts + (tl.load(place, mask=held, other=0),)
            for index in tl.static_range(VALUE_TILES):
                tile = sums[chunk * VALUE_TILES + index] * decay[:, None]
                if VALUE_FOLD and not VALUE_FLOATING:
                    tile += _centres(
                        shares,
                        scales,
                        zeros,
                        ((index // 2) * VALUE_ROW_BYTES + chunk * (2 * VALUE_WORDS)) // VALUE_COLUMN_GROUP,
                        VALUE_GROUPS,
                        PARTS,
                        VALUE_BITS,
                        BOOST,
                    )[:, None]
                for part in tl.static_range(PARTS):
                    tile = _weighted_tile(
                        tile,
                        shares[part],
                        words_of_parts[part],
                        scales,
                        value_parameters + block * value_parameters_block,
                        _tokens(part, JOINED, KEY_WORDS),
                        seen_of_parts[part],
                        index,
                        (index // 2) * VALUE_ROW_BYTES + chunk * (2 * VALUE_WORDS),
                        part * VALUE_GROUPS,
                        VALUE_BITS,
                        VALUE_FLOATING,
                        VALUE_FOLD,
                        CUT,
                        VALUE_ROW_GROUP,
                        VALUE_COLUMN_GROUP,
                        VALUE_DIM,
                        BLOCK_TOKENS,
                        VALUE_WORDS,
                        COLUMNS,
                        DTYPE,
                        BOOST,
                        VALUE_ASSEMBLY,
                        EMULATED,
                    )
                new_sums = new_sums + (tile,)
        sums = new_sums

    row_of_result = (sequence64 * (KV_HEADS * GROUPS) + heads) * Q_TOKENS + q_tokens
    row_of_result = row_of_result * splits + split
    lses = tl.where(total > 0, largest + tl.log2(total), float("-inf"))
    tl.store(partial_lses + row_of_result, lses, mask=asked)
    share_of_sum = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    if VALUE_FOLD and not VALUE_FLOATING:
        share_of_sum = share_of_sum / BOOST
    for chunk in tl.static_range(VALUE_CHUNKS):
        for index in tl.static_range(VALUE_TILES):
            of_words = (
                (index // 2) * VALUE_ROW_BYTES + chunk * (2 * VALUE_WORDS) + 2 * tl.arange(0, COLUMNS) + index % 2
            )
            tl.store(
                partial_outs + row_of_result[:, None] * VALUE_DIM + of_words[None, :],
                sums[chunk * VALUE_TILES + index] * share_of_sum[:, None],
                mask=asked[:, None] & ((of_words < VALUE_DIM) & (tl.arange(0, COLUMNS) < VALUE_WORDS))[None, :],
            )


@_launched
def merge_splits(
    partial_outs,
    partial_lses,
    outs,
    lses,
    splits,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    SOME_SPLITS: tl.constexpr,
):
    """Merge what the splits of one row give."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, ALL_SPLITS)
    of_splits = tl.load(partial_lses + row * splits + every, mask=every < splits, other=float("-inf"))
    largest = tl.max(of_splits, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(of_splits - base), axis=0)
    channels = tl.arange(0, CHANNELS)
    merged = tl.zeros([CHANNELS], tl.float32)
    for begin in range(0, splits, SOME_SPLITS):
        some = begin + tl.arange(0, SOME_SPLITS)
        part = tl.load(partial_lses + row * splits + some, mask=some < splits, other=float("-inf"))
        weights = tl.exp2(part - base)
        values = tl.load(
            partial_outs + (row * splits + some)[:, None] * VALUE_DIM + channels[None, :],
            mask=(some < splits)[:, None] & (channels < VALUE_DIM)[None, :],
            other=0.0,
        )
        merged += tl.sum(values * weights[:, None], axis=0)
    merged = tl.where(total > 0, merged / total, 0.0)
    tl.store(outs + row * VALUE_DIM + channels, merged, mask=channels < VALUE_DIM)
    # Back from units of log2(e).
    lse = tl.where(total > 0, (base + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lses + row, lse)


def _dtypes():
    import torch

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


DTYPES = _dtypes() if triton is not None else {}
"""Triton's names of the dtypes of states."""
