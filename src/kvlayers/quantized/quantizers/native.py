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

import functools
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
        rows = states.detach().reshape(-1, group_tokens, head_dim)
        codes = rows.new_empty(rows.shape, dtype=torch.uint8)
        scale, zero = (rows.new_empty(rows.shape[0], head_dim // group_channels) for _ in _Grid._fields)
        at_once = CPU_STATES_AT_ONCE if states.device.type == "cpu" else ACCELERATOR_STATES_AT_ONCE
        step = max(1, at_once // (group_tokens * head_dim))
        for of_piece in zip(*(torch.split(part, step) for part in (rows, codes, scale, zero)), strict=True):
            self._quantize_piece(*of_piece)
        grid = (batch, kv_heads, tokens // group_tokens, head_dim // group_channels)
        return QuantizedGroups(codes.view(states.shape), scale.view(grid), zero.view(grid))

    def _quantize_piece(self, rows: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
        """Quantize rows `[rows, group_tokens, head_dim]`, and write what is found."""
        # Getting new memory for each operation would take longer than the operation.
        reuses = is_memory(rows) and not is_followed()
        make = scratch if reuses else functools.partial(rows.new_empty, dtype=torch.float32)
        work = make(_GridSearch.COPIES + 1, rows.numel())
        limit = min(torch.finfo(rows.dtype).max, LARGEST_STATE)
        if self.format.rotated:
            limit /= rotation_size(rows.shape[-1]) ** 0.5
        exact = work[0].view(rows.shape).copy_(rows).clamp_(-limit, limit)
        groups = rotate(exact) if self.format.rotated else exact
        clip_step, size = self.kernel_search.clip_step, self.format.group_channels
        if size > 1:
            groups = groups.view(-1, size, 1)
        is_turned = size > 1 and clip_step > 0
        if is_turned:
            # Groups side by side, as those along tokens are, since most operations of a search take a number of each.
            # Torch transposes matrices of one dtype faster than other tensors.
            groups = work[-1].view(size, -1).copy_(groups.squeeze(-1).t()).unsqueeze(0)
        grid, exact_codes = _GridSearch(groups, self.format.bits, rows.dtype, clip_step, work).best()
        found = exact_codes.to(torch.uint8)
        found = found.squeeze(0).t() if is_turned else found
        codes.view(found.shape).copy_(found)
        scale.copy_(grid.scale.view(scale.shape))
        zero.copy_(grid.zero.view(zero.shape))


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
        ways = RANGES.shape[1]
        self._numbers, self._codes = (work[start : start + ways].view(-1, *states.shape) for start in (0, ways))
        self._shifted = work[2 * ways].view(states.shape)

    def best(self) -> tuple[_Grid, Tensor]:
        """The grid of each group, `[pieces, 1, groups]`, and codes, float32 as the states."""
        grid = self._grid(self.step, self.lowest)
        if not self.clip_step:
            return grid, self._coded(grid)
        unit = grid.scale
        best = grid = self._clipped(unit)
        moments = of_best = self._moments(grid)
        least = self._error(grid, moments[-1], unit)
        for _ in range(REFITS):
            grid = self._refit(grid, moments)
            moments = self._moments(grid)
            error = self._error(grid, moments[-1], unit)
            is_better = error < least
            least = torch.minimum(error, least)
            best = _Grid(*(torch.where(is_better, new, old) for new, old in zip(grid, best, strict=True)))
            of_best = torch.where(is_better, moments, of_best)
        return self._stretched(best, of_best), self._coded(best)

    def _coded(self, grid: _Grid) -> Tensor:
        exact = torch.sub(self.states, grid.zero, out=self._shifted)
        return exact.div_(grid.scale).clamp_(0, self.top).round_()

    def _clipped(self, unit: Tensor) -> _Grid:
        """The grid of the range, or of the clipped one, with the smallest error.

        Arithmetic starts from the lowest state and with the inverse of the scale: codes for a comparison need not be
        exactly those of a division.
        """
        shifted = torch.sub(self.states, self.lowest, out=self._shifted)
        best, least, even = _Grid(unit, unit), torch.full_like(unit, torch.inf), torch.zeros_like(unit)
        for steps in RANGES.to(unit.device) * self.clip_step:
            below, above = (even + steps).clamp(min=0).unbind(1)
            grids = self._grid(self.step * (1 - below - above), self.lowest + self.step * (self.top * below))
            inverse = grids.scale.reciprocal()
            exact = torch.addcmul((self.lowest - grids.zero) * inverse, shifted, inverse, out=self._numbers)
            exact -= torch.clamp(exact, 0, self.top, out=self._codes).round_()
            errors = self._error(grids, exact.square_().sum(-2, keepdim=True), unit)
            error, which = errors.min(0, keepdim=True)
            is_better = error < least
            found = (numbers.gather(0, which) for numbers in (*grids, below.expand_as(errors)))
            least = torch.minimum(error, least)
            scale, zero, even = (
                torch.where(is_better, new, old)[0] for new, old in zip(found, (*best, even), strict=True)
            )
            best, least = _Grid(scale, zero), least[0]
        return best

    def _error(self, grid: _Grid, squares: Tensor, unit: Tensor) -> Tensor:
        """Squared error of each group, in units of `unit`, because squares of the largest states would overflow."""
        return squares * (grid.scale / unit).square_()

    def _moments(self, grid: _Grid) -> Tensor:
        """Means over each group, `[5, pieces, 1, groups]`, in units of the scale.

        They are of the codes, of the residues, of the squares of the codes, of the products, and of the squares of the
        residues.
        """
        numbers = self._numbers
        codes, residues = numbers[0], numbers[1]
        torch.sub(self.states, grid.zero, out=residues).mul_(grid.scale.reciprocal())
        torch.clamp(residues, 0, self.top, out=codes).round_()
        residues -= codes
        torch.mul(codes, numbers[:2], out=numbers[2:4])
        torch.mul(residues, residues, out=numbers[4])
        return numbers.sum(-2, keepdim=True).div_(self.count)

    def _refit(self, grid: _Grid, moments: Tensor) -> _Grid:
        """The least-squares grid for the codes: first the zero, then the scale that suits the stored zero."""
        code, residue, code_squares, products, _ = moments
        variance = code_squares - code.square()
        slope = (products - code * residue) / variance.clamp(min=0.5 / self.count)
        zero = rounded(grid.zero + grid.scale * (residue - slope * code), self.dtype)
        moved = (grid.zero - zero) / grid.scale
        growth = (products + moved * code) / code_squares.clamp(min=1 / self.count)
        return self._grid(grid.scale * (1 + growth), zero)

    def _stretched(self, grid: _Grid, moments: Tensor) -> _Grid:
        """The grid on which the codes have the same variance as the states, and the same mean.

        Least squares shrinks the variance by the fraction that is lost in rounding, and so flattens the attention.
        """
        code, residue, code_squares, products, residue_squares = moments
        covariance = products - code * residue
        residue_variance = residue_squares - residue.square()
        variance = code_squares - code.square()
        stretch = (covariance + residue_variance) / (variance + covariance).clamp(min=1 / self.count)
        scale = grid.scale * (1 + stretch.clamp(0, LARGEST_STRETCH))
        mean = grid.scale * (code + residue)
        stored = self._grid(scale, grid.zero + (mean - scale * code))
        # If the bias is large, rounding moves the zero by a part of a step: the scale makes up for it to keep the mean.
        exact = (mean + (grid.zero - stored.zero)) / code.clamp(min=1 / self.count)
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

    @property
    @override
    def kernel_search(self) -> KernelSearch:
        return KernelSearch(largest_state=LARGEST_STATE)


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
