"""The kernel for packed states gives the attention of the states that they stand for. Run by Triton's interpreter."""

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import fresh_process
import interpreted_kernels
import versions
from kvlayers.kernels.attention.cuda import kernel
from kvlayers.kernels.attention.cuda.specs import unpacking_instructions
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.kernels.codes.groups import BlockLayout
from kvlayers.kernels.codes.packed_side import PackedSide
from kvlayers.kernels.codes.quantizer_contract import CodeFormat, Side
from matrix import of_cases
from offline_gpu import OfflineDriver, as_gpu, recorded_launches
from triton_decode_cases import CASES, CHECKS
from triton_gathered_cases import CASES as GATHERED
from triton_gathered_cases import FEW_SPLITS

with_triton = versions.interprets_kernels

LAUNCHES = {
    # More than two segments in full precision besides.
    "dense, four segments around": 3,
    # Tokens that sequences share are read once for all of them.
    "dense, shared tail": 3,
    "dense, unevenly shared tail": 3,
    # Sequences read states of others, and the tail is their own.
    "dense, sequences read others": 3,
    "4 bits, sequences read others": 3,
    # Two segments in blocks.
    "dense, two gathered segments": 3,
    "4 bits, packed tail": 3,
    "rotated, packed tail": 3,
    "rotated, gathered states in full precision": 3,
}
"""Launches of the cases that take more than one, and that of the merge."""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the cases gave, in a process in which triton interprets."""
    return interpreted_kernels.results_of("triton_gathered_cases")


@pytest.mark.slow
@with_triton
@pytest.mark.parametrize("name", [*of_cases(CASES), "several blocks a split"])
def test_attention_is_that_of_the_states_that_codes_stand_for(interpreted: dict[str, Any], name: str) -> None:
    assert interpreted["cases"][name] is None


@pytest.mark.slow
@with_triton
@pytest.mark.parametrize("name", [*of_cases(GATHERED), *(f"{name}, few splits" for name in FEW_SPLITS)])
def test_pieces_of_gathered_segments_are_read_in_the_launch_of_those_around(
    interpreted: dict[str, Any], name: str
) -> None:
    assert interpreted["gathered"][name] == LAUNCHES.get(name, 2)


@pytest.mark.slow
@with_triton
@pytest.mark.parametrize("name", CHECKS)
def test_what_is_checked_in_the_interpreter(interpreted: dict[str, Any], name: str) -> None:
    assert interpreted["checks"][name] is None


def test_kernels_are_not_imported_before_they_are_called() -> None:
    # They import triton, which decides then and there whether it interprets.
    imports = "import sys, kvlayers.kernels.attention.cuda.kernel, kvlayers.kernels.codes.cuda_packing"
    found = "[name for name in sys.modules if name.endswith(('.triton_kernels', '.triton_blocks'))]"
    ran = fresh_process.run(f"{imports}; sys.exit({found} or 0)")
    assert ran.returncode == 0, ran.stderr


@with_triton
def test_drafts_and_histories_of_all_lengths_share_a_few_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver

    keys, values = CodeFormat(4, 64, 1, rotated=True), CodeFormat(4, 1, 64, rotated=True)
    with as_gpu(90), recorded_launches() as launches:
        for blocks, residual, queries in itertools.product((1, 17, 2000), (1, 64, 129), range(1, 21)):
            segments = empty_segments(keys, values, blocks, before=4, after=residual)
            query = torch.empty(1, queries, 8, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
            mask = torch.empty(1, 1, queries, segments.tokens, dtype=torch.bool, device="meta")
            for given in (None, mask.expand(1, 8, -1, -1)):
                assert isinstance(kernel.attend(query, segments, given, 0.1, never), torch.Tensor)
    monkeypatch.setattr(driver, "_active", OfflineDriver(90))
    compiled: dict[str, set[str]] = {}
    functions = {launch.kernel.name: launch.kernel.function for launch in launches}
    binders = {name: function.create_binder()[4] for name, function in functions.items()}
    for launch in launches:
        # What triton looks compiled kernels up by: types, alignments, and constants.
        _, specialisation, options = binders[launch.kernel.name](*launch.arguments, **launch.constants)
        compiled.setdefault(launch.kernel.name, set()).add(f"{specialisation} {options}")
    # 16 or 32 rows of queries, with and without a mask.
    assert {name: len(variants) for name, variants in compiled.items()} == {"attend_split": 4, "merge_splits": 1}


@pytest.mark.slow
@with_triton
@pytest.mark.parametrize(("bits", "queries"), [pytest.param(2, 1, marks=pytest.mark.nightly), (4, 16)])
def test_operands_of_products_have_each_number_once(monkeypatch: pytest.MonkeyPatch, bits: int, queries: int) -> None:
    """On Hopper, where the interpreter tells nothing of layouts: four threads share a row of numbers to multiply."""
    from triton.runtime import driver

    keys, values = CodeFormat(bits, 64, 1, rotated=True), CodeFormat(bits, 1, 64, rotated=True)
    segments = empty_segments(keys, values, 5, before=4, after=9)
    query = torch.empty(1, queries, 8, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    mask = torch.empty(1, 1, queries, segments.tokens, dtype=torch.bool, device="meta")
    with as_gpu(90), recorded_launches() as launches:
        assert isinstance(kernel.attend(query, segments, mask, 0.1, never), torch.Tensor)
    monkeypatch.setattr(driver, "_active", OfflineDriver(90))
    (launch,) = (launch for launch in launches if launch.kernel.name == "attend_split")
    layout = launch.kernel.function.warmup(*launch.arguments, grid=launch.grid, **launch.constants).asm["ttgir"]
    assert "warp_group_dot" not in layout
    operands = set(re.findall(r"tensor<(\d+)x(\d+)x\w+, #ttg.dot_op<{opIdx = (\d), [^{}]*kWidth = (\d+)", layout))
    assert len(operands) > 4
    for rows, columns, is_second, of_a_thread in operands:
        assert int(rows if int(is_second) else columns) >= 4 * int(of_a_thread)


def never() -> torch.Tensor:
    raise AssertionError("nothing is compared with torch on the meta device")


def empty_segments(
    key_format: CodeFormat, value_format: CodeFormat, blocks: int, before: int, after: int
) -> KVSegments:
    """Segments of two kv heads with 128 channels, without memory."""

    def side(code_format: CodeFormat, name: Side) -> PackedSide:
        layout = BlockLayout(code_format, name, 128, 64)
        # As a store holds them, with room for more blocks.
        codes = torch.empty(1, 2, blocks + 1, layout.code_bytes, dtype=torch.uint8, device="meta")[:, :, :blocks]
        parameters = torch.empty(1, 2, blocks + 1, layout.parameters, dtype=torch.bfloat16, device="meta")[
            :, :, :blocks
        ]
        return PackedSide(codes, parameters, layout)

    def dense(tokens: int) -> tuple[DenseSegment]:
        states = torch.empty(1, 2, tokens + 7, 128, dtype=torch.bfloat16, device="meta")[:, :, :tokens]
        return (DenseSegment(states, states),)

    packed = PackedSegment(side(key_format, "keys"), side(value_format, "values"))
    return KVSegments((*dense(before), packed, *dense(after)))


def executed(ptx: str, word: int, dtype: torch.dtype) -> list[float]:
    """Both halves of `$0` after a block of PTX, by what its instructions are defined to do."""
    registers = {"$1": word}

    def number(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    def halves(operand: str) -> Tensor:
        value = number(operand)
        signed = [half - 0x10000 if half & 0x8000 else half for half in (value & 0xFFFF, value >> 16)]
        # The products and sums are exact in float64, and rounded once to the dtype: what fma does.
        return torch.tensor(signed, dtype=torch.int16).view(dtype).double()

    def joined(numbers: Tensor) -> int:
        low, high = (half & 0xFFFF for half in numbers.to(dtype).view(torch.int16).tolist())
        return low | high << 16

    def looked_up(a: str, b: str, c: str, table: str) -> int:
        bits = [(number(a) >> bit & 1, number(b) >> bit & 1, number(c) >> bit & 1) for bit in range(32)]
        return sum((number(table) >> (4 * x + 2 * y + z) & 1) << bit for bit, (x, y, z) in enumerate(bits))

    for line in ptx.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, operands = line.split(maxsplit=1)
        target, *sources = (operand.strip() for operand in operands.split(","))
        registers[target] = {
            "mov.b32": lambda a: number(a),
            "lop3.b32": looked_up,
            "and.b32": lambda a, b: number(a) & number(b),
            "or.b32": lambda a, b: number(a) | number(b),
            "shl.b32": lambda a, b: number(a) << number(b) & 0xFFFFFFFF,
            "shr.u32": lambda a, b: number(a) >> number(b),
            "sub.f16x2": lambda a, b: joined(halves(a) - halves(b)),
            "fma.rn.bf16x2": lambda a, b, c: joined(halves(a) * halves(b) + halves(c)),
        }[name](*sources)  # type: ignore[operator]
    return [float(half) for half in halves("$0")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "floating"), [(2, False), (4, False), (8, False), (8, True)])
def test_instructions_unpack_codes(bits: int, floating: bool, dtype: torch.dtype) -> None:
    # The interpreter cannot run inline assembly.
    blocks = unpacking_instructions(bits, floating, dtype)
    assert len(blocks) == 16 // bits
    float8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for code in range(256):
        # Another byte in each place, so that none can stand in for another; no nan, whose bits are 0x7F.
        places = [(code + shift) % 256 for shift in (0, 93, 31, 178)]
        if floating and any(place & 0x7F == 0x7F for place in places):
            continue
        word = int.from_bytes(places, "little")
        for tile, block in enumerate(blocks):
            slot, byte = divmod(tile, 2)
            codes = [places[half * 2 + byte] >> slot * bits & 2**bits - 1 for half in (0, 1)]
            expected = [float(float8[one]) / 256 if floating else one - 2 ** (bits - 1) for one in codes]
            assert executed(block, word, dtype) == expected


def test_float32_has_no_instructions() -> None:
    assert unpacking_instructions(4, False, torch.float32) == ()
