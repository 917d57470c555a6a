"""Codes that are float8 numbers.

The fp8 layer of transformers has one scale for a whole layer and never changes it. Here each group has its own scale,
so no state is ever clipped, unless the scales are those of a checkpoint (`checkpoint_scales`).
"""

import torch
from torch import Tensor

from kvlayers.kernels.codes.groups import (
    GROUP_DIMS,
    LARGEST_FLOAT8,
    grouped,
    largest_float8_scale,
    scales_by_head,
    smallest_positive,
    ungrouped,
)
from kvlayers.kernels.codes.quantizer_contract import (
    DEFAULT_GROUP_SIZE,
    Backend,
    CodeFormat,
    KernelSearch,
    QuantizedGroups,
    Quantizer,
    SideOptions,
    groups_for,
    register_quantizer,
)


class Fp8Quantizer(Quantizer):
    """Float8 (e4m3fn) codes. The largest state of a group becomes the largest float8, or just below it.

    Args:
        code_format: the meaning of the codes.
    """

    smooths_keys = True
    kernel_search = KernelSearch()

    def quantize(self, states: Tensor) -> QuantizedGroups:
        """Quantize `[batch, kv_heads, tokens, head_dim]`. The codes are the bytes of float8 numbers."""
        groups = grouped(states, self.format)
        scale = _rounded_up(groups.abs().amax(GROUP_DIMS, keepdim=True).float() / LARGEST_FLOAT8, states.dtype)
        # Rounding may make a quotient larger than the largest float8, which would have no code.
        codes = (groups.float() / scale.float()).clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn)
        return QuantizedGroups(ungrouped(codes.view(torch.uint8)), scale.squeeze(-1).squeeze(-2), None)


class FixedScaleFp8Quantizer(Quantizer):
    """Float8 (e4m3fn) codes of states divided by scales that never change. What exceeds the largest float8 is clipped.

    Args:
        code_format: the meaning of the codes, with `fixed_scales`. The scale of each group is 1.
    """

    def quantize(self, states: Tensor) -> QuantizedGroups:
        """Quantize `[batch, kv_heads, tokens, head_dim]`. The codes are the bytes of float8 numbers."""
        quotients = states.float() / scales_by_head(self.format, states)
        codes = quotients.clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn).view(torch.uint8)
        groups = grouped(states, self.format)
        return QuantizedGroups(codes, torch.ones_like(groups[..., :1, :, :1]).squeeze(-1).squeeze(-2), None)


def _rounded_up(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive float32 numbers in a dtype, rounded up, within the range that the dtype can hold."""
    nearest = numbers.to(dtype)
    one_more_bit = numbers * (1 + torch.finfo(dtype).eps)
    above = torch.where(nearest.float() < numbers, one_more_bit.to(dtype), nearest)
    return above.clamp(smallest_positive(dtype), largest_float8_scale(dtype))


@register_quantizer("fp8")
class Fp8Backend(Backend):
    """Float8 codes. 64 neighbouring tokens of a key channel share a scale, and so do the channels of a value."""

    name = "fp8"
    widths = (8,)
    has_zero = False
    takes_scales = True

    def quantizer(self, options: SideOptions, head_dim: int) -> Quantizer:
        """A quantizer for keys, or values, of a head_dim.

        Raises:
            OptionError: fp8 does not take the options.
        """
        self.check(options)
        if options.scales:
            group = (DEFAULT_GROUP_SIZE, 1) if options.side == "keys" else (1, head_dim)
            return FixedScaleFp8Quantizer(CodeFormat(8, *group, floating=True, fixed_scales=options.scales))
        return Fp8Quantizer(CodeFormat(8, *groups_for(options, head_dim), floating=True))
