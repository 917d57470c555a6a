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

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.kernels.codes.cpu_packing import LIBRARY
from kvlayers.kernels.codes.groups import (
    GROUP_DIMS,
    grouped,
    rotate,
    rotation_size,
    rounded,
    smallest_positive,
    ungrouped,
)
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

CLIP_STEPS = {1: 0.1, 2: 0.07, 3: 0.04, 4: 0.03, 5: 0.0125, 6: 0.005, 8: 0.0}
"""For each width of a code, the fraction of the range by whose multiples it is cut off at either end."""

REFITS = 2
"""How often the best range is fitted to its own codes."""

LARGEST_STRETCH = 0.5
"""The most by which the least-squares scale is stretched, as a fraction of it."""

LARGEST_STATE = 2.0**124
"""States up to this size are far from overflow in float32."""

CPU_STATES_AT_ONCE = 1 << 20
"""States that are quantized at once: their intermediate results fit into the last cache of a CPU."""

ACCELERATOR_STATES_AT_ONCE = 1 << 24
"""States that are quantized at once on other devices, where every operation has to be launched."""


@dataclass(frozen=True)
class _Grid:
    """Scale and zero of each group as they are stored: float32 numbers that the dtype of the states can hold."""

    scale: Tensor
    zero: Tensor

    def where(self, condition: Tensor, other: "_Grid") -> "_Grid":
        return _Grid(torch.where(condition, self.scale, other.scale), torch.where(condition, self.zero, other.zero))


@dataclass(frozen=True)
class _Coded:
    """Codes and their residues, both float32 in units of the scale."""

    codes: Tensor
    residue: Tensor


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
        tokens = states.shape[-2]
        at_once = CPU_STATES_AT_ONCE if states.device.type == "cpu" else ACCELERATOR_STATES_AT_ONCE
        step = at_once * tokens // max(1, states.numel())
        step = max(1, step // self.format.group_tokens) * self.format.group_tokens
        pieces = [self._quantize_piece(states[..., start : start + step, :]) for start in range(0, tokens, step)]
        if len(pieces) == 1:
            return pieces[0]
        parts = ((piece.codes, piece.scale, piece.zero) for piece in pieces)
        codes, scale, zero = zip(*parts, strict=True)
        return QuantizedGroups(torch.cat(codes, -2), torch.cat(scale, -2), torch.cat(zero, -2))

    def _quantize_piece(self, states: Tensor) -> QuantizedGroups:
        limit = min(torch.finfo(states.dtype).max, LARGEST_STATE)
        exact = states.float()
        if self.format.rotated:
            limit /= rotation_size(states.shape[-1]) ** 0.5
            exact = rotate(exact.clamp(-limit, limit))
        else:
            exact = exact.clamp(-limit, limit)
        clip_step = self.kernel_search.clip_step
        grid, float_codes = _GridSearch(grouped(exact, self.format), self.format.bits, states.dtype, clip_step).best()
        codes = ungrouped(float_codes).to(torch.uint8)
        scale, zero = (numbers.squeeze(-1).squeeze(-2).to(states.dtype) for numbers in (grid.scale, grid.zero))
        return QuantizedGroups(codes, scale, zero)


class _Sums:
    """Moments of the codes and of the residues of each group, in units of the scale."""

    def __init__(self, coded: _Coded, count: int) -> None:
        self.mean_code = coded.codes.sum(GROUP_DIMS, keepdim=True) / count
        self.mean_residue = coded.residue.sum(GROUP_DIMS, keepdim=True) / count
        self.squares = coded.codes.square().sum(GROUP_DIMS, keepdim=True) / count
        self.products = (coded.codes * coded.residue).sum(GROUP_DIMS, keepdim=True) / count
        self.variance = self.squares - self.mean_code.square()
        self.covariance = self.products - self.mean_code * self.mean_residue
        self.slope = self.covariance / self.variance.clamp(min=0.5 / count)


class _GridSearch:
    """Finds the grid of each group that has the smallest squared error.

    Args:
        states: float32, by groups.
        bits: width of a code.
        dtype: dtype that scale and zero are stored in.
        clip_step: ranges are tried from which multiples of this fraction of the range are cut off.
    """

    def __init__(self, states: Tensor, bits: int, dtype: torch.dtype, clip_step: float) -> None:
        self.states = states
        self.clip_step = clip_step
        self.bits = bits
        self.dtype = dtype
        self.top = 2**bits - 1
        self.count = states.shape[-3] * states.shape[-1]
        self.lowest = states.amin(GROUP_DIMS, keepdim=True)
        # The range itself may exceed the largest float32.
        self.step = states.amax(GROUP_DIMS, keepdim=True) / self.top - self.lowest / self.top

    def best(self) -> tuple[_Grid, Tensor]:
        """The grid of each group, and codes, float32 as the states."""
        best = self._grid(self.step, self.lowest)
        if not self.clip_step:
            return best, self._code(best).codes
        unit = best.scale
        least = self._error(best, self._code(best), unit)
        even = torch.zeros_like(unit)
        for clips in (CLIPS[:5], CLIPS[5:]):
            start = even
            for steps in clips:
                below, above = ((start + count * self.clip_step).clamp(min=0) for count in steps)
                grid = self._clipped(below, above)
                error = self._error(grid, self._code(grid), unit)
                even = torch.where(error < least, below, even)
                best, least = grid.where(error < least, best), torch.minimum(error, least)
        grid, coded = best, self._code(best)
        for _ in range(REFITS):
            grid = self._refit(grid, coded)
            coded = self._code(grid)
            error = self._error(grid, coded, unit)
            best, least = grid.where(error < least, best), torch.minimum(error, least)
        coded = self._code(best)
        return self._stretched(best, coded), coded.codes

    def _code(self, grid: _Grid) -> _Coded:
        exact = (self.states - grid.zero).div_(grid.scale)
        codes = exact.round().clamp_(0, self.top)
        return _Coded(codes, exact.sub_(codes))

    def _clipped(self, below: Tensor, above: Tensor) -> _Grid:
        """The grid of the range of which these fractions are cut off."""
        return self._grid(self.step * (1 - below - above), self.lowest + self.step * (self.top * below))

    def _error(self, grid: _Grid, coded: _Coded, unit: Tensor) -> Tensor:
        """Squared error of each group, in units of `unit`, because squares of the largest states would overflow."""
        return coded.residue.square().sum(GROUP_DIMS, keepdim=True) * (grid.scale / unit).square()

    def _refit(self, grid: _Grid, coded: _Coded) -> _Grid:
        """The least-squares grid for the codes: first the zero, then the scale that suits the stored zero."""
        sums = _Sums(coded, self.count)
        zero = rounded(grid.zero + grid.scale * (sums.mean_residue - sums.slope * sums.mean_code), self.dtype)
        moved = (grid.zero - zero) / grid.scale
        growth = (sums.products + moved * sums.mean_code) / sums.squares.clamp(min=1 / self.count)
        return self._grid(grid.scale * (1 + growth), zero)

    def _stretched(self, grid: _Grid, coded: _Coded) -> _Grid:
        """The grid on which the codes have the same variance as the states, and the same mean.

        Least squares shrinks the variance by the fraction that is lost in rounding, and so flattens the attention.
        """
        sums = _Sums(coded, self.count)
        residue_variance = (
            coded.residue.square().sum(GROUP_DIMS, keepdim=True) / self.count - sums.mean_residue.square()
        )
        stretch = (sums.covariance + residue_variance) / (sums.variance + sums.covariance).clamp(min=1 / self.count)
        scale = grid.scale * (1 + stretch.clamp(0, LARGEST_STRETCH))
        mean = grid.scale * (sums.mean_code + sums.mean_residue)
        stored = self._grid(scale, grid.zero + (mean - scale * sums.mean_code))
        # If the bias is large, rounding moves the zero by a part of a step: the scale makes up for it to keep the mean.
        exact = (mean + (grid.zero - stored.zero)) / sums.mean_code.clamp(min=1 / self.count)
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
