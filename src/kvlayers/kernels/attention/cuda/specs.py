"""Numbers that the Triton kernels are compiled for, in a few objects rather than fifty parameters, and PTX.

See `Constants`: the functions below return the same object for the same numbers.

The PTX converts the codes of 16-bit words to a dtype for tensor cores, two words at a time. It uses no conversion
instructions, for which a multiprocessor has few units. A code becomes the low bits of the mantissa of a power of two at
which the lowest bit counts ones. Subtracting that power, and half the range of a code, leaves exactly
`code - 2**(bits - 1)`. Float8 moves behind a wider exponent, which leaves a constant factor.
"""

import functools
from collections.abc import Iterable

import torch

from kvlayers.kernels.codes.cuda_packing import Constants
from kvlayers.kernels.codes.groups import rotation_size, row_bytes
from kvlayers.kernels.codes.quantizer_contract import CodeFormat, Side
from kvlayers.utils.triton_support import is_interpreted, power_of_two


def unpacking_instructions(bits: int, floating: bool, dtype: torch.dtype) -> tuple[str, ...]:
    """For each tile of packed words, PTX from words `$1` to codes `$0`; empty for dtypes without PTX.

    Tile `i` holds the codes of byte `i % 2` of each word, of slot `i // 2` of that byte.

    Args:
        bits: bits of a code: 2, 4 or 8.
        floating: whether codes are float8 (e4m3fn); the results must then be multiplied by 256.
        dtype: dtype of the results.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return ()
    tiles = range(16 // bits)
    if floating:
        return tuple(_float8(tile, dtype) for tile in tiles)
    if bits == 8 and dtype == torch.bfloat16:
        return tuple(_bytes_to_bfloat16(tile) for tile in tiles)
    return tuple(_integers(tile % 2 * 8 + tile // 2 * bits, bits, dtype) for tile in tiles)


def _both(half: int) -> str:
    """A constant of two equal halves."""
    return f"0x{half * 0x10001:08X}"


def _masked(target: str, source: str, mask: int, exponent: int, table: int = 0xEA) -> str:
    """One instruction for `source & mask | exponent`, or another logic function with another `table`.

    Not every version of the assembler would merge the two operations.
    """
    return f"lop3.b32 {target}, {source}, {_both(mask)}, {_both(exponent)}, 0x{table:02X}"


def _block(registers: str, instructions: Iterable[str]) -> str:
    return "{ .reg .b32 " + registers + "; " + " ".join(f"{instruction};" for instruction in instructions) + " }"


def _integers(shift: int, bits: int, dtype: torch.dtype) -> str:
    exponent = 0x4300 if dtype == torch.bfloat16 else 0x6400
    unpacked = (
        f"shr.u32 code, $1, {shift}",
        _masked("code", "code", 2**bits - 1, exponent),
    )
    half = 2 ** (bits - 1)
    if dtype == torch.float16:
        return _block(
            "code, offset", (*unpacked, f"mov.b32 offset, {_both(exponent + half)}", "sub.f16x2 $0, code, offset")
        )
    # A fused multiply-add, because bfloat16 has a subtraction only from compute capability 9 on.
    constants = f"mov.b32 one, {_both(0x3F80)}", f"mov.b32 offset, {_both(0x8000 + exponent + half)}"
    return _block("code, one, offset", (*unpacked, *constants, "fma.rn.bf16x2 $0, code, one, offset"))


def _bytes_to_bfloat16(tile: int) -> str:
    # The mantissa has room for seven bits. The eighth bit decides whether 128 or 256 must be subtracted from 128 plus
    # the seven bits. These two numbers differ in the exponent bit that is in the eighth bit's place.
    return _block(
        "word, code, offset, minus",
        (
            f"shr.u32 word, $1, {tile * 8}",
            _masked("code", "word", 0x7F, 0x4300),
            # With `~source` instead of `source`.
            _masked("offset", "word", 0x80, 0x4300, table=0xAE),
            f"mov.b32 minus, {_both(0xBF80)}",
            "fma.rn.bf16x2 $0, offset, minus, code",
        ),
    )


def _float8(tile: int, dtype: torch.dtype) -> str:
    # float8 has four exponent bits and three mantissa bits.
    mantissa = 7 if dtype == torch.bfloat16 else 10
    magnitude = 0x7F << (mantissa - 3)
    distance = mantissa - 3 - tile * 8
    moved = f"shl.b32 code, $1, {distance}" if distance >= 0 else f"shr.u32 code, $1, {-distance}"
    signs = (f"shl.b32 sign, $1, {8 - tile * 8}", f"and.b32 sign, sign, {_both(0x8000)}")
    unpacked = (moved, f"and.b32 code, code, {_both(magnitude)}", *signs)
    if dtype == torch.float16:
        return _block("code, sign", (*unpacked, "or.b32 $0, code, sign"))
    # The exponent is now 2**120 too small; this makes up for all but 2**8 of it. The addend is minus zero, because plus
    # zero would turn minus zeros into plus zeros.
    constants = f"mov.b32 factor, {_both(0x7780)}", f"mov.b32 zero, {_both(0x8000)}"
    return _block(
        "code, sign, factor, zero",
        (*unpacked, "or.b32 code, code, sign", *constants, "fma.rn.bf16x2 $0, code, factor, zero"),
    )


MAXIMUM_ROWS = 32
"""Query heads of a group times query tokens that one program takes; more rows are divided among programs.

From 64 rows on, Triton takes instructions of Hopper and later GPUs that read codes from shared memory, where they would
have to be written after each unpacking. Those that Triton 3.6 chooses for 16 columns gave wrong sums on an H200.
"""

NO_MASK, BOOL_MASK, ADDED_MASK = 0, 1, 2

_TENSOR_CORE_ROWS = 16
_MAXIMUM_SUMS = 8
_SPLITS_MERGED_AT_ONCE = 16
_DENSE_BYTES = 8192
"""Bytes of the keys in full precision that a program reads at once: more would not fit into registers."""

_FLOAT16_BOOSTS = {2: 1.0, 4: 4.0, 8: 64.0}
"""Factor of the value scales in float16, for each width of a code: weights times small scales would be subnormal.

A scale is at most the range of float16 divided by the largest code, so it stays finite.
"""


@functools.cache
def side_spec(code_format: CodeFormat, side: Side, head_dim: int, block_tokens: int, dtype: torch.dtype) -> Constants:
    """How keys, or values, whose parameters are of a dtype are coded.

    Returns:
        bits: bits of a code.
        floating: whether codes are float8.
        head_dim: channels of a token.
        row_group: neighbouring rows that share a scale.
        column_group: neighbouring columns that share a scale.
        row_groups: groups in a column of codes.
        column_groups: groups in a row of codes.
        folded: whether scales are multiplied into the queries, or into the weights, rather than into the codes.
        chunks: parts that rows are read in, so that all columns of a tile share a scale.
        words: words of two bytes in a row, or in a chunk of it.
        tiles: codes of a word: 16 / bits.
        rotation: binary logarithm of the channels that a Hadamard matrix mixes; 0 if states are not rotated.
        assembly: for each tile, PTX that unpacks it; empty to unpack without.
    """
    rows, columns = (head_dim, block_tokens) if side == "keys" else (block_tokens, head_dim)
    of_tokens, of_channels = code_format.group_tokens, code_format.group_channels
    row_group, column_group = (of_channels, of_tokens) if side == "keys" else (of_tokens, of_channels)
    size = row_bytes(columns, code_format.bits)
    folded, chunks = column_group == block_tokens, 1
    if side == "values":
        folded, chunks = _fold_of_values(head_dim, column_group, size, code_format.bits)
    unpacking: tuple[str, ...] = ()
    if not is_interpreted():
        unpacking = unpacking_instructions(code_format.bits, code_format.floating, dtype)
    return Constants(
        bits=code_format.bits,
        floating=code_format.floating,
        head_dim=head_dim,
        row_group=row_group,
        column_group=column_group,
        row_groups=rows // row_group,
        column_groups=columns // column_group,
        folded=folded,
        chunks=chunks,
        words=size // 2 // chunks,
        tiles=16 // code_format.bits,
        rotation=rotation_size(head_dim).bit_length() - 1 if code_format.rotated else 0,
        assembly=unpacking,
    )


@functools.cache
def dense_side_spec(head_dim: int) -> Constants:
    """As `side_spec`, of keys, or values, in full precision: each state is a word of its own."""
    return Constants(
        bits=16,
        floating=False,
        head_dim=head_dim,
        row_group=1,
        column_group=1,
        row_groups=0,
        column_groups=0,
        folded=False,
        chunks=1,
        words=head_dim,
        tiles=1,
        rotation=0,
        assembly=(),
    )


def _fold_of_values(head_dim: int, group: int, size: int, bits: int) -> tuple[bool, int]:
    """Whether value scales can be multiplied into the weights, and the number of parts that rows are read in for that.

    They can if all channels of a tile of codes share a scale: the channels of one slot of a row, or of a part of it.
    A padded row has tiles without a scale.
    """
    if size * 8 != head_dim * bits:
        return False, 1
    if group % size == 0:
        return True, 1
    chunks = size // group
    if size % group == 0 and group % 2 == 0 and chunks * 16 // bits <= _MAXIMUM_SUMS:
        return True, chunks
    return False, 1


@functools.cache
def split_spec(
    keys: Constants,
    values: Constants,
    block_tokens: int,
    dtype: torch.dtype,
    kv_heads: int,
    groups: int,
    rows: int,
    mask: int,
    first: bool,
    ends: bool,
    shared: bool,
    indexed: bool,
    packed: bool,
    gathered: bool,
    factors: bool,
    means: bool,
) -> Constants:
    """What `attend_split` is compiled for, with `rows` rows of queries of a dtype.

    Returns:
        keys: how keys are coded.
        values: how values are coded.
        block_tokens: tokens of a packed block, or the most of a gathered piece in full precision.
        kv_heads: heads that have keys and values.
        groups: query heads of each kv head.
        rows: rows of queries that a program takes.
        key_channels: head_dim of the keys, padded to a power of two.
        value_channels: head_dim of the values, padded to a power of two.
        columns: words of values, padded to a power of two.
        joined: whether two tiles of scores are one part, because one has too few columns for the next product.
        parts: parts of the scores of a block.
        mask: `NO_MASK`, `BOOL_MASK` or `ADDED_MASK`.
        first: whether tokens at the front of the first block have been evicted.
        ends: whether there are blocks that are not full, or pieces that have other lengths.
        shared: whether several sequences side by side read each sequence of the segments.
        indexed: whether a tensor has the sequence of the segments that each sequence reads.
        packed: whether the segment that is read in blocks is packed, and not in full precision.
        gathered: whether tables have the blocks that each kv head reads.
        factors: whether packed keys were divided by factors of their channels, which queries are multiplied by.
        means: whether packed keys lack a mean, whose products with queries are added to the scores.
        boost: factor of the value scales.
        divisor: factor of the sums that is to be undone.
        unfold: factor of the scores of packed keys.
        dense_tokens: tokens in full precision that are read at once.
        emulated: whether triton interprets the kernel.
    """
    boost = _FLOAT16_BOOSTS[values.bits] if packed and dtype == torch.float16 else 1.0
    joined = packed and keys.words < 16
    widest = power_of_two(max(keys.head_dim, values.head_dim))
    return Constants(
        keys=keys,
        values=values,
        block_tokens=block_tokens,
        kv_heads=kv_heads,
        groups=groups,
        rows=rows,
        key_channels=max(16, power_of_two(keys.head_dim)),
        value_channels=max(16, power_of_two(values.head_dim)),
        columns=max(8, power_of_two(values.words)),
        joined=joined,
        parts=keys.tiles // 2 if joined else keys.tiles,
        mask=mask,
        first=first,
        ends=ends or gathered,
        shared=shared,
        indexed=indexed,
        packed=packed,
        gathered=gathered,
        factors=factors,
        means=means,
        boost=boost,
        divisor=boost if values.folded and not values.floating else 1.0,
        # Codes of float8 are 256 times the numbers that the kernel unpacks, which it makes up for with the scales.
        unfold=256.0 if keys.floating and keys.folded else 1.0,
        dense_tokens=min(64, max(16, _DENSE_BYTES // (widest * dtype.itemsize))),
        emulated=is_interpreted(),
    )


@functools.cache
def merge_spec(heads: int, values: Constants, gaps: bool) -> Constants:
    """What `merge_splits` is compiled for, with values that are coded so.

    Returns:
        heads: query heads.
        head_dim: channels of a value.
        channels: the same, padded to a power of two.
        rotation: binary logarithm of the channels that a Hadamard matrix has mixed in packed values, or 0.
        at_once: splits that are read at once.
        gaps: whether there may be splits without tokens, which have stored no sums.
    """
    return Constants(
        heads=heads,
        head_dim=values.head_dim,
        channels=power_of_two(values.head_dim),
        rotation=values.rotation,
        at_once=_SPLITS_MERGED_AT_ONCE,
        gaps=gaps,
    )


def rows_of_program(rows: int) -> int:
    """Rows that a program takes of `rows` rows of queries."""
    return min(MAXIMUM_ROWS, max(_TENSOR_CORE_ROWS, power_of_two(rows)))


def warps_of_program(spec: Constants, dtype: torch.dtype) -> int:
    """Warps of a program: one for each 16 rows, and at least four for more than 128 channels or for float32.

    For more than 64 channels they are twice as many, which then need no register that is not there, or fewer of them.
    """
    head_dim: int = max(spec.keys.head_dim, spec.values.head_dim)
    tiles: int = spec.rows // _TENSOR_CORE_ROWS
    if head_dim > 128 or dtype == torch.float32:
        return max(tiles, 4)
    # Two warps would both compute the products of 8 columns that 2 bits give.
    return 2 * tiles if head_dim > 64 and not spec.joined else tiles
