"""The kernels that pack blocks and read them: which blocks they take, their compile-time constants, and their launches.

It does not import triton.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvlayers.kernels.codes.groups import (
    PLANES,
    BlockLayout,
    largest_float8_scale,
    padded_columns,
    rotation_size,
    smallest_positive,
)
from kvlayers.kernels.codes.quantizer_contract import CLIPS, KernelSearch
from kvlayers.kernels.codes.smoothing import UNSMOOTHED, KeySmoothing
from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import DTYPES, DeviceFacts, TritonKernel, is_interpreted, power_of_two

WIDTHS = (2, 3, 4, 5, 6, 8)
"""Bits of a code that the kernels pack and read."""

LARGEST_HEAD_DIM = 256
"""Channels of a key or value that one program holds at most."""

LARGEST_COLUMNS = 256
"""Columns of a tile, including padding, with which its rows still fit a program."""

SMALLEST_SIDE = 16
"""The smallest side of a tile that tensor cores multiply."""

TILE = 4096
"""States that one program quantizes, 32 in each thread of four warps: with more, registers spill."""

CHUNK = 32
"""Channels that are multiplied at once: operands of more, in three parts each for float32, spill as well."""

READ_TOKENS = 32
"""Tokens that one program reads at most: with 64, newer GPUs choose other instructions, whose operands spill."""

# Fused multiply-add is not the default of every version of triton.
_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}

PACK = TritonKernel("kvlayers.kernels.codes.triton_blocks", "pack_block")
READ = TritonKernel("kvlayers.kernels.codes.triton_blocks", "read_block")


class Constants:
    """Numbers that a kernel is compiled for, by their names.

    Triton keeps compiled kernels on disk under the text of their constants, so the text has all of them. They are
    compared by identity, because triton compares them at every launch: what makes them returns the same object for the
    same arguments.
    """

    def __init__(self, **numbers: Any) -> None:
        vars(self).update(numbers)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"Constants({vars(self)})"


def _shared(layout: BlockLayout, pieces: int) -> dict[str, Any]:
    """Constants of both kernels. Those that are not explained here have the meaning of attributes of `BlockLayout`.

    - `PLANES`: bits of a code in each plane of a row, from its lowest bits on. `BELOW`: those in the planes before it.
    - `GROUP`: states that share a scale, neighbouring columns.
    - `ROTATION`: channels that are mixed with each other, 1 if none are.
    - `ENTRY`: size of the entries of the matrix that rotates, a power of two: products are exact, and sums do not
      overflow. `NORM`: what products with that matrix are multiplied by.
    - `CHUNK`: channels that are multiplied at once.
    - `PIECES`: programs for one block of a head.
    """
    rotation = rotation_size(layout.head_dim) if layout.format.rotated else 1
    entry = 2.0 ** -(rotation.bit_length() // 2)
    planes = PLANES[layout.format.bits]
    return {
        "KEYS": layout.side == "keys",
        "BITS": layout.format.bits,
        "PLANES": planes,
        "BELOW": tuple(sum(planes[:plane]) for plane in range(len(planes))),
        "FLOATING": layout.format.floating,
        "HEAD_DIM": layout.head_dim,
        "BLOCK_TOKENS": layout.block_tokens,
        "ALL_ROWS": layout.rows,
        "ALL_COLUMNS": layout.columns,
        "PADDED_COLUMNS": padded_columns(layout.columns, layout.format.bits),
        "ROW_BYTES": layout.row_bytes,
        "GROUP": layout.column_group,
        "ROTATION": rotation,
        "ENTRY": entry,
        "NORM": 1 / math.sqrt(rotation) / entry,
        "CHUNK": min(CHUNK, max(SMALLEST_SIDE, power_of_two(layout.head_dim))),
        "PIECES": pieces,
        "EMULATED": is_interpreted(),
    }


def _tile(layout: BlockLayout) -> tuple[int, int, int]:
    """Rows and columns of a tile of `pack_block`, and the columns of each of its groups."""
    group = power_of_two(layout.column_group)
    groups = power_of_two(layout.columns // layout.column_group)
    columns = max(group * groups, SMALLEST_SIDE)
    rows = min(max(TILE // columns, SMALLEST_SIDE), max(power_of_two(layout.rows), SMALLEST_SIDE))
    return rows, columns, group


@functools.cache
def pack_constants(
    layout: BlockLayout,
    partner_dim: int,
    dtype: torch.dtype,
    search: KernelSearch,
    factors: bool = False,
    means: bool = False,
) -> Mapping[str, Any]:
    """Constants of `pack_block`. `COLUMNS` of a tile are the groups of a row, each padded to a power of two.

    `NATURAL` says whether they are those of the block.

    Args:
        layout: layout of the blocks.
        partner_dim: head_dim of the other side.
        dtype: dtype of the states.
        search: how codes are searched for.
        factors: whether the channels of the states are divided by factors first; see `KeySmoothing`.
        means: whether means are subtracted from them before that.
    """
    rows, columns, group = _tile(layout)
    shared = _shared(layout, -(-layout.rows // rows))
    numbers = torch.finfo(dtype)
    constants = Constants(
        **shared,
        PARTNER_DIM=partner_dim,
        ROWS=rows,
        COLUMNS=columns,
        PADDED_GROUP=group,
        ROW_GROUPS=layout.columns // layout.column_group,
        PADDED=group != layout.column_group,
        NATURAL=group == layout.column_group and columns == shared["PADDED_COLUMNS"],
        FACTORS=factors,
        MEANS=means,
        LIMIT=_in_dtype(min(numbers.max, search.largest_state) / math.sqrt(shared["ROTATION"]), dtype, math.floor),
        TOP=float(2**layout.format.bits - 1),
        CLIP_STEP=search.clip_step,
        CLIPS=CLIPS,
        REFITS=search.refits,
        LARGEST_STRETCH=search.largest_stretch,
        LARGEST_NUMBER=numbers.max,
        EPSILON=numbers.eps,
        SMALLEST_SCALE=smallest_positive(dtype),
        LARGEST_SCALE=_in_dtype(largest_float8_scale(dtype), dtype),
    )
    return {"C": constants, **_OPTIONS}


@functools.cache
def read_constants(layout: BlockLayout) -> Mapping[str, Any]:
    """Constants of `read_block`."""
    channels = max(SMALLEST_SIDE, power_of_two(layout.head_dim))
    tokens = min(
        max(TILE // channels, SMALLEST_SIDE), max(power_of_two(layout.block_tokens), SMALLEST_SIDE), READ_TOKENS
    )
    constants = Constants(
        **_shared(layout, -(-layout.block_tokens // tokens)),
        ROW_GROUP=layout.row_group,
        TOKENS=tokens,
        CHANNELS=channels,
    )
    return {"C": constants, **_OPTIONS}


def _in_dtype(number: float, dtype: torch.dtype, rounded: Callable[[float], int] = round) -> float:
    """A positive normal number in the precision of a dtype, to nearest even, or rounded by another function."""
    mantissa, exponent = math.frexp(number)
    steps = 2 / torch.finfo(dtype).eps
    return math.ldexp(rounded(mantissa * steps) / steps, exponent)


def read_obstacle(layout: BlockLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no kernel reads blocks of a layout on a device, `None` if one does.

    Args:
        layout: layout of the blocks.
        dtype: dtype of the states that are written.
        device: device of the blocks.
    """
    return _read_obstacle(layout, dtype, device, triton_support.device_facts(device))


@functools.lru_cache(maxsize=64)
def _read_obstacle(layout: BlockLayout, dtype: torch.dtype, device: torch.device, facts: DeviceFacts) -> str | None:
    if (found := facts.obstacle or _form_obstacle(layout, dtype)) is not None:
        return found
    # Dtypes stand for tensors, and 16 for strides: the kernel is compiled, not launched.
    arguments = (torch.uint8, dtype, dtype, *[16] * 7)
    return READ.obstacle(device, (1,), arguments, read_constants(layout))


def pack_obstacle(
    layout: BlockLayout,
    partner_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    search: KernelSearch,
    factors: bool = False,
    means: bool = False,
) -> str | None:
    """Why no kernel packs blocks of a layout on a device, `None` if one does.

    Args:
        layout: layout of the blocks.
        partner_dim: head_dim of the other side.
        dtype: dtype of the states.
        device: device of the states.
        search: how codes are searched for.
        factors: as for `pack_constants`.
        means: as for `pack_constants`.
    """
    facts = triton_support.device_facts(device)
    return _pack_obstacle(layout, partner_dim, dtype, device, search, factors, means, facts)


def _form_obstacle(layout: BlockLayout, dtype: torch.dtype) -> str | None:
    if dtype not in DTYPES:
        return f"states are of {dtype}"
    if layout.format.bits not in WIDTHS:
        return f"there is no kernel for codes of {layout.format.bits} bit"
    if layout.format.levels:
        return "codes look up their numbers in a codebook"
    if layout.format.fixed_scales:
        return "codes have scales that never change"
    if layout.head_dim > LARGEST_HEAD_DIM:
        return f"the head_dim is {layout.head_dim}, above {LARGEST_HEAD_DIM}"
    return None


@functools.lru_cache(maxsize=64)
def _pack_obstacle(
    layout: BlockLayout,
    partner_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    search: KernelSearch,
    factors: bool,
    means: bool,
    facts: DeviceFacts,
) -> str | None:
    if (found := facts.obstacle or _form_obstacle(layout, dtype)) is not None:
        return found
    if partner_dim > LARGEST_HEAD_DIM:
        return f"the other head_dim is {partner_dim}, above {LARGEST_HEAD_DIM}"
    if layout.row_group != 1:
        return "groups are across the rows of a block"
    tokens = layout.block_tokens
    if tokens & (tokens - 1) or tokens < SMALLEST_SIDE:
        return f"a block has {tokens} tokens, not a power of two from {SMALLEST_SIDE} on"
    if (columns := _tile(layout)[1]) > LARGEST_COLUMNS:
        return f"a row of a block takes {columns} columns, above {LARGEST_COLUMNS}"
    arguments = (dtype, dtype, torch.uint8, dtype, dtype, dtype, *([16, 16, 16, 1] * 2), *[16] * 6)
    constants = pack_constants(layout, partner_dim, dtype, search, factors, means)
    return PACK.obstacle(device, (1,), arguments, constants)


def pack_blocks(
    states: Tensor,
    partner: Tensor,
    codes: Tensor,
    parameters: Tensor,
    layout: BlockLayout,
    search: KernelSearch,
    smoothing: KeySmoothing = UNSMOOTHED,
) -> None:
    """Quantize one side of whole blocks, and write it in their packed layout. Call only without a `pack_obstacle`.

    Tokens that are not finite in one of the sides are quantized as zeros, and the parameters of their values are NaN.

    Args:
        states: `[batch, kv_heads, tokens, head_dim]`, the tokens of whole blocks.
        partner: states of the other side of the same tokens.
        codes: uint8 `[batch, kv_heads, blocks, layout.code_bytes]`, whose last dimension is contiguous.
        parameters: `[batch, kv_heads, blocks, layout.parameters]` in the dtype of the states, likewise.
        layout: layout of the blocks.
        search: how codes are searched for.
        smoothing: how states are smoothed first.
    """
    batch, kv_heads, blocks, _ = codes.shape
    if not codes.numel():
        return
    factor, mean = smoothing.factor, smoothing.mean
    constants = pack_constants(layout, partner.shape[3], states.dtype, search, factor is not None, mean is not None)
    arguments = (
        states,
        partner,
        codes,
        parameters,
        # Any pointer stands for what is never read.
        *(parameters if vectors is None else vectors for vectors in (factor, mean)),
        *states.stride(),
        *partner.stride(),
        *codes.stride()[:3],
        *parameters.stride()[:3],
    )
    PACK.launch(states.device, (blocks * constants["C"].PIECES, kv_heads, batch), arguments, constants)


def read_blocks(codes: Tensor, parameters: Tensor, layout: BlockLayout, dtype: torch.dtype) -> Tensor:
    """States of packed blocks, rotated back. Call only without a `read_obstacle`.

    Args:
        codes: uint8 `[batch, kv_heads, blocks, layout.code_bytes]`, whose last dimension is contiguous.
        parameters: `[batch, kv_heads, blocks, layout.parameters]`, likewise.
        layout: layout of the blocks.
        dtype: dtype of the states.

    Returns:
        `[batch, kv_heads, blocks * block_tokens, head_dim]` of `dtype`.
    """
    batch, kv_heads, blocks, _ = codes.shape
    tokens = blocks * layout.block_tokens
    states = torch.empty((batch, kv_heads, tokens, layout.head_dim), dtype=dtype, device=codes.device)
    if states.numel():
        constants = read_constants(layout)
        arguments = (codes, parameters, states, *codes.stride()[:3], *parameters.stride()[:3], tokens)
        READ.launch(codes.device, (blocks * constants["C"].PIECES, kv_heads, batch), arguments, constants)
    return states
