"""The kernel for packed states gives the attention of the states that they stand for. Run by Triton's interpreter."""

import itertools
import re
from types import SimpleNamespace
from typing import Any, ClassVar

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
from kvlayers.utils import triton_support
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
    assert unpacking_instructions(bits, floating, torch.float32) == ()
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


MERGES = """
import torch
from kvlayers.kernels.attention import fused
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for batch, kv_heads, group, queries, width in ((1, 1, 1, 1, 16), (3, 5, 2, 1, 80), (2, 1, 3, 7, 24)):
        # One part with queries before heads in memory, as kernels return it; scores of hidden tokens among others.
        first = (
            torch.randn(batch, queries, kv_heads, group, width).to(dtype).movedim(1, 3),
            torch.randn(batch, queries, kv_heads, group).movedim(1, 3).clone(),
        )
        shape = batch, kv_heads, group, queries
        others = [(torch.randn(*shape, width).to(dtype), torch.randn(shape) * 9) for _ in range(4)]
        first[1][0, 0, 0, 0] = -1e30
        for number in range(1, 5):
            parts = [first, *others[:number]]
            shares = torch.stack([one for _, one in parts]).softmax(0)
            wanted = (torch.stack([out.float() for out, _ in parts]) * shares[..., None]).sum(0)
            seen, _ = fused.merged(parts, dtype, wants_logsumexp=False)
            assert seen.shape == wanted.shape and seen.dtype == dtype, (seen.shape, seen.dtype)
            # Computed in float32, and rounded once.
            torch.testing.assert_close(seen.float(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
            if number == 1:
                assert torch.equal(seen[0, 0, 0, 0], others[0][0][0, 0, 0, 0])
            seen, logsumexp = fused.merged(parts, torch.float32, wants_logsumexp=True)
            assert seen.dtype == logsumexp.dtype == torch.float32
            torch.testing.assert_close(seen, wanted)
            torch.testing.assert_close(logsumexp, torch.stack([one for _, one in parts]).logsumexp(0))
"""


@pytest.mark.slow
@with_triton
def test_parts_are_merged_as_by_plain_torch() -> None:
    interpreted_kernels.run(MERGES)


# A compiled kernel is called again for arguments that triton would compile to the same kernel, and for no others

DEVICE = torch.device("cpu")


class Function:
    """A function that triton has decorated: of a tensor, strides, a number that grows, one that does not, a factor."""

    params: ClassVar = [
        SimpleNamespace(do_not_specialize=name == "tokens") for name in ("x", "strides", "tokens", "size", "f")
    ]
    arg_names: ClassVar = ["x", "strides", "tokens", "size", "factor", "SPEC"]

    def __init__(self) -> None:
        self.searches = 0
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> dict[Any, Any]:
            self.searches += 1
            return Compiled(self.calls)

        return launch


class Compiled:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.calls.append((grid, *arguments))


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Function:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return Function()


def test_kernels_are_searched_for_once_for_each_specialisation(function: Function) -> None:
    kernel = triton_support.TritonKernel("no.module", "name")
    kernel.function = function
    kept, other = (
        triton_support.KeptConstants(SPEC="spec", num_warps=4),
        triton_support.KeptConstants(SPEC="other", num_warps=4),
    )
    x = torch.zeros(64)
    for constants, arguments, searches in (
        (kept, (x, (1, 16), 5, 7, 0.5), 1),
        (kept, (x.clone(), (1, 16), 16, 7, 0.25), 0),
        (kept, (x[1:], (1, 16), 5, 7, 0.5), 1),
        (kept, (x.half(), (1, 16), 5, 7, 0.5), 1),
        (kept, (x, (2, 16), 5, 7, 0.5), 1),
        (kept, (x, (1, 16), 1 << 31, 7, 0.5), 1),
        (kept, (x, (1, 16), 5, 8, 0.5), 1),
        (kept, (x, (1, 16), 9, 7, 0.5), 0),
        # Other constants have kernels of their own.
        (other, (x, (1, 16), 9, 7, 0.5), 1),
        (kept, (x, (1, 16), 1, 7, 0.25), 0),
    ):
        before = function.searches
        kernel.launch(DEVICE, (3,), arguments, constants)
        assert function.searches - before == searches, arguments[1:]
    # The address in place of the tensor, a grid of three numbers, and the constant that is a parameter.
    assert function.calls[-1] == ((3, 1, 1), x.data_ptr(), (1, 16), 1, 7, 0.25, "spec")


def test_few_kernels_are_kept(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "MOST_KEPT_KERNELS", 4)
    kernel = triton_support.TritonKernel("no.module", "name")
    kernel.function = function
    constants = triton_support.KeptConstants(SPEC="spec")
    for stride in range(10):
        kernel.launch(DEVICE, (3,), (torch.zeros(64), (stride,), 5, 7, 0.5), constants)
        assert len(constants.kernels) <= 4
