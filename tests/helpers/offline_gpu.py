"""kvlayers' paths for a GPU, driven on meta tensors, and triton compiling for a GPU that is not there."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import DeviceFacts, TritonKernel

META = torch.device("meta")

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that one program can have, by compute capability (CUDA C++ programming guide)."""


@contextlib.contextmanager
def as_gpu(capability: int = 90, device: torch.device = META) -> Iterator[None]:
    """Let kvlayers take a device for a GPU with the multiprocessors of an H200, on which Triton kernels run."""
    device_facts = triton_support.device_facts

    def facts(of: torch.device) -> DeviceFacts:
        return DeviceFacts(None, 132, SHARED_MEMORY[capability]) if of.type == device.type else device_facts(of)

    with mock.patch.object(triton_support, "device_facts", facts):
        yield


@dataclass(frozen=True)
class Launch:
    """A launch that did not happen."""

    kernel: TritonKernel
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]

    @property
    def variant(self) -> tuple[Any, ...]:
        """Launches with the same value are, up to the specialisation of numbers, of the same compiled kernel."""
        kinds = tuple(argument.dtype if isinstance(argument, torch.Tensor) else None for argument in self.arguments)
        return self.kernel.name, kinds, tuple(sorted((name, repr(value)) for name, value in self.constants.items()))


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record the launches of all Triton kernels in place of launching them."""
    launches: list[Launch] = []

    def launch(
        kernel: TritonKernel,
        device: torch.device,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
    ) -> None:
        launches.append(Launch(kernel, grid, tuple(arguments), dict(constants)))

    with (
        mock.patch.object(TritonKernel, "launch", launch),
        mock.patch.object(TritonKernel, "shared_memory", return_value=0),
    ):
        yield launches


class OfflineDriver:
    """What triton asks of a driver if it only compiles, for a compute capability such as 90."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """A number of the device: triton keeps compiled kernels by it."""
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    @staticmethod
    def is_active() -> bool:
        return True


def compiled(launch: Launch, capability: int) -> dict[str, Any]:
    """The bytes that a thread of a kernel spills if it is compiled for a compute capability, and whether it fits there.

    The process can launch nothing afterwards.
    """
    from triton.runtime import driver

    driver.set_active(OfflineDriver(capability))
    kernel = launch.kernel.function.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
    report = _assembled(kernel.asm["ptx"], capability)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    if spilled is None:
        raise RuntimeError(f"ptxas did not report what {launch.kernel.name} needs: {report}")
    fits = kernel.metadata.shared <= SHARED_MEMORY[capability]
    return {"capability": capability, "spilled": int(spilled[1]), "fits": fits}


def _assembled(ptx: str, capability: int) -> str:
    """What ptxas, which comes with triton, reports of a kernel."""
    import triton

    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    newest = tools / "ptxas-blackwell"
    ptxas = newest if capability >= 90 and newest.exists() else tools / "ptxas"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx)
        architecture = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(ptxas), "-v", f"--gpu-name={architecture}", str(source), "-o", str(source.with_suffix(".cubin"))]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"ptxas refused a kernel for {architecture}: {ran.stderr}")
    return ran.stderr + ran.stdout
