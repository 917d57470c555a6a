"""Codes that are float8 numbers.

After the fp8 layer of transformers, which has one scale for a whole layer and never changes it: here each group has its
own, so that no state is ever clipped.
"""

import torch
from torch import Tensor

from kvlayers.quantizers.contract import (
    DEFAULT_GROUP_SIZE,
    Backend,
    CodeFormat,
    QuantizedGroups,
    Quantizer,
    SideOptions,
    channel_group,
)
from kvlayers.quantizers.grouping import GROUP_DIMS, grouped, smallest_positive, ungrouped
from kvlayers.quantizers.registry import register_quantizer

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Fp8Quantizer(Quantizer):
    """Float8 (e4m3fn) codes. The largest state of a group becomes the largest float8, or just below it.

    Args:
        code_format: what the codes mean.
    """

    def quantize(self, states: Tensor) -> QuantizedGroups:
        """Quantize `[batch, kv_heads, tokens, head_dim]`. The codes are the bytes of float8 numbers."""
        groups = grouped(states, self.format)
        scale = _rounded_up(groups.abs().amax(GROUP_DIMS, keepdim=True).float() / LARGEST, states.dtype)
        # Beyond the largest float8 there is no number, and a quotient may be that far off by rounding.
        codes = (groups.float() / scale.float()).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return QuantizedGroups(ungrouped(codes.view(torch.uint8)), scale.squeeze(-1).squeeze(-2), None)


def _rounded_up(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive float32 numbers in a dtype, none smaller than it was by more than the dtype needs to hold the states."""
    nearest = numbers.to(dtype)
    one_more_bit = numbers * (1 + torch.finfo(dtype).eps)
    above = torch.where(nearest.float() < numbers, one_more_bit.to(dtype), nearest)
    return above.clamp(smallest_positive(dtype), _largest_scale(dtype))


def _largest_scale(dtype: torch.dtype) -> float:
    """The largest scale by which the largest float8 is still a finite number of a dtype."""
    numbers = torch.finfo(dtype)
    return numbers.max / LARGEST * (1 - numbers.eps)


@register_quantizer("fp8")
class Fp8Backend(Backend):
    """Float8 codes, with a scale for every 64 neighbouring tokens of a key channel and for the channels of a value."""

    name = "fp8"
    widths = (8,)

    def quantizer(self, options: SideOptions, head_dim: int) -> Fp8Quantizer:
        """A quantizer for keys, or values, of a head_dim.

        Raises:
            OptionError: the options are not ones that fp8 takes.
        """
        self.check(options)
        if options.side == "keys":
            return Fp8Quantizer(CodeFormat(8, options.group_size or DEFAULT_GROUP_SIZE, 1, floating=True))
        return Fp8Quantizer(CodeFormat(8, 1, channel_group(options, head_dim), floating=True))
