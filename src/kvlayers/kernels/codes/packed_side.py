"""Keys, or values, as blocks of packed codes, in the layout of `groups`."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlayers.kernels.codes.cuda_packing import read_blocks, read_obstacle
from kvlayers.kernels.codes.groups import BlockLayout, numbers_of, pack, rotate, unpack
from kvlayers.kernels.codes.quantizer_contract import QuantizedGroups
from kvlayers.utils.transforms import is_followed, is_memory, transforms_run

MOST_KEPT = 1 << 21
"""Numbers that a thread keeps memory for."""


CPU_STATES_AT_ONCE = 1 << 17
"""States that are unpacked at once on a CPU, so that those in float32 stay in its cache."""


class _Memory(threading.local):
    numbers: Tensor | None = None


_memory = _Memory()


def scratch(*shape: int) -> Tensor:
    """A float32 tensor on the CPU, of any content. The next call in this thread may return the same memory."""
    count = math.prod(shape)
    if count > MOST_KEPT:
        return torch.empty(shape, dtype=torch.float32, device="cpu")
    memory = _memory.numbers
    if memory is None or memory.numel() < count:
        # Not an inference tensor, which could not be written to outside of inference mode.
        with torch.inference_mode(False):
            memory = _memory.numbers = torch.empty(count, dtype=torch.float32, device="cpu")
    return memory[:count].view(shape)


@dataclass(frozen=True)
class PackedSide:
    """Packed keys, or packed values, of consecutive blocks.

    Attributes:
        codes: uint8 `[batch, kv_heads, blocks, rows * row_bytes]`; its last dimension is contiguous.
        parameters: `[batch, kv_heads, blocks, p]` in the dtype of the states; its last dimension is contiguous and
            flattens `[layout.format.parameters, rows / row_group, columns / column_group]`: scales, then zeros.
        layout: the layout of the blocks.
    """

    codes: Tensor
    parameters: Tensor
    layout: BlockLayout

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.codes.shape[2]

    def _numbers(self, make: Callable[..., Tensor] | None = None) -> Tensor:
        """What the codes stand for before their scales, float32 `[batch, kv_heads, blocks, rows, columns]`.

        Args:
            make: makes the memory for them from a shape, if not torch.
        """
        layout = self.layout
        packed, bits = torch.unflatten(self.codes, -1, (layout.rows, layout.row_bytes)), self.layout.format.bits
        is_one_plane = bits in (1, 2, 4) and not self.layout.format.levels
        if not is_one_plane or layout.row_bytes * 8 != layout.columns * bits:
            return numbers_of(unpack(packed, bits, layout.columns), self.layout.format)
        # Without the copies of `unpack`: this is most of the time of a step without a kernel.
        shape = (*packed.shape[:-1], layout.columns)
        numbers = packed.new_empty(shape, dtype=torch.float32) if make is None else make(*shape)
        for lowest, part in zip(range(0, 8, bits), torch.split(numbers, layout.row_bytes, dim=-1), strict=True):
            moved = packed >> lowest if lowest else packed
            part.copy_(moved if lowest + bits == 8 else moved & (1 << bits) - 1)
        return numbers

    def _parameters(self) -> Tensor:
        """Scales, and zeros, float32 `[batch, kv_heads, blocks, parameters, groups of rows, groups of columns]`."""
        layout = self.layout
        grid = (self.layout.format.parameters, layout.rows // layout.row_group, layout.columns // layout.column_group)
        return torch.unflatten(self.parameters.float(), -1, grid)

    def products(self, factors: Tensor) -> Tensor:
        """Factors times the states of each block, whose scales are folded into the factors: `row_group` must be 1.

        Args:
            factors: float32 `[batch, kv_heads, blocks, n, rows]`.

        Returns:
            float32 `[batch, kv_heads, blocks, n, columns]`.
        """
        # Derivatives would keep the numbers.
        is_kept = factors.requires_grad or transforms_run() or is_followed()
        make = scratch if is_memory(self.codes) and not is_kept else None
        numbers, parameters = self._numbers(make).flatten(0, 2), self._parameters().flatten(0, 2)
        columns, size = self.layout.columns, self.layout.column_group
        given = factors.flatten(0, 2)
        parts = []
        for group in range(columns // size):
            scale, *zero = parameters[:, :, :, group].unbind(1)
            of_group = numbers if size == columns else numbers[:, :, group * size : (group + 1) * size]
            scaled = given * scale[:, None]
            if zero:
                parts.append(torch.baddbmm(torch.bmm(given, zero[0][:, :, None]), scaled, of_group))
            else:
                parts.append(torch.bmm(scaled, of_group))
        products = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return torch.unflatten(products, 0, factors.shape[:3])

    def dequantized(self) -> Tensor:
        """The states, float32 `[batch, kv_heads, blocks * block_tokens, head_dim]`, rotated if they were packed so."""
        parameters = self._parameters()
        # Groups get dimensions of their own, so that scale and zero are broadcast rather than repeated in memory.
        groups = torch.unflatten(self._numbers(), -1, (-1, self.layout.column_group))
        groups = torch.unflatten(groups, -3, (-1, self.layout.row_group))
        states = groups * parameters[:, :, :, 0, :, None, :, None]
        if self.layout.format.has_zero:
            states = states + parameters[:, :, :, 1, :, None, :, None]
        states = states.flatten(-2).flatten(-3, -2)
        return (states.transpose(-1, -2) if self.layout.side == "keys" else states).flatten(2, 3)

    def states(self, dtype: torch.dtype) -> Tensor:
        """The states, `[batch, kv_heads, blocks * block_tokens, head_dim]` of a dtype, rotated back.

        Where Triton runs it is one launch.
        """
        layout = self.layout
        if read_obstacle(layout, dtype, self.codes.device) is None:
            return read_blocks(self.codes, self.parameters, layout, dtype)
        batch, kv_heads, blocks, _ = self.codes.shape
        at_once = max(1, CPU_STATES_AT_ONCE // max(1, batch * kv_heads * layout.block_tokens * layout.head_dim))
        if blocks <= at_once or not is_memory(self.codes):
            return self._rotated_back().to(dtype)
        states = self.codes.new_empty((batch, kv_heads, blocks * layout.block_tokens, layout.head_dim), dtype=dtype)
        parts = torch.split(self.codes, at_once, 2), torch.split(self.parameters, at_once, 2)
        for part, codes, parameters in zip(torch.split(states, at_once * layout.block_tokens, 2), *parts, strict=True):
            part.copy_(replace(self, codes=codes, parameters=parameters)._rotated_back())
        return states

    def _rotated_back(self) -> Tensor:
        states = self.dequantized()
        return rotate(states) if self.layout.format.rotated else states


def pack_side(groups: QuantizedGroups, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """Codes and parameters of a `PackedSide`, from the groups that a quantizer returned.

    Args:
        groups: quantized states of `[batch, kv_heads, tokens, head_dim]`, tokens a multiple of those of a block.
        layout: layout of the blocks.
    """
    codes = torch.unflatten(groups.codes, 2, (-1, layout.block_tokens))
    numbers = [groups.scale] if groups.zero is None else [groups.scale, groups.zero]
    token_groups = layout.block_tokens // layout.format.group_tokens
    parameters = torch.stack([torch.unflatten(part, 2, (-1, token_groups)) for part in numbers], 3)
    if layout.side == "keys":
        codes, parameters = codes.transpose(-1, -2), parameters.transpose(-1, -2)
    return pack(codes, layout.format.bits).flatten(3), parameters.flatten(3)
