"""The layout of a block of packed codes, which stores reserve, quantizers write and attention reads.

A block holds `block_tokens` tokens as rows of codes. Keys have one row per channel, along the tokens; values have one
row per token, along the channels. So attention sums over the rows in both products, and the codes that it unpacks at
once are neighbouring columns of its result.

Byte `j` of a row of `n` bytes holds the codes of columns `j`, `j + n`, `j + 2n`, ..., the first in its lowest bits. So
code that reads 8 bytes at once finds the codes of 8 neighbouring columns under each mask, and needs no shuffle. Codes
whose width does not divide 8 are several such rows, one after the other, called planes: three bits are their two lower
bits, then their highest bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.kernels.codes.quantizer_contract import CodeFormat, Side

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


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of the blocks of one side.

    Attributes:
        format: the meaning of the codes.
        side: keys or values.
        head_dim: channels of a token.
        block_tokens: tokens of a block.
    """

    format: CodeFormat
    side: Side
    head_dim: int
    block_tokens: int

    def _oriented(self, of_tokens: int, of_channels: int) -> tuple[int, int]:
        """The numbers for the rows and for the columns of a block."""
        return (of_channels, of_tokens) if self.side == "keys" else (of_tokens, of_channels)

    @property
    def rows(self) -> int:
        """Rows of a block: channels of keys, tokens of values."""
        return self._oriented(self.block_tokens, self.head_dim)[0]

    @property
    def columns(self) -> int:
        """Columns of a block: tokens of keys, channels of values."""
        return self._oriented(self.block_tokens, self.head_dim)[1]

    @property
    def row_group(self) -> int:
        """Neighbouring rows that share a scale."""
        return self._oriented(self.format.group_tokens, self.format.group_channels)[0]

    @property
    def column_group(self) -> int:
        """Neighbouring columns that share a scale."""
        return self._oriented(self.format.group_tokens, self.format.group_channels)[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes."""
        return row_bytes(self.columns, self.format.bits)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a block, for each head."""
        return self.rows * self.row_bytes

    @property
    def parameters(self) -> int:
        """Scales and zeros of a block, for each head."""
        groups = self.block_tokens // self.format.group_tokens * (self.head_dim // self.format.group_channels)
        return self.format.parameters * groups
