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
from kvlayers.kernels.codes.groups import BlockLayout, rotation_size
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


@functools.cache
def side_spec(layout: BlockLayout, dtype: torch.dtype) -> Constants:
    """How keys, or values, of a layout whose parameters are of a dtype are coded.

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
    code_format, head_dim, column_group = layout.format, layout.head_dim, layout.column_group
    folded, chunks = column_group == layout.block_tokens, 1
    if layout.side == "values":
        folded, chunks = _fold_of_values(head_dim, column_group, layout.row_bytes, code_format.bits)
    unpacking: tuple[str, ...] = ()
    if not is_interpreted():
        unpacking = unpacking_instructions(code_format.bits, code_format.floating, dtype)
    return Constants(
        bits=code_format.bits,
        floating=code_format.floating,
        head_dim=head_dim,
        row_group=layout.row_group,
        column_group=column_group,
        row_groups=layout.rows // layout.row_group,
        column_groups=layout.columns // column_group,
        folded=folded,
        chunks=chunks,
        words=layout.row_bytes // 2 // chunks,
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
