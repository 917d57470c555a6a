"""The quantizer that needs no other package.

Some channels of keys are large in every token, so keys share a scale along the tokens of a channel. Values have no such
channels, and share a scale along the channels of a token, as in KIVI (https://arxiv.org/abs/2402.02750). Both are
rotated first, as in QuaRot (see `groups`): without the rotation of keys, the divergence of a real model about
doubles.

The range of each group is searched: clipping the outermost states makes the steps between the others finer. The best
of some clipped ranges is fitted to its own codes by least squares, as in Lloyd's method and as HQQ does for
another norm (https://dropbox.github.io/hqq_blog/). Then the scale is stretched, so that products with a query are not
biased towards zero, the concern of TurboQuant (https://arxiv.org/abs/2504.19874).

KIVI itself is here too, without a rotation or a search: each group is divided into equal steps from its smallest to its
largest state. As in the paper, groups have 32 states, and the newest 128 tokens stay in full precision
(`residual_length`).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.kernels.codes.cpu_packing import LIBRARY
from kvlayers.kernels.codes.groups import rotate, rotation_size, rounded, smallest_positive
from kvlayers.kernels.codes.packed_side import scratch
from kvlayers.kernels.codes.quantizer_contract import (
    CLIPS,
    Backend,
    CodeFormat,
    KernelSearch,
    QuantizedGroups,
    Quantizer,
    SideOptions,
    groups_for,
    register_quantizer,
)
from kvlayers.utils.transforms import is_followed, is_memory

CLIP_STEPS = {1: 0.1, 2: 0.07, 3: 0.04, 4: 0.03, 5: 0.0125, 6: 0.005, 8: 0.0}
"""For each width of a code, the fraction of the range by whose multiples it is cut off at either end."""

REFITS = 2
"""How often the best range is fitted to its own codes."""

LARGEST_STRETCH = 0.5
"""The most by which the least-squares scale is stretched, as a fraction of it."""

LARGEST_STATE = 2.0**124
"""States up to this size are far from overflow in float32."""

CPU_STATES_AT_ONCE = 1 << 17
"""States that are quantized at once. On so few, launching operations takes about as long as they do, and a thread keeps
the memory that they need."""

ACCELERATOR_STATES_AT_ONCE = 1 << 22
"""States that are quantized at once on other devices, where every operation has to be launched."""

RANGES = torch.tensor(CLIPS).view(2, -1, 2, 1, 1, 1)
"""`CLIPS` as two steps of a search, so that the ranges of a step are tried at once."""


class _Grid(NamedTuple):
    """Scale and zero of each group as they are stored: float32 numbers that the dtype of the states can hold."""

    scale: Tensor
    zero: Tensor


class NativeQuantizer(Quantizer):
    """Affine codes with a searched range.

    Args:
        code_format: the meaning of the codes.
    """

    smooths_keys = True

    @property
    @override
    def kernel_search(self) -> KernelSearch:
        return KernelSearch(CLIP_STEPS[self.format.bits], REFITS, LARGEST_STRETCH, LARGEST_STATE)

    def quantize(self, states: Tensor) -> QuantizedGroups:
        """Quantize `[batch, kv_heads, tokens, head_dim]`.

        A group of equal states gives exactly that state. States are clipped to the magnitude above which arithmetic
        would overflow: 2^124, or the largest number of the dtype if that is less. If states are rotated, it is divided
        by the square root of the number of channels that are mixed (8188 for float16 and head_dim 64).
        """
        batch, kv_heads, tokens, head_dim = states.shape
        group_tokens, group_channels = self.format.group_tokens, self.format.group_channels
        at_once = CPU_STATES_AT_ONCE if states.device.type == "cpu" else ACCELERATOR_STATES_AT_ONCE
        rows = states.detach().reshape(-1, group_tokens, head_dim)
        pieces = map(self._quantized, torch.split(rows, max(1, at_once // (group_tokens * head_dim))))
        codes, scale, zero = map(torch.cat, zip(*pieces, strict=True))
        grid = (batch, kv_heads, tokens // group_tokens, head_dim // group_channels)
        return QuantizedGroups(codes.view(states.shape), scale.view(grid), zero.view(grid))

    def _quantized(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and zeros of `[rows, group_tokens, head_dim]`; the numbers of a row are those of its groups."""
        # Getting new memory for each operation would take longer than the operation.
        sizes, reuses = (_GridSearch.COPIES + 1, rows.numel()), is_memory(rows) and not is_followed()
        work = scratch(*sizes) if reuses else rows.new_empty(sizes, dtype=torch.float32)
        mixed = rotation_size(rows.shape[-1]) if self.format.rotated else 1
        limit = min(torch.finfo(rows.dtype).max, LARGEST_STATE) / mixed**0.5
        exact = work[0].view(rows.shape).copy_(rows).clamp_(-limit, limit)
        groups = rotate(exact) if self.format.rotated else exact
        clip_step, size = self.kernel_search.clip_step, self.format.group_channels
        groups = groups.view(-1, size, 1) if size > 1 else groups
        is_turned = size > 1 and clip_step > 0
        if is_turned:
            # Groups side by side, as those along tokens are, since most operations of a search take a number of each.
            # Torch transposes matrices of one dtype faster than other tensors.
            groups = work[-1].view(size, -1).copy_(groups.squeeze(-1).t()).unsqueeze(0)
        grid, exact_codes = _GridSearch(groups, self.format.bits, rows.dtype, clip_step, work).best()
        codes = exact_codes.to(torch.uint8)
        codes = codes.squeeze(0).t() if is_turned else codes
        scale, zero = (numbers.view(rows.shape[0], -1).to(rows.dtype) for numbers in grid)
        return codes.reshape(rows.shape), scale, zero


class _GridSearch:
    """Finds the grid of each group that has the smallest squared error.

    Args:
        states: float32 `[pieces, states of a group, groups]`.
        bits: width of a code.
        dtype: dtype that scale and zero are stored in.
        clip_step: ranges are tried from which multiples of this fraction of the range are cut off.
        work: memory for `COPIES` copies of the states, float32 `[COPIES or more, states]`.
    """

    COPIES = 2 * RANGES.shape[1] + 1

    def __init__(self, states: Tensor, bits: int, dtype: torch.dtype, clip_step: float, work: Tensor) -> None:
        self.states = states
        self.clip_step = clip_step
        self.dtype = dtype
        self.top = 2**bits - 1
        self.count = states.shape[-2]
        self.lowest = states.amin(-2, keepdim=True)
        # The range itself may exceed the largest float32.
        self.step = states.amax(-2, keepdim=True) / self.top - self.lowest / self.top
        self._numbers, self._codes = work[: self.COPIES - 1].view(2, self.COPIES // 2, *states.shape)
        self._shifted = work[self.COPIES - 1].view(states.shape)

    def best(self) -> tuple[_Grid, Tensor]:
        """The grid of each group, `[pieces, 1, groups]`, and codes, float32 as the states."""
        grid = self._grid(self.step, self.lowest)
        if not self.clip_step:
            return grid, self._coded(grid)
        unit = grid.scale
        best = fit = self._fit(self._clipped(unit), unit)
        for _ in range(REFITS):
            fit = self._fit(self._refitted(fit), unit)
            best = torch.where(fit[0] < best[0], fit, best)
        return self._stretched(best), self._coded(_Grid(*best[1:3]))

    def _coded(self, grid: _Grid) -> Tensor:
        return torch.sub(self.states, grid.zero, out=self._shifted).div_(grid.scale).clamp_(0, self.top).round_()

    def _clipped(self, unit: Tensor) -> _Grid:
        """The grid of the range, or of the clipped one, with the smallest error.

        Arithmetic starts from the lowest state and with the inverse of the scale: codes for a comparison need not be
        exactly those of a division.
        """
        shifted = torch.sub(self.states, self.lowest, out=self._shifted)
        # Of the best one: its error, scale and zero, and what is cut off below.
        best = torch.stack([torch.full_like(unit, torch.inf), unit, unit, torch.zeros_like(unit)]).unsqueeze(1)
        # Numbers that are filled in cross to no device, as a tensor of them would.
        filled = RANGES if unit.is_cpu else torch.stack([unit.new_full((), each) for each in RANGES.flatten().tolist()])
        for steps in filled.view_as(RANGES) * self.clip_step:
            below, above = (best[-1] + steps).clamp(min=0).unbind(1)
            grids = self._grid(self.step * (1 - below - above), self.lowest + self.step * (self.top * below))
            inverse = grids.scale.reciprocal()
            exact = torch.addcmul((self.lowest - grids.zero) * inverse, shifted, inverse, out=self._numbers)
            exact -= torch.clamp(exact, 0, self.top, out=self._codes).round_()
            errors = self._error(grids, exact.square_().sum(-2, keepdim=True), unit)
            tried = torch.cat([best, torch.stack([errors, *grids, below.expand_as(errors)])], 1)
            # The first one of equal errors, as the kernels take it.
            best = tried.gather(1, tried[0].min(0, keepdim=True).indices.expand_as(best))
        return _Grid(*best[1:3, 0])

    def _error(self, grid: _Grid, squares: Tensor, unit: Tensor) -> Tensor:
        """Squared error of each group, in units of `unit`, because squares of the largest states would overflow."""
        return squares * (grid.scale / unit).square_()

    def _fit(self, grid: _Grid, unit: Tensor) -> Tensor:
        """How a grid fits, `[8, pieces, 1, groups]`: its error, scale and zero, and means over each group.

        Means are of the codes, of the residues, of the squares of the codes, of the products, and of the squares of the
        residues, in units of the scale.
        """
        numbers = self._numbers
        codes, residues = numbers[0], numbers[1]
        torch.sub(self.states, grid.zero, out=residues).mul_(grid.scale.reciprocal())
        torch.clamp(residues, 0, self.top, out=codes).round_()
        residues -= codes
        torch.mul(codes, numbers[:2], out=numbers[2:4])
        torch.mul(residues, residues, out=numbers[4])
        means = numbers.sum(-2, keepdim=True).div_(self.count)
        return torch.stack([self._error(grid, means[-1], unit), *grid, *means])

    def _refitted(self, fit: Tensor) -> _Grid:
        """The least-squares grid for the codes: first the zero, then the scale that suits the stored zero."""
        _, scale, zero, code, residue, code_squares, products, _ = fit
        variance = code_squares - code.square()
        slope = (products - code * residue) / variance.clamp(min=0.5 / self.count)
        stored = rounded(zero + scale * (residue - slope * code), self.dtype)
        moved = (zero - stored) / scale
        growth = (products + moved * code) / code_squares.clamp(min=1 / self.count)
        return self._grid(scale * (1 + growth), stored)

    def _stretched(self, fit: Tensor) -> _Grid:
        """The grid on which the codes have the same variance as the states, and the same mean.

        Least squares shrinks the variance by the fraction that is lost in rounding, and so flattens the attention.
        """
        _, scale, zero, code, residue, code_squares, products, residue_squares = fit
        covariance = products - code * residue
        residue_variance = residue_squares - residue.square()
        variance = code_squares - code.square()
        stretch = (covariance + residue_variance) / (variance + covariance).clamp(min=1 / self.count)
        mean = scale * (code + residue)
        scale = scale * (1 + stretch.clamp(0, LARGEST_STRETCH))
        stored = self._grid(scale, zero + (mean - scale * code))
        # If the bias is large, rounding moves the zero by a part of a step: the scale makes up for it to keep the mean.
        exact = (mean + (zero - stored.zero)) / code.clamp(min=1 / self.count)
        return self._grid(torch.clamp(exact, scale * 0.95, scale * 1.05), stored.zero)

    def _grid(self, scale: Tensor, zero: Tensor) -> _Grid:
        """A grid as it is stored: its scale can be a divisor, and the dtype can hold its last state."""
        numbers = torch.finfo(self.dtype)
        zero = rounded(zero.clamp(-numbers.max, numbers.max), self.dtype)
        largest = (numbers.max / self.top - zero.clamp(min=0) / self.top) * (1 - numbers.eps)
        # The error that rounding the zero leaves in a constant group must not be many steps.
        smallest = (zero.abs() * (numbers.eps / self.top / 8)).clamp(min=smallest_positive(self.dtype))
        return _Grid(rounded(torch.maximum(torch.minimum(scale, largest), smallest), self.dtype), zero)


@register_quantizer("native")
class NativeBackend(Backend):
    """Keys by 64 neighbouring tokens of a rotated channel, values by the rotated channels of a token.

    One bit is for values of layers that hardly change the predictions, which `calibrate` finds.
    """

    name = "native"
    widths = (1, 2, 3, 4, 5, 6, 8)
    kernel = LIBRARY

    def quantizer(self, options: SideOptions, head_dim: int) -> NativeQuantizer:
        """A quantizer for keys, or values, of a head_dim.

        Raises:
            OptionError: the backend does not take the options.
        """
        self.check(options)
        return NativeQuantizer(CodeFormat(options.nbits, *groups_for(options, head_dim), rotated=True))


GROUP_SIZE = 32


class KiviQuantizer(NativeQuantizer):
    """Affine codes of the whole range of each group.

    Args:
        code_format: the meaning of the codes.
    """

    kernel_search = KernelSearch(largest_state=LARGEST_STATE)


@register_quantizer("kivi")
class KiviBackend(Backend):
    """Keys by 32 neighbouring tokens of a channel, values by 32 neighbouring channels of a token."""

    name = "kivi"
    widths = (2, 4)
    kernel = LIBRARY

    def quantizer(self, options: SideOptions, head_dim: int) -> KiviQuantizer:
        """A quantizer for keys, or values, of a head_dim.

        Raises:
            OptionError: the backend does not take the options.
        """
        self.check(options)
        return KiviQuantizer(CodeFormat(options.nbits, *groups_for(options, head_dim, GROUP_SIZE)))
