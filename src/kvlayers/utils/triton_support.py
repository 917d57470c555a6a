"""Whether Triton's kernels run on a device, and how they are launched there. This module does not import triton."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

logger = logging.getLogger(__name__)

MINIMUM_VERSION = "3.5"
"""Earliest version of triton that has all language features that the kernels use."""

MINIMUM_CAPABILITY = 8
"""Products of bfloat16 came with compute capability 8."""


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of states that the kernels take."""


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, as the sizes of tiles are."""
    return 1 << max(number - 1, 0).bit_length()


def triton_version() -> Version:
    """Version of triton, found without importing it. Nightly builds have a package name of their own."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return Version(importlib.metadata.version(name))
    return Version("0")


def is_interpreted() -> bool:
    """Whether triton interprets kernels instead of compiling them (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True)
class DeviceFacts:
    """What kernels need to know of a device.

    Attributes:
        obstacle: why Triton kernels do not run there, `None` if they do.
        multiprocessors: its multiprocessors.
        shared_memory: bytes of shared memory that one program can have, `None` if there is no limit.
    """

    obstacle: str | None
    multiprocessors: int = 1
    shared_memory: int | None = None


@functools.lru_cache(maxsize=32)
def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of a device, which never change."""
    obstacle = _obstacle(device)
    if device.type != "cuda" or is_interpreted() or not torch.cuda.is_available():
        return DeviceFacts(obstacle)
    properties: Any = torch.cuda.get_device_properties(device)
    # Not every build of torch tells it. What every kernel may have is less.
    limit = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return DeviceFacts(obstacle, properties.multi_processor_count, int(limit))


def _obstacle(device: torch.device) -> str | None:
    if device.type != "cuda" and not is_interpreted():
        return f"there are no Triton kernels for {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if triton_version() < Version(MINIMUM_VERSION):
        return f"triton is {triton_version()}, older than {MINIMUM_VERSION}"
    if is_interpreted():
        return None
    if torch.version.cuda is None:
        return "this build of torch is for another kind of GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] < MINIMUM_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, lower than {MINIMUM_CAPABILITY}.0"
    return None


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device."""
    return device_facts(device).obstacle is None


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a device the current one: triton launches there, whichever device its pointers belong to."""
    # Making a device current takes longer than asking whether it is, which it nearly always is.
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


MOST_KEPT_KERNELS = 256
"""Compiled kernels that are kept for the same constants, before all are forgotten."""


class KeptConstants(dict[str, Any]):
    """Compile-time constants of many launches on one device, which keep the kernels that were compiled for them.

    At each launch, triton looks at every argument and option to find the kernel, which takes longer than launching it.

    Args:
        **constants: the constants, `num_warps` and `num_stages`.

    Attributes:
        kernels: the compiled kernels with the constants that they are called with, by what triton specialises for.
    """

    def __init__(self, **constants: Any) -> None:
        super().__init__(constants)
        self.kernels: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


@dataclass(eq=False)
class TritonKernel:
    """A kernel by the name of its function. Its module, which imports triton, is imported at the first use.

    Every launch of the package goes through `launch`, so that launches can be counted.

    Attributes:
        module: dotted name of the module.
        name: name of the function.
    """

    module: str
    name: str

    @functools.cached_property
    def function(self) -> Any:
        """The function that triton has decorated."""
        return getattr(importlib.import_module(self.module), self.name)

    def launch(
        self, device: torch.device, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]
    ) -> None:
        """Queue the kernel on the current stream of a device.

        Args:
            device: device of the tensors.
            grid: programs in each dimension.
            arguments: tensors and numbers, in the order of the kernel's parameters.
            constants: compile-time constants, `num_warps` and `num_stages`. If they are `KeptConstants`, no tensor is
                within a tuple.
        """
        with launching_on(device):
            if isinstance(constants, KeptConstants) and not is_interpreted():
                self._launch_kept(grid, arguments, constants)
            else:
                self.function[grid](*arguments, **constants)

    @functools.cached_property
    def _growing(self) -> tuple[bool, ...]:
        """For each parameter, whether triton compiles the kernel once for all its values."""
        return tuple(getattr(parameter, "do_not_specialize", True) for parameter in self.function.params)

    def _launch_kept(self, grid: tuple[int, ...], arguments: Sequence[Any], constants: KeptConstants) -> None:
        key: list[Any] = []
        values: list[Any] = []
        for argument, grows in zip(arguments, self._growing, strict=False):
            value = argument
            if isinstance(argument, Tensor):
                value = argument.data_ptr()
                key += argument.dtype, value % 16
            elif not isinstance(argument, float):
                # Of a number that grows, only how many bits it needs.
                key.append(argument >> 31 if grows else argument)
            values.append(value)
        found = constants.kernels.get(tuple(key))
        if found is None:
            compiled = self.function[grid](*arguments, **constants)
            if len(constants.kernels) >= MOST_KEPT_KERNELS:
                constants.kernels.clear()
            names = self.function.arg_names[len(arguments) :]
            constants.kernels[tuple(key)] = compiled, tuple(constants[name] for name in names)
            return
        compiled, compiled_for = found
        compiled[(*grid, 1, 1)[:3]](*values, *compiled_for)

    def shared_memory(
        self, device: torch.device, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]
    ) -> int:
        """Bytes of shared memory of one program. The kernel is compiled if it has not been, and not launched."""
        with launching_on(device):
            return int(self.function.warmup(*arguments, grid=grid, **constants).metadata.shared)

    def obstacle(
        self,
        device: torch.device,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
    ) -> str | None:
        """Why a device cannot run the kernel, `None` if it can. The kernel is compiled, and not launched.

        Arguments are those of `launch`.
        """
        limit = device_facts(device).shared_memory
        if limit is None:
            return None
        try:
            needed = self.shared_memory(device, grid, arguments, constants)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            # The GPU may be newer than triton, or the machine may have no C compiler, which triton's launcher needs.
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            logger.warning("triton cannot compile %s for %s, so another path is taken: %s", self.name, device, reason)
            return f"triton cannot compile the kernel ({reason})"
        if needed <= limit:
            return None
        return f"the kernel needs {needed} bytes of shared memory, and the GPU has {limit}"
