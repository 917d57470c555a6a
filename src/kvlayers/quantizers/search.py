"""The search for the grid of each group, compiled for CPUs. `native.py` does the same in torch, for other devices."""

import ctypes
import pathlib
from collections.abc import Sequence

import torch
from torch import Tensor

from kvlayers.quantizers.grouping import smallest_positive
from kvlayers.utils.native_library import NativeLibrary

LIBRARY = NativeLibrary(pathlib.Path(__file__).with_name("search.cpp"), "kvlayers_search")
DTYPES = (torch.float32, torch.bfloat16)


class _SearchLibrary(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("states", "codes", "scale", "zero", "clips")),
        *((name, ctypes.c_int64) for name in ("groups", "size", "bits", "clip_count", "refits")),
        *((name, ctypes.c_int64) for name in ("is_bfloat16", "threads")),
        *((name, ctypes.c_double) for name in ("largest_stretch", "largest_number", "epsilon", "smallest_scale")),
    ]


def library() -> ctypes.CDLL | None:
    """The compiled search; `None` while it is compiled, and if that has failed."""
    return LIBRARY.get()


def supports(states: Tensor) -> bool:
    """Whether the compiled search is available and takes these states."""
    return states.device.type == "cpu" and states.dtype in DTYPES and library() is not None


def search(
    rows: Tensor, bits: int, dtype: torch.dtype, clips: Sequence[float], refits: int, largest_stretch: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and grids of groups.

    Args:
        rows: float32 `[groups, states of a group]`.
        bits: width of a code.
        dtype: dtype that scale and zero are stored in, one of `DTYPES`.
        clips: fractions of the range that are tried as the part to cut off at either end.
        refits: how often the best range is fitted to its own codes.
        largest_stretch: the most by which the scale is stretched in the end, as a fraction of it.

    Returns:
        Codes, uint8 `[groups, states of a group]`, scales and zeros `[groups, 1]` in the dtype.
    """
    kernel = library()
    if kernel is None:
        raise RuntimeError("The search is not loaded: call supports() first.")
    rows = rows.float().contiguous()
    groups, size = rows.shape
    codes = torch.empty((groups, size), dtype=torch.uint8, device="cpu")
    scale, zero = torch.empty((2, groups, 1), dtype=torch.float32, device="cpu").unbind()
    given = (ctypes.c_float * len(clips))(*clips)
    numbers = torch.finfo(dtype)
    call = _SearchLibrary(
        states=rows.data_ptr(),
        codes=codes.data_ptr(),
        scale=scale.data_ptr(),
        zero=zero.data_ptr(),
        clips=ctypes.addressof(given),
        groups=groups,
        size=size,
        bits=bits,
        clip_count=len(clips),
        refits=refits,
        is_bfloat16=dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
        largest_stretch=largest_stretch,
        largest_number=numbers.max,
        epsilon=numbers.eps,
        smallest_scale=smallest_positive(dtype),
    )
    kernel.kvlayers_search(ctypes.byref(call))
    return codes, scale.to(dtype), zero.to(dtype)
