"""Packs blocks on a CPU, by a C++ kernel. `native.py` and `packed_side.py` do the same in torch, for other devices."""

import ctypes
import math
import pathlib
import struct

import torch
from torch import Tensor

from kvlayers.kernels.codes.groups import PLANES, BlockLayout, rotation_size, smallest_positive
from kvlayers.kernels.codes.quantizer_contract import KernelSearch
from kvlayers.utils.native_library import NativeLibrary
from kvlayers.utils.transforms import is_followed, is_memory

LIBRARY = NativeLibrary(pathlib.Path(__file__).with_name("pack.cpp"), "kvlayers_pack", purpose="packing")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the states, in the order of the numbers that `pack.cpp` has for them."""


# The fields are those of `Pack` in `pack.cpp`, in the same order: P is a pointer, q an int64_t, d a double.
_PACK = struct.Struct("@P4q P4q 2P 6q 4q 5q P q d 2q5d q")


def packs(layout: BlockLayout, *sides: Tensor) -> bool:
    """Whether `pack_blocks` takes states `[batch, kv_heads, tokens, head_dim]`; not while it is being compiled.

    Args:
        layout: layout of the blocks.
        sides: the states, and those of the other side.
    """
    return (
        all(is_memory(states) and states.dim() == 4 for states in sides)
        and sides[0].dtype == sides[-1].dtype in DTYPES
        and sides[0].shape[2] % layout.block_tokens == 0
        and layout.format.has_zero
        and layout.row_group == 1
        and layout.columns % layout.column_group == 0
        and not is_followed()
        and LIBRARY.get() is not None
    )


def pack_blocks(
    states: Tensor, partner: Tensor, codes: Tensor, parameters: Tensor, layout: BlockLayout, search: KernelSearch
) -> None:
    """Quantize one side of whole blocks, and write it in their packed layout. Call only if `packs` says yes.

    Arguments and results are those of `cuda_packing.pack_blocks`.
    """
    kernel = LIBRARY.get()
    if kernel is None:
        raise RuntimeError("The kernel is not loaded: call packs() first.")
    states, partner = (side if side.stride(3) == 1 else side.contiguous() for side in (states, partner))
    batch, kv_heads, blocks, _ = codes.shape
    planes = PLANES[layout.format.bits]
    numbers = torch.finfo(states.dtype)
    rotation = rotation_size(layout.head_dim) if layout.format.rotated else 1
    held_planes = (ctypes.c_int64 * len(planes))(*planes)
    call = _PACK.pack(
        *(states.data_ptr(), *states.stride()[:3], states.shape[3]),
        *(partner.data_ptr(), *partner.stride()[:3], partner.shape[3]),
        *(codes.data_ptr(), parameters.data_ptr()),
        *codes.stride()[:3],
        *parameters.stride()[:3],
        *(batch, kv_heads, blocks, layout.block_tokens),
        *(layout.side == "keys", DTYPES.index(states.dtype), layout.column_group, rotation, layout.row_bytes),
        *(ctypes.addressof(held_planes), len(planes)),
        min(numbers.max, search.largest_state) / math.sqrt(rotation),
        *(search.refits, layout.format.bits, search.clip_step, search.largest_stretch),
        *(numbers.max, numbers.eps, smallest_positive(states.dtype)),
        torch.get_num_threads(),
    )
    kernel.kvlayers_pack(call)
