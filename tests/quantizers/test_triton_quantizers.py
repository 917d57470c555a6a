"""The kernels that pack and read blocks do what the CPU does. Run by Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

import interpreted_kernels
import versions
from kvlayers.kernels.codes import cuda_packing as launch
from kvlayers.kernels.codes.groups import BlockLayout
from kvlayers.kernels.codes.quantizer_contract import KernelSearch
from kvlayers.quantizers import CodeFormat, NativeQuantizer, QuantizedGroups, Quantizer, SideOptions, backend
from kvlayers.utils import triton_support
from matrix import of_cases
from packing_cases import PACKINGS
from triton_quantizer_cases import CHECKS

with_triton = versions.interprets_kernels
META = torch.device("meta")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the cases gave, in a process in which triton interprets."""
    return interpreted_kernels.results_of("triton_quantizer_cases")


@pytest.mark.slow
@with_triton
@pytest.mark.parametrize("name", of_cases(PACKINGS))
def test_kernels_pack_the_codes_that_the_cpu_packs_and_read_them(interpreted: dict[str, Any], name: str) -> None:
    assert interpreted["packings"][name] is None


@pytest.mark.slow
@with_triton
@pytest.mark.parametrize("name", CHECKS)
def test_what_is_checked_in_the_interpreter(interpreted: dict[str, Any], name: str) -> None:
    assert interpreted["checks"][name] is None


SEARCH = KernelSearch()
NATIVE = CodeFormat(4, 64, 1, rotated=True)


@pytest.mark.parametrize(
    ("layout", "dtype", "packing", "reading"),
    [
        (BlockLayout(NATIVE, "keys", 128, 64), torch.bfloat16, None, None),
        (BlockLayout(NATIVE, "keys", 512, 64), torch.bfloat16, "the head_dim is 512", "the head_dim is 512"),
        (BlockLayout(NATIVE, "keys", 64, 64), torch.float64, "states are of torch.float64", "states are of"),
        (BlockLayout(CodeFormat(1, 64, 1), "keys", 64, 64), torch.float32, "codes of 1 bit", "codes of 1 bit"),
        (BlockLayout(CodeFormat(4, 1, 64), "keys", 64, 64), torch.float32, "across the rows", None),
        (BlockLayout(CodeFormat(4, 48, 1), "keys", 64, 96), torch.float32, "a block has 96 tokens", None),
        (BlockLayout(CodeFormat(4, 512, 1), "keys", 64, 512), torch.float32, "takes 512 columns", None),
        (BlockLayout(CodeFormat(4, 1, 3), "values", 255, 64), torch.float32, "takes 512 columns", None),
    ],
)
def test_what_no_kernel_does_is_said(
    layout: BlockLayout, dtype: torch.dtype, packing: str | None, reading: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_support, "device_facts", lambda device: triton_support.DeviceFacts(None))
    for expected, found in (
        (packing, launch.pack_obstacle(layout, 64, dtype, META, SEARCH)),
        (reading, launch.read_obstacle(layout, dtype, META)),
    ):
        assert (found is None) == (expected is None)
        assert expected is None or expected in str(found)


def obstacles() -> tuple[str | None, str | None]:
    """What hinders the kernels that pack, and that read."""
    layout = BlockLayout(NATIVE, "keys", 120, 64)
    return launch.pack_obstacle(layout, 120, torch.bfloat16, META, SEARCH), launch.read_obstacle(
        layout, torch.bfloat16, META
    )


def test_a_device_without_triton_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "device_facts", lambda device: triton_support.DeviceFacts("it is too old"))
    assert obstacles() == ("it is too old", "it is too old")


def test_a_kernel_that_needs_more_shared_memory_than_there_is_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (launch._pack_obstacle, launch._read_obstacle):
        cached.cache_clear()
    monkeypatch.setattr(triton_support, "device_facts", lambda device: triton_support.DeviceFacts(None, 1, 10_000))
    monkeypatch.setattr(triton_support.TritonKernel, "shared_memory", lambda *arguments: 10_001)
    assert obstacles() == ("the kernel needs 10001 bytes of shared memory, and the GPU has 10000",) * 2
    monkeypatch.setattr(triton_support, "device_facts", lambda device: triton_support.DeviceFacts(None, 1, 10_001))
    assert obstacles() == (None, None)


def test_kernels_search_only_for_quantizers_that_say_how() -> None:
    class Another(NativeQuantizer):
        def quantize(self, states: Tensor) -> QuantizedGroups:
            raise NotImplementedError

    class Renamed(NativeQuantizer):
        pass

    native: Quantizer = backend("native").quantizer(SideOptions("keys", 4), 64)
    assert native.kernel_search is not None
    assert Renamed(NATIVE).kernel_search == native.kernel_search
    # A subclass that finds other codes must not be replaced by the kernels of its parent.
    assert Another(NATIVE).kernel_search is None
