"""PTX that converts the codes of 16-bit words to a dtype for tensor cores, two words at a time.

It uses no conversion instructions, for which a multiprocessor has few units. A code becomes the low bits of the
mantissa of a power of two at which the lowest bit counts ones. Subtracting that power, and half the range of a code,
leaves exactly `code - 2**(bits - 1)`. Float8 moves behind a wider exponent, which leaves a constant factor.
"""

from collections.abc import Iterable

import torch


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
