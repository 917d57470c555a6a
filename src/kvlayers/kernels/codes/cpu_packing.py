"""Packs blocks on a CPU, by a C++ kernel. `native.py` and `packed_side.py` do the same in torch, for other devices."""

import ctypes
import math
import pathlib
import struct

import torch
from torch import Tensor

from kvlayers.kernels.codes.groups import BlockLayout, rotation_size, smallest_positive
from kvlayers.kernels.codes.quantizer_contract import KernelSearch
from kvlayers.utils.native_library import NativeLibrary
from kvlayers.utils.transforms import is_followed, is_memory

LIBRARY = NativeLibrary(
    pathlib.Path(__file__).with_name("pack.cpp"), "kvlayers_pack", "kvlayers_describe_keys", purpose="packing"
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the states, in the order of the numbers that `pack.cpp` has for them."""


def loaded(library: NativeLibrary) -> ctypes.CDLL:
    """A library of which the caller knows that it is there."""
    kernel = library.get()
    if kernel is None:
        raise RuntimeError("The kernel is not loaded: ask for it first.")
    return kernel


def takes(layout: BlockLayout) -> bool:
    """Whether `pack_blocks` packs blocks of a layout."""
    return (
        layout.format.has_zero
        and layout.row_group == 1
        and layout.columns % layout.column_group == 0
        and LIBRARY.get() is not None
    )


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
        and not is_followed()
        and takes(layout)
    )


def pack_blocks(
    states: Tensor,
    partner: Tensor,
    codes: Tensor,
    parameters: Tensor,
    layout: BlockLayout,
    search: KernelSearch,
    factor: Tensor | None = None,
) -> None:
    """Quantize one side of whole blocks, and write it in their packed layout. Call only if `packs` says yes.

    Arguments and results are those of `cuda_packing.pack_blocks`, but for `factor`: that of a `KeySmoothing` which has
    no mean.
    """
    states, partner = (side if side.stride(3) == 1 else side.contiguous() for side in (states, partner))
    batch, kv_heads, blocks, _ = codes.shape
    numbers = torch.finfo(states.dtype)
    rotation = rotation_size(layout.head_dim) if layout.format.rotated else 1
    factors = None if factor is None else factor.float().expand(batch, kv_heads, 1, layout.head_dim).contiguous()
    # The fields are those of `Pack` in `pack.cpp`, in the same order: P is a pointer, q an int64_t, d a double.
    loaded(LIBRARY).kvlayers_pack(
        struct.pack(
            "@P4q P4q 3P 6q 4q 5q d 2q5d q",
            *(states.data_ptr(), *states.stride()[:3], states.shape[3]),
            *(partner.data_ptr(), *partner.stride()[:3], partner.shape[3]),
            *(0 if factors is None else factors.data_ptr(), codes.data_ptr(), parameters.data_ptr()),
            *codes.stride()[:3],
            *parameters.stride()[:3],
            *(batch, kv_heads, blocks, layout.block_tokens),
            *(layout.side == "keys", DTYPES.index(states.dtype), layout.column_group, rotation, layout.row_bytes),
            min(numbers.max, search.largest_state) / math.sqrt(rotation),
            *(search.refits, layout.format.bits, search.clip_step, search.largest_stretch),
            *(numbers.max, numbers.eps, smallest_positive(states.dtype)),
            torch.get_num_threads(),
        )
    )


def describe_keys(
    keys: Tensor, pieces: int, largest_exact: float, largest_variation: float
) -> tuple[Tensor, ...] | None:
    """The statistics of `smoothing` for blocks of keys; `None` if no kernel finds them here.

    Args:
        keys: `[batch, kv_heads, blocks, tokens, head_dim]`.
        pieces: parts of a block.
        largest_exact: how many times the largest key of most pieces those of a token that counts may be.
        largest_variation: the largest variance of the squared radius of channels that turn.
    """
    if not is_memory(keys) or keys.dtype not in DTYPES or keys.stride(4) != 1 or is_followed() or LIBRARY.get() is None:
        return None
    *grid, block_tokens, head_dim = keys.shape
    batch, head, block, token, _ = keys.stride()
    unit, vectors = (keys.new_empty(shape, dtype=torch.float32) for shape in ((*grid, 1), (3, *grid, head_dim)))
    # The fields are those of `KeyStatistics` in `key_statistics.h`.
    loaded(LIBRARY).kvlayers_describe_keys(
        struct.pack(
            "@P5q 2P 6q 2d q",
            *(keys.data_ptr(), batch, head, token, head_dim, block),
            *(unit.data_ptr(), vectors.data_ptr()),
            *(*grid, block_tokens, pieces, DTYPES.index(keys.dtype)),
            *(largest_exact, largest_variation),
            torch.get_num_threads(),
        )
    )
    return unit, *vectors
