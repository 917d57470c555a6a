"""Packed codes come back as they went in, and the blocks of a side mean what their format says."""

import dataclasses
import threading

import pytest
import torch

from kvlayers.kernels.codes import packed_side
from kvlayers.kernels.codes.quantizer_contract import WIDTHS, CodeFormat, Side
from random_states import packed_states

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


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("code_format", FORMATS, ids=lambda f: f"{'f' * f.floating}{f.bits}-{f.group_tokens}")
def test_a_packed_side_gives_the_states_of_its_groups(code_format: CodeFormat, side: Side) -> None:
    for head_dim, dtype in ((80, torch.float32), (64, torch.bfloat16), (96, torch.float16)):
        packed, states = packed_states(code_format, side, (2, 3, 3 * BLOCK_TOKENS, head_dim), BLOCK_TOKENS, dtype)
        layout, codes, parameters = packed.layout, packed.codes, packed.parameters
        assert (packed.blocks, codes.dtype, parameters.dtype) == (3, torch.uint8, dtype)
        assert codes.shape == (*parameters.shape[:3], layout.rows * layout.row_bytes)
        assert parameters.shape[:3] == (2, 3, 3)
        dequantized = packed.dequantized()
        # One product and one sum in float32.
        torch.testing.assert_close(dequantized, states.float(), rtol=1e-6, atol=1e-6)
        # A side may be a view of larger buffers.
        view = dataclasses.replace(packed, codes=codes[1:, :, 1:], parameters=parameters[1:, :, 1:])
        assert torch.equal(view.dequantized(), dequantized[1:, :, BLOCK_TOKENS:])
        if layout.row_group == 1:
            by_block = torch.unflatten(dequantized.double(), 2, (3, BLOCK_TOKENS))
            rows = by_block.transpose(3, 4) if side == "keys" else by_block
            factors = torch.randn(2, 3, 3, 5, layout.rows)
            # Sums of up to 96 products in float32.
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
    packed, expected = packed_states(code_format, side, (2, 3, 5 * BLOCK_TOKENS, 80), BLOCK_TOKENS, torch.float32)
    monkeypatch.setattr(packed_side, "CPU_STATES_AT_ONCE", at_once)
    for dtype in (torch.float32, torch.bfloat16):
        # A rotation adds up products of as many codes in any order.
        rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(packed.states(dtype), expected.to(dtype), rtol=rtol, atol=1e-4)


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
