"""Packed codes come back as they went in, and the blocks of a side mean what their format says."""

import dataclasses

import pytest
import torch
from torch import Tensor

from kvlayers.kernels.codes import packed_side
from kvlayers.kernels.codes.groups import BlockLayout, pack, padded_columns, rotate, row_bytes, unpack
from kvlayers.kernels.codes.packed_side import PackedSide, pack_side
from kvlayers.kernels.codes.quantizer_contract import WIDTHS, CodeFormat, QuantizedGroups, Side

BLOCK_TOKENS = 64

FORMATS = [
    *(
        CodeFormat(bits, tokens, channels)
        for bits in WIDTHS
        for tokens, channels in ((64, 1), (16, 1), (1, 16), (1, 1))
    ),
    CodeFormat(8, 1, 16, floating=True),
    CodeFormat(8, 64, 1, floating=True),
    CodeFormat(2, 1, 16, levels=(0.5, -1.0, 3.0, 0.0)),
]


@pytest.mark.parametrize("columns", [1, 3, 7, 8, 9, 16, 63, 64, 80, 100, 128])
@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_come_back(bits: int, columns: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, columns), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, row_bytes(columns, bits))
    assert torch.equal(unpack(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_byte_holds_columns_that_are_a_row_of_bytes_apart(bits: int) -> None:
    columns = 80
    codes = torch.randint(0, 2**bits, (columns,), dtype=torch.uint8)
    packed = pack(codes, bits).tolist()
    stride = row_bytes(columns, bits)
    for column, code in enumerate(codes.tolist()):
        assert packed[column % stride] >> (column // stride * bits) & (2**bits - 1) == code


@pytest.mark.parametrize("bits", WIDTHS)
def test_rows_hold_their_bits_and_less_than_eight_columns_of_padding(bits: int) -> None:
    for columns in range(1, 130):
        assert columns <= padded_columns(columns, bits) < columns + 8
        assert row_bytes(columns, bits) * 8 == padded_columns(columns, bits) * bits


def quantized(code_format: CodeFormat, tokens: int, head_dim: int, dtype: torch.dtype) -> QuantizedGroups:
    """Random groups of two sequences and three kv_heads."""
    shape = (2, 3, tokens, head_dim)
    if code_format.floating:
        codes = torch.randn(shape).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = torch.randint(0, 2**code_format.bits, shape, dtype=torch.uint8)
    grid = (2, 3, tokens // code_format.group_tokens, head_dim // code_format.group_channels)
    zero = torch.randn(grid).to(dtype) if code_format.has_zero else None
    return QuantizedGroups(codes, torch.rand(grid).to(dtype), zero)


def states_of(groups: QuantizedGroups, code_format: CodeFormat) -> Tensor:
    """What the groups stand for, by the definition of a format: every number repeated over its group."""

    def spread(numbers: Tensor) -> Tensor:
        over_tokens = numbers.float().repeat_interleave(code_format.group_tokens, 2)
        return over_tokens.repeat_interleave(code_format.group_channels, 3)

    codes = groups.codes.view(torch.float8_e4m3fn) if code_format.floating else groups.codes
    numbers = torch.tensor(code_format.levels)[codes.long()] if code_format.levels else codes.float()
    states = numbers * spread(groups.scale)
    return states if groups.zero is None else states + spread(groups.zero)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("code_format", FORMATS, ids=lambda f: f"{'f' * f.floating}{f.bits}-{f.group_tokens}")
def test_a_packed_side_gives_the_states_of_its_groups(code_format: CodeFormat, side: Side) -> None:
    for head_dim, dtype in ((80, torch.float32), (64, torch.bfloat16), (96, torch.float16)):
        groups = quantized(code_format, 3 * BLOCK_TOKENS, head_dim, dtype)
        layout = BlockLayout(code_format, side, head_dim, BLOCK_TOKENS)
        codes, parameters = pack_side(groups, layout)
        packed = PackedSide(codes, parameters, layout)
        assert codes.dtype == torch.uint8
        assert parameters.dtype == dtype
        assert packed.blocks == 3
        assert codes.shape == (2, 3, 3, packed.layout.rows * packed.layout.row_bytes)
        assert parameters.shape[:3] == (2, 3, 3)
        dequantized = packed.dequantized()
        assert dequantized.dtype == torch.float32
        # Bit for bit: both are one product and one sum in float32.
        assert torch.equal(dequantized, states_of(groups, code_format))
        # A side may be a view of larger buffers.
        view = dataclasses.replace(packed, codes=codes[1:, :, 1:], parameters=parameters[1:, :, 1:])
        assert torch.equal(view.dequantized(), dequantized[1:, :, BLOCK_TOKENS:])
        if packed.layout.row_group == 1:
            by_block = torch.unflatten(dequantized.double(), 2, (3, BLOCK_TOKENS))
            rows = by_block.transpose(3, 4) if side == "keys" else by_block
            factors = torch.randn(2, 3, 3, 5, packed.layout.rows)
            # Sums of up to 96 products, of codes up to 255, in float32.
            torch.testing.assert_close(packed.products(factors).double(), factors.double() @ rows, rtol=1e-4, atol=1e-2)
        block_bytes = codes.shape[3] + parameters.shape[3] * parameters.element_size()
        assert layout.code_bytes + layout.parameters * dtype.itemsize == block_bytes


@pytest.mark.parametrize("at_once", [1, 2 * 2 * 3 * BLOCK_TOKENS * 80, 1 << 30])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_blocks_are_unpacked_a_few_at_a_time(
    side: Side, rotated: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code_format = CodeFormat(4, *((64, 1) if side == "keys" else (1, 16)), rotated=rotated)
    groups = quantized(code_format, 5 * BLOCK_TOKENS, 80, torch.float32)
    layout = BlockLayout(code_format, side, 80, BLOCK_TOKENS)
    codes, parameters = pack_side(groups, layout)
    packed = PackedSide(codes, parameters, layout)
    monkeypatch.setattr(packed_side, "CPU_STATES_AT_ONCE", at_once)
    expected = states_of(groups, code_format)
    for dtype in (torch.float32, torch.bfloat16):
        states = packed.states(dtype)
        assert states.dtype == dtype
        whole = (rotate(expected) if rotated else expected).to(dtype)
        # A rotation adds up products of as many codes in any order.
        torch.testing.assert_close(states, whole, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_rows_and_columns_follow_the_side() -> None:
    code_format = CodeFormat(4, 16, 1)
    empty = torch.empty(1, 1, 0, 0, dtype=torch.uint8)
    keys = PackedSide(empty, empty, BlockLayout(code_format, "keys", 80, BLOCK_TOKENS))
    values = dataclasses.replace(keys, layout=dataclasses.replace(keys.layout, side="values"))
    assert (
        keys.layout.rows,
        keys.layout.columns,
        keys.layout.row_group,
        keys.layout.column_group,
        keys.layout.row_bytes,
    ) == (80, 64, 1, 16, 32)
    assert (
        values.layout.rows,
        values.layout.columns,
        values.layout.row_group,
        values.layout.column_group,
        values.layout.row_bytes,
    ) == (64, 80, 16, 1, 40)
