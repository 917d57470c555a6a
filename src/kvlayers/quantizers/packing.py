"""Codes of a few bits, packed into bytes.

Byte `j` of a row of `n` bytes holds the codes of columns `j`, `j + n`, `j + 2n`, ..., the first in its lowest bits. So
code that reads 8 bytes at once finds the codes of 8 neighbouring columns under each mask, and needs no shuffle. Codes
whose width does not divide 8 are several such rows, one after the other, called planes: three bits are their two lower
bits, then their highest bit.
"""

import torch
from torch import Tensor

COLUMNS_MULTIPLE = 8
"""Rows are padded to a multiple of this many columns if codes are smaller than a byte."""

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""For each width of a code, the widths of its planes, from its lowest bits on. Each divides the one before it."""


def padded_columns(columns: int, bits: int) -> int:
    """Columns of a row, including the padding that fills its last byte."""
    return columns if bits == 8 else -(-columns // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE


def row_bytes(columns: int, bits: int) -> int:
    """Bytes of a row of codes."""
    return padded_columns(columns, bits) * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, uint8 `[..., columns]` below `2**bits`, into bytes, uint8 `[..., row_bytes(columns, bits)]`."""
    if bits == 8:
        return codes
    padding = padded_columns(codes.shape[-1], bits) - codes.shape[-1]
    if padding:
        codes = torch.nn.functional.pad(codes, (0, padding))
    planes = []
    shift = 0
    for width in PLANES[bits]:
        plane = (codes >> shift) & ((1 << width) - 1)
        slots = torch.unflatten(plane, -1, (8 // width, -1)).unbind(-2)
        packed = slots[0]
        for slot, column_codes in enumerate(slots[1:], start=1):
            packed = packed | (column_codes << (slot * width))
        planes.append(packed)
        shift += width
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The codes that `pack` was given, uint8 `[..., columns]`."""
    if bits == 8:
        return packed
    padded = padded_columns(columns, bits)
    codes = None
    start = shift = 0
    for width in PLANES[bits]:
        plane = packed[..., start : start + padded * width // 8]
        slots = [(plane >> (slot * width)) & ((1 << width) - 1) for slot in range(8 // width)]
        of_plane = torch.cat(slots, dim=-1)
        codes = of_plane if codes is None else codes | (of_plane << shift)
        start += padded * width // 8
        shift += width
    return codes[..., :columns]  # type: ignore[index]
