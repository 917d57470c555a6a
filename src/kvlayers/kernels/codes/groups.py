"""States by groups, their codes, and the layout of a block of codes, which stores reserve and attention reads.

A rotation along head_dim spreads outliers in a channel over all channels. The matrix is a normalised Hadamard matrix of
the largest power of two that divides head_dim, repeated along the diagonal. It is symmetric and orthogonal, so rotating
twice gives the states back. QuaRot (https://arxiv.org/abs/2404.00456) rotates the cache in this way.

A block holds `block_tokens` tokens as rows of codes. Keys have one row per channel, along the tokens; values have one
row per token, along the channels. So attention sums over the rows in both products, and the codes that it unpacks at
once are neighbouring columns of its result.

Byte `j` of a row of `n` bytes holds the codes of columns `j`, `j + n`, `j + 2n`, ..., the first in its lowest bits. So
code that reads 8 bytes at once finds the codes of 8 neighbouring columns under each mask, and needs no shuffle. Codes
whose width does not divide 8 are several such rows, one after the other, called planes: three bits are their two lower
bits, then their highest bit.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.kernels.codes.quantizer_contract import CodeFormat, QuantizedGroups, Side


def rotation_size(head_dim: int) -> int:
    """The largest power of two that divides head_dim: the number of channels that are mixed with each other."""
    return head_dim & -head_dim


@functools.lru_cache(maxsize=32)
def _matrix(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones((1, 1), dtype=torch.float32, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    with torch.inference_mode(False):
        normalised: Tensor = (matrix / size**0.5).to(device)
    return normalised


def rotate(states: Tensor) -> Tensor:
    """Rotate float32 `[..., head_dim]`; a second rotation undoes the first."""
    size = rotation_size(states.shape[-1])
    rotated: Tensor = torch.unflatten(states, -1, (-1, size)) @ _matrix(size, states.device)
    return rotated.flatten(-2)


GROUP_DIMS = (-3, -1)
"""Dimensions of a grouped view that lie within a group."""


def grouped(states: Tensor, code_format: CodeFormat) -> Tensor:
    """View `[batch, kv_heads, tokens, head_dim]` as `[batch, kv_heads, tokens / group_tokens, group_tokens, head_dim /
    group_channels, group_channels]`."""
    by_channels = torch.unflatten(states, -1, (-1, code_format.group_channels))
    return torch.unflatten(by_channels, -3, (-1, code_format.group_tokens))


def ungrouped(groups: Tensor) -> Tensor:
    """The states of a grouped view, `[batch, kv_heads, tokens, head_dim]`."""
    return groups.flatten(-2).flatten(-3, -2)


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers, rounded to the precision of a dtype."""
    return numbers.to(dtype).float()


def smallest_positive(dtype: torch.dtype) -> float:
    """The smallest number of a dtype that is safe to divide by. Every device keeps float16's subnormal numbers."""
    numbers = torch.finfo(dtype)
    return numbers.smallest_normal * numbers.eps if dtype == torch.float16 else numbers.smallest_normal


LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


def largest_float8_scale(dtype: torch.dtype) -> float:
    """The largest scale whose product with the largest float8 is finite in a dtype."""
    numbers = torch.finfo(dtype)
    return numbers.max / LARGEST_FLOAT8 * (1 - numbers.eps)


def one_group_a_row(states: Tensor, code_format: CodeFormat) -> Tensor:
    """Rearrange `[batch, kv_heads, tokens, head_dim]` to `[groups, states of a group]`."""
    return grouped(states, code_format).transpose(-3, -2).flatten(-2).flatten(0, -2)


def from_rows(
    codes: Tensor, scale: Tensor, zero: Tensor, shape: torch.Size, code_format: CodeFormat
) -> QuantizedGroups:
    """Inverse of `one_group_a_row`, for codes and for one scale and one zero per row.

    Args:
        codes: uint8 `[groups, states of a group]`.
        scale: `[groups, 1]`.
        zero: `[groups, 1]`.
        shape: shape of the states.
        code_format: the format that the groups follow.
    """
    tokens, channels = code_format.group_tokens, code_format.group_channels
    groups = (*shape[:-2], shape[-2] // tokens, shape[-1] // channels)
    by_group = codes.view(*groups, tokens, channels).transpose(-3, -2)
    return QuantizedGroups(by_group.reshape(shape), scale.view(groups), zero.view(groups))


def dequantize(groups: QuantizedGroups, code_format: CodeFormat, dtype: torch.dtype) -> Tensor:
    """The states that codes stand for, computed in float32.

    Args:
        groups: codes, scales and zeros from a quantizer.
        code_format: `format` of that quantizer.
        dtype: dtype of the result.

    Returns:
        `[batch, kv_heads, tokens, head_dim]` of `dtype`.
    """
    states = grouped(numbers_of(groups.codes, code_format), code_format) * _for_each_state(groups.scale)
    if groups.zero is not None:
        states = states + _for_each_state(groups.zero)
    flat = ungrouped(states)
    return (rotate(flat) if code_format.rotated else flat).to(dtype)


def numbers_of(codes: Tensor, code_format: CodeFormat) -> Tensor:
    """What codes stand for before the scale, float32 of the same shape as the codes, uint8 `[batch, kv_heads, ...]`."""
    if code_format.floating:
        numbers = codes.view(torch.float8_e4m3fn).float()
        return numbers * scales_by_head(code_format, codes) if code_format.fixed_scales else numbers
    if code_format.levels:
        return torch.tensor(code_format.levels, dtype=torch.float32, device=codes.device)[codes.int()]
    return codes.float()


def scales_by_head(code_format: CodeFormat, states: Tensor) -> Tensor:
    """The fixed scales of a format in float32, in a shape that broadcasts over states `[batch, kv_heads, ...]`.

    Raises:
        StateMismatchError: there are scales for another number of KV heads.
    """
    code_format.check_heads(states.shape[1])
    return _on_device(code_format.fixed_scales, states.device).view(-1, *(1,) * (states.dim() - 2))


@functools.lru_cache(maxsize=4096)
def _on_device(scales: tuple[float, ...], device: torch.device) -> Tensor:
    # A tensor of inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return torch.tensor(scales, dtype=torch.float32, device=device)


def _for_each_state(parameters: Tensor) -> Tensor:
    """View `[batch, kv_heads, token groups, channel groups]` so that it broadcasts over grouped states."""
    return parameters.float().unsqueeze(-2).unsqueeze(-1)


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
