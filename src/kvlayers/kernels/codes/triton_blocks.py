"""The Triton kernels that smooth and pack blocks of states, and read them back. Only a launch imports this module.

A program of `pack_block` takes some rows of a block: whole rows, because codes are packed along them. Its tile has one
row of the block in each row, and the groups of a row side by side, each padded to a power of two.
"""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# ruff: noqa: N803, N806, SIM300
# Compile-time constants are in capitals, as in triton itself; and its language lacks some of Python.

from __future__ import annotations

from kvlayers.kernels.codes.triton_language import jit, tl
from kvlayers.kernels.codes.triton_search import affine_codes, float8_codes, rounded_to


@jit
def hadamard(one, other, C: tl.constexpr):
    """Entries of a Hadamard matrix, repeated along the diagonal: `ENTRY`, its negative, and 0 outside of it."""
    common = (one & other) & (C.ROTATION - 1)
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    entries = tl.where((common & 1) == 0, C.ENTRY, -C.ENTRY)
    return tl.where(one // C.ROTATION == other // C.ROTATION, entries, 0.0)


@jit
def product(a, b, sums, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """A product in float32, added to `sums`. A factor that is exact in a dtype is multiplied in it."""
    if EMULATED:
        # The interpreter cannot multiply bfloat16.
        sums = tl.dot(a, b, sums, input_precision="ieee")
    elif DTYPE == tl.float32:
        # Three products of tf32 are as exact as float32, to a few roundings.
        sums = tl.dot(a, b, sums, input_precision="tf32x3")
    else:
        sums = tl.dot(a.to(DTYPE), b.to(DTYPE), sums)
    return sums


@jit
def finite_tokens(states, token_places, channel_stride, DIM: tl.constexpr, CHUNK: tl.constexpr):
    """Which tokens have only finite states, 1 or 0."""
    finite = tl.full(token_places.shape, 1, tl.int32)
    for start in range(0, DIM, CHUNK):
        channels = start + tl.arange(0, CHUNK)
        part = tl.load(
            states + token_places[:, None] + (channels * channel_stride)[None, :],
            mask=(channels < DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        finite = tl.minimum(finite, tl.min((tl.abs(part) < float("inf")).to(tl.int32), axis=1))
    return finite


@jit
def clamped(states, finite, LIMIT: tl.constexpr):
    """States in float32, zeros for tokens that are not finite, and far from overflow."""
    states = tl.where(finite, states.to(tl.float32), 0.0)
    return tl.minimum(tl.maximum(states, -LIMIT), LIMIT)


@jit
def smoothed(states, factors, means, channels, C: tl.constexpr, DTYPE: tl.constexpr):
    """Keys `[channels, tokens]` as `KeySmoothing.applied` gives them, in float32; unchanged without vectors."""
    if C.FACTORS or C.MEANS:
        held = channels < C.HEAD_DIM
        states = states.to(tl.float32)
        if C.MEANS:
            states -= tl.load(means + channels, mask=held, other=0.0).to(tl.float32)[:, None]
        if C.FACTORS:
            factor = tl.load(factors + channels, mask=held, other=1.0).to(tl.float32)[:, None]
            states = tl.div_rn(states, tl.broadcast_to(factor, states.shape))
        states = rounded_to(tl.minimum(tl.maximum(states, -C.LARGEST_NUMBER), C.LARGEST_NUMBER), DTYPE)
    return states


@jit
def pack_block(
    states,
    partner,
    codes,
    parameters,
    factors,
    means,
    states_batch,
    states_head,
    states_token,
    states_channel,
    partner_batch,
    partner_head,
    partner_token,
    partner_channel,
    codes_batch,
    codes_head,
    codes_block,
    parameters_batch,
    parameters_head,
    parameters_block,
    C: tl.constexpr,
):
    """Quantize some rows of a block of one head, and write their codes and parameters.

    `partner` has the states of the other side: a token is finite only if both its key and its value are. `factors` and
    `means` of keys are contiguous, `[batch, heads, channels]`.
    """
    block = (tl.program_id(0) // C.PIECES).to(tl.int64)
    first_row = tl.program_id(0) % C.PIECES * C.ROWS
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    DTYPE: tl.constexpr = parameters.dtype.element_ty

    first_token = block * C.BLOCK_TOKENS
    states += sequence * states_batch + head * states_head + first_token * states_token
    partner += sequence * partner_batch + head * partner_head + first_token * partner_token
    vectors = (sequence * tl.num_programs(1) + head) * C.HEAD_DIM
    factors += vectors
    means += vectors

    rows = first_row + tl.arange(0, C.ROWS)
    row_is_real = rows < C.ALL_ROWS
    places = tl.arange(0, C.COLUMNS)
    columns = places // C.PADDED_GROUP * C.GROUP + places % C.PADDED_GROUP
    column_is_real = (places % C.PADDED_GROUP < C.GROUP) & (columns < C.ALL_COLUMNS)

    if C.KEYS:
        tokens = columns
        channels = rows
    else:
        tokens = rows
        channels = columns
    finite = tl.minimum(
        finite_tokens(states, tokens * states_token, states_channel, C.HEAD_DIM, C.CHUNK),
        finite_tokens(partner, tokens * partner_token, partner_channel, C.PARTNER_DIM, C.CHUNK),
    )

    if C.ROTATION > 1:
        tile = tl.full([C.ROWS, C.COLUMNS], 0.0, tl.float32)
        for start in range(0, C.HEAD_DIM, C.CHUNK):
            inner = start + tl.arange(0, C.CHUNK)
            is_real = inner < C.HEAD_DIM
            if C.KEYS:
                part = tl.load(
                    states + (inner * states_channel)[:, None] + (tokens * states_token)[None, :],
                    mask=is_real[:, None],
                    other=0.0,
                )
                part = smoothed(part, factors, means, inner, C, DTYPE)
                part = clamped(part, (finite > 0)[None, :], C.LIMIT)
                tile = product(hadamard(channels[:, None], inner[None, :], C), part, tile, DTYPE, C.EMULATED)
            else:
                part = tl.load(
                    states + (tokens * states_token)[:, None] + (inner * states_channel)[None, :],
                    mask=is_real[None, :],
                    other=0.0,
                )
                part = clamped(part, (finite > 0)[:, None], C.LIMIT)
                tile = product(part, hadamard(inner[:, None], channels[None, :], C), tile, DTYPE, C.EMULATED)
        tile *= C.NORM
    elif C.KEYS:
        tile = tl.load(
            states + (channels * states_channel)[:, None] + (tokens * states_token)[None, :],
            mask=row_is_real[:, None],
            other=0.0,
        )
        tile = smoothed(tile, factors, means, channels, C, DTYPE)
        tile = clamped(tile, (finite > 0)[None, :], C.LIMIT)
    else:
        tile = tl.load(
            states + (tokens * states_token)[:, None] + (channels * states_channel)[None, :],
            mask=column_is_real[None, :],
            other=0.0,
        )
        tile = clamped(tile, (finite > 0)[:, None], C.LIMIT)

    GROUPS: tl.constexpr = C.COLUMNS // C.PADDED_GROUP
    groups = tl.reshape(tile, [C.ROWS * GROUPS, C.PADDED_GROUP])
    weights = (tl.arange(0, C.PADDED_GROUP) < C.GROUP).to(tl.float32)[None, :]
    if C.FLOATING:
        found, scale = float8_codes(groups, weights, C, DTYPE)
        zero = scale
    else:
        found, scale, zero = affine_codes(groups, weights, C, DTYPE)
    found = tl.reshape(found.to(tl.int32), [C.ROWS, C.COLUMNS])

    parameters += sequence * parameters_batch + head * parameters_head + block * parameters_block
    group_rows = first_row + tl.arange(0, C.ROWS * GROUPS) // GROUPS
    of_row = tl.arange(0, C.ROWS * GROUPS) % GROUPS
    if not C.KEYS:
        # Attention to a token whose states cannot be coded gives NaN, through its values.
        marked = tl.reshape(tl.broadcast_to(finite[:, None], [C.ROWS, GROUPS]), [C.ROWS * GROUPS])
        scale = tl.where(marked > 0, scale, float("nan"))
        zero = tl.where(marked > 0, zero, float("nan"))
    group_is_real = (group_rows < C.ALL_ROWS) & (of_row < C.ROW_GROUPS)
    place = group_rows * C.ROW_GROUPS + of_row
    tl.store(parameters + place, scale.to(DTYPE), mask=group_is_real)
    if not C.FLOATING:
        tl.store(parameters + C.ALL_ROWS * C.ROW_GROUPS + place, zero.to(DTYPE), mask=group_is_real)

    codes += sequence * codes_batch + head * codes_head + block * codes_block
    row_places = rows.to(tl.int64) * C.ROW_BYTES
    if C.BITS == 8:
        tl.store(
            codes + row_places[:, None] + columns[None, :],
            found.to(tl.uint8),
            mask=row_is_real[:, None] & column_is_real[None, :],
        )
    else:
        for plane in tl.static_range(len(C.PLANES)):
            of_plane = codes + C.PADDED_COLUMNS * C.BELOW[plane] // 8
            store_plane(of_plane, row_places, row_is_real, found, C.BELOW[plane], C.PLANES[plane], C)


@jit
def store_plane(codes, row_places, row_is_real, found, SHIFT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Write some bits of all codes, packed as `groups` says: byte `j` of `n` has columns `j`, `j + n`, ..."""
    SLOTS: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = C.PADDED_COLUMNS // SLOTS
    if C.NATURAL:
        bits = tl.reshape((found >> SHIFT) & ((1 << WIDTH) - 1), [C.ROWS, SLOTS, BYTES])
        packed = tl.sum(bits << (tl.arange(0, SLOTS) * WIDTH)[None, :, None], axis=1)
        places = tl.arange(0, BYTES)
    else:
        places = tl.arange(0, C.COLUMNS // SLOTS)
        packed = tl.full([C.ROWS, C.COLUMNS // SLOTS], 0, tl.int32)
        for slot in tl.static_range(SLOTS):
            columns = places + slot * BYTES
            source = tl.minimum(columns // C.GROUP * C.PADDED_GROUP + columns % C.GROUP, C.COLUMNS - 1)
            of_slot = tl.gather(found, tl.broadcast_to(source[None, :], packed.shape), 1)
            of_slot = tl.where((columns < C.ALL_COLUMNS)[None, :], of_slot, 0)
            packed |= ((of_slot >> SHIFT) & ((1 << WIDTH) - 1)) << (slot * WIDTH)
    tl.store(
        codes + row_places[:, None] + places[None, :],
        packed.to(tl.uint8),
        mask=row_is_real[:, None] & (places < BYTES)[None, :],
    )


@jit
def float8_numbers(codes):
    """The float32 numbers that bytes of float8 (e4m3fn) stand for."""
    magnitude = codes & 0x7F
    normal = ((magnitude << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    numbers = tl.where(magnitude < 8, magnitude.to(tl.float32) * (1.0 / 512.0), normal)
    numbers = tl.where(magnitude == 0x7F, float("nan"), numbers)
    return tl.where(codes >= 0x80, -numbers, numbers)


@jit
def load_plane(plane_codes, columns, is_real, WIDTH: tl.constexpr, C: tl.constexpr):
    """Some bits of the codes of columns, from a plane of rows of packed bytes."""
    BYTES: tl.constexpr = C.PADDED_COLUMNS * WIDTH // 8
    bytes_ = tl.load(plane_codes + columns % BYTES, mask=is_real, other=0).to(tl.int32)
    return (bytes_ >> (columns // BYTES * WIDTH)) & ((1 << WIDTH) - 1)


@jit
def load_states(codes, parameters, tokens, channels, is_real, C: tl.constexpr):
    """States of a block in float32, still rotated if they were packed so, for tokens and channels that broadcast."""
    if C.KEYS:
        rows, columns = channels, tokens
    else:
        rows, columns = tokens, channels
    row_codes = codes + rows * C.ROW_BYTES
    if C.BITS == 8:
        found = tl.load(row_codes + columns, mask=is_real, other=0).to(tl.int32)
    else:
        found = load_plane(row_codes, columns, is_real, C.PLANES[0], C)
        for plane in tl.static_range(1, len(C.PLANES)):
            start = C.PADDED_COLUMNS * C.BELOW[plane] // 8
            found |= load_plane(row_codes + start, columns, is_real, C.PLANES[plane], C) << C.BELOW[plane]
    place = rows // C.ROW_GROUP * (C.ALL_COLUMNS // C.GROUP) + columns // C.GROUP
    scale = tl.load(parameters + place, mask=is_real, other=0.0).to(tl.float32)
    if C.FLOATING:
        numbers = float8_numbers(found) * scale
    else:
        zeros = parameters + (C.ALL_ROWS // C.ROW_GROUP) * (C.ALL_COLUMNS // C.GROUP)
        zero = tl.load(zeros + place, mask=is_real, other=0.0).to(tl.float32)
        numbers = found.to(tl.float32) * scale + zero
    return numbers


@jit
def read_block(
    codes,
    parameters,
    states,
    codes_batch,
    codes_head,
    codes_block,
    parameters_batch,
    parameters_head,
    parameters_block,
    tokens_in_all,
    C: tl.constexpr,
):
    """Write the states of some tokens of a block, rotated back, to contiguous `states`."""
    block = (tl.program_id(0) // C.PIECES).to(tl.int64)
    first_token = tl.program_id(0) % C.PIECES * C.TOKENS
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    codes += sequence * codes_batch + head * codes_head + block * codes_block
    parameters += sequence * parameters_batch + head * parameters_head + block * parameters_block

    tokens = first_token + tl.arange(0, C.TOKENS)
    token_is_real = (tokens < C.BLOCK_TOKENS)[:, None]
    first = (sequence * tl.num_programs(1) + head) * tokens_in_all + block * C.BLOCK_TOKENS
    states += (first + tokens)[:, None] * C.HEAD_DIM
    DTYPE: tl.constexpr = states.dtype.element_ty

    if C.ROTATION > 1:
        channels = tl.arange(0, C.CHANNELS)[None, :]
        sums = tl.full([C.TOKENS, C.CHANNELS], 0.0, tl.float32)
        for start in range(0, C.HEAD_DIM, C.CHUNK):
            inner = start + tl.arange(0, C.CHUNK)
            is_real = token_is_real & (inner < C.HEAD_DIM)[None, :]
            part = load_states(codes, parameters, tokens[:, None], inner[None, :], is_real, C)
            sums = product(part, hadamard(inner[:, None], channels, C), sums, tl.float32, C.EMULATED)
        store_states(states, channels, sums * C.NORM, token_is_real, DTYPE, C)
    else:
        for start in range(0, C.HEAD_DIM, C.CHUNK):
            channels = (start + tl.arange(0, C.CHUNK))[None, :]
            is_real = token_is_real & (channels < C.HEAD_DIM)
            part = load_states(codes, parameters, tokens[:, None], channels, is_real, C)
            store_states(states, channels, part, token_is_real, DTYPE, C)


@jit
def store_states(states, channels, numbers, token_is_real, DTYPE: tl.constexpr, C: tl.constexpr):
    """Write float32 states in their dtype."""
    numbers = rounded_to(numbers, DTYPE).to(DTYPE)
    tl.store(states + channels, numbers, mask=token_is_real & (channels < C.HEAD_DIM))
