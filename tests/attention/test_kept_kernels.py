"""A compiled kernel is called again for arguments that triton would compile to the same kernel, and for no others."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import KeptConstants, TritonKernel

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
    kernel = TritonKernel("no.module", "name")
    kernel.function = function
    kept, other = KeptConstants(SPEC="spec", num_warps=4), KeptConstants(SPEC="other", num_warps=4)
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
    kernel = TritonKernel("no.module", "name")
    kernel.function = function
    constants = KeptConstants(SPEC="spec")
    for stride in range(10):
        kernel.launch(DEVICE, (3,), (torch.zeros(64), (stride,), 5, 7, 0.5), constants)
        assert len(constants.kernels) <= 4
