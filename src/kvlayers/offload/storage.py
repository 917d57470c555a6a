"""The memory in which offloaded states are held between updates, and the options that choose it."""

import functools
import logging
import math
import os
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.errors import CapacityError, OptionError, UnsupportedLayerError
from kvlayers.upstream import compat
from kvlayers.utils.units import exact_bytes

logger = logging.getLogger(__name__)

TIERS = ("cpu", "disk")


class HomeMemory(ABC):
    """Allocates the tensors that hold offloaded states. All of them are CPU tensors.

    Attributes:
        holds_host_states: whether states that are computed on the host are held in this memory too, or stay where they
            are.
    """

    holds_host_states = False

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new contiguous tensor, unfilled.

        Raises:
            CapacityError: there is not enough of this memory.
        """

    def allocated_nbytes(self, nbytes: int) -> int:
        """Bytes of this memory that a tensor of `nbytes` bytes takes, spare room included."""
        return nbytes

    def extended(self, tensor: Tensor, length: int) -> Tensor | None:
        """A tensor from `empty` with another length, in the same memory, `None` if the memory has no room for it.

        Args:
            tensor: the tensor.
            length: the new size of the first dimension.
        """
        return None

    def check_process(self) -> None:
        """Raise `UnsupportedLayerError` if the tensors are memory of another process too, which forked this one."""


class HostMemory(HomeMemory):
    """Pinned memory of the host, which devices can copy asynchronously; pageable memory if none can be pinned.

    torch's allocator of pinned memory rounds up to powers of two. All of what it rounds up to is requested, so that
    `nbytes` says what is pinned, and a buffer grows within this memory: it is locked and moved only if it doubles.

    Memory that is registered by its exact size (`cudaHostRegister`) would be less, but each growth by an eighth would
    lock all pages of all layers again, and freeing it would have to wait for the device. torch's allocator keeps what
    it has locked for the next buffer, and waits by itself for copies that are under way.
    """

    @override
    def allocated_nbytes(self, nbytes: int) -> int:
        return compat.pinned_nbytes(nbytes) if torch.accelerator.is_available() else nbytes

    @override
    def extended(self, tensor: Tensor, length: int) -> Tensor | None:
        row_bytes = tensor.stride(0) * tensor.itemsize
        if not tensor.is_contiguous() or length * row_bytes > tensor.untyped_storage().nbytes():
            return None
        with torch.inference_mode(False):
            return tensor.as_strided((length, *tensor.shape[1:]), tensor.stride())

    @override
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            if torch.accelerator.is_available():
                try:
                    elements = math.prod(shape)
                    room = self.allocated_nbytes(elements * dtype.itemsize) // dtype.itemsize
                    return _pinned(room, dtype)[:elements].view(shape)
                except (RuntimeError, NotImplementedError) as error:
                    _warn_of_unpinned(str(error))
            try:
                return torch.empty(shape, dtype=dtype, device="cpu")
            except RuntimeError as error:
                raise _no_memory(shape, dtype, "of the host", str(error)) from error


class DiskMemory(HomeMemory):
    """Memory-mapped files, for states beyond the host's memory.

    On POSIX a file is unlinked as soon as it is mapped, so that it disappears with its tensor, however the process
    ends. On other systems it is removed with its tensor. Its space is allocated when it is made, so that a full disk is
    an error then, and not a crash later.

    A forked process writes to the same files, unlike to other memory, so only the process that has made them uses them.

    Args:
        directory: directory for the files; it must exist.

    Raises:
        OptionError: no file can be made there.
    """

    holds_host_states = True
    _process: int | None = None
    """The process that has made files."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            self.directory = Path(directory).expanduser()
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except (OSError, TypeError, RuntimeError) as error:
            raise OptionError(
                f"`offload_directory` must be a directory in which files can be made, got {directory!s} ({error}): "
                "make it, or pass another directory."
            ) from error

    @override
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        elements = math.prod(shape)
        if not elements:
            return torch.empty(shape, dtype=dtype, device="cpu")
        try:
            handle, name = tempfile.mkstemp(prefix="kvlayers-", suffix=".states", dir=self.directory)
        except OSError as error:
            raise _no_memory(shape, dtype, f"on disk in {self.directory}", str(error)) from error
        try:
            with os.fdopen(handle, "r+b") as file:
                _allocate_space(file.fileno(), elements * dtype.itemsize)
            with torch.inference_mode(False):
                mapped = torch.from_file(name, shared=True, size=elements, dtype=dtype)
            self._process = os.getpid()
        except (OSError, RuntimeError) as error:
            Path(name).unlink()
            raise _no_memory(shape, dtype, f"on disk in {self.directory}", str(error)) from error
        if sys.platform == "win32":
            weakref.finalize(mapped.untyped_storage(), Path(name).unlink, missing_ok=True)
        else:
            Path(name).unlink()
        return mapped.view(shape)

    @override
    def check_process(self) -> None:
        if self._process not in (None, os.getpid()):
            raise UnsupportedLayerError(
                f"States in files of {self.directory} must be used by the process {self._process} that made them, got "
                f"the process {os.getpid()}, which was forked from it and would change them in both: make a cache in "
                "this process, or let the other one send it as an argument of a spawned process."
            )

    def __getstate__(self) -> dict[str, object]:
        # A copy in another process makes files of its own.
        return {"directory": self.directory}


def _pinned(elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=True)


def _allocate_space(file: int, nbytes: int) -> None:
    if sys.platform == "linux":
        # A file that is only made longer allocates blocks when they are written, which is too late for an error.
        os.posix_fallocate(file, 0, nbytes)
        return
    zeros = bytes(1 << 20)
    for begin in range(0, nbytes, len(zeros)):
        os.write(file, zeros[: nbytes - begin])


def _no_memory(shape: tuple[int, ...], dtype: torch.dtype, where: str, reason: str) -> CapacityError:
    nbytes = math.prod(shape) * dtype.itemsize
    return CapacityError(
        f"Offloaded states need {exact_bytes(nbytes)} {where}, which cannot be allocated ({reason}): make room, or "
        "hold fewer tokens."
    )


@functools.cache
def _warn_of_unpinned(reason: str) -> None:
    logger.warning("no pinned memory for offloaded states (%s): copies wait for one another instead.", reason)
