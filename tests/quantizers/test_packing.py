"""Packed codes come back as they went in, and the blocks of a side mean what their format says."""

import dataclasses
import threading

import pytest
import torch
from torch import Tensor

from kvlayers.kernels.codes import packed_side
from kvlayers.kernels.codes.groups import BlockLayout, rotate
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
        codes, parameters = packed_side.pack_side(groups, layout)
        packed = packed_side.PackedSide(codes, parameters, layout)
        assert (packed.blocks, codes.dtype, parameters.dtype) == (3, torch.uint8, dtype)
        assert codes.shape == (*parameters.shape[:3], packed.layout.rows * packed.layout.row_bytes)
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
    codes, parameters = packed_side.pack_side(groups, layout)
    packed = packed_side.PackedSide(codes, parameters, layout)
    monkeypatch.setattr(packed_side, "CPU_STATES_AT_ONCE", at_once)
    expected = states_of(groups, code_format)
    for dtype in (torch.float32, torch.bfloat16):
        states = packed.states(dtype)
        assert states.dtype == dtype
        whole = (rotate(expected) if rotated else expected).to(dtype)
        # A rotation adds up products of as many codes in any order.
        torch.testing.assert_close(states, whole, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


# Memory that a thread uses again


def test_a_thread_gets_its_own_memory_again() -> None:
    first = packed_side.scratch(3, 5)
    assert packed_side.scratch(2, 4).data_ptr() == first.data_ptr()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(packed_side.scratch(3, 5).data_ptr()))
    thread.start()
    thread.join()
    assert found != [first.data_ptr()]


def test_memory_from_inference_mode_can_be_written_to_outside_of_it() -> None:
    with torch.inference_mode():
        made = packed_side.scratch(packed_side.MOST_KEPT)
    made.fill_(1.0)
    assert packed_side.scratch(2).fill_(0.0).data_ptr() == made.data_ptr()


def test_memory_is_of_float32_on_the_cpu_whatever_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_side._memory, "numbers", None)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            made = [packed_side.scratch(4), packed_side.scratch(packed_side.MOST_KEPT + 1)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(each.dtype, each.device.type) for each in made} == {(torch.float32, "cpu")}


def test_little_memory_is_kept() -> None:
    large = packed_side.scratch(packed_side.MOST_KEPT + 1)
    assert packed_side.scratch(2).untyped_storage().nbytes() <= 4 * packed_side.MOST_KEPT
    assert packed_side.scratch(2).data_ptr() != large.data_ptr()
