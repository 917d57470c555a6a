"""NormalFloat codes of 4 bits, from QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314).

The 16 levels are quantiles of a normal number, divided by the largest, with an exact zero: each is used about as often
if states are normal. The scale of a group is its largest magnitude.
"""

import functools
from statistics import NormalDist

from torch import Tensor

from kvlayers.quantizers.codebook import nearest_levels
from kvlayers.quantizers.contract import (
    DEFAULT_GROUP_SIZE,
    Backend,
    CodeFormat,
    QuantizedGroups,
    Quantizer,
    SideOptions,
    channel_group,
)
from kvlayers.quantizers.grouping import GROUP_DIMS, grouped
from kvlayers.quantizers.registry import register_quantizer

LARGEST_QUANTILE = (1 - 1 / 32 + 1 - 1 / 30) / 2
"""The paper's mean of the outermost quantiles of 16 and of 15 equal parts."""


@functools.cache
def normal_float_levels() -> tuple[float, ...]:
    """The 16 levels, in rising order: seven below zero, zero, and eight above it."""
    quantile = NormalDist().inv_cdf
    largest = quantile(LARGEST_QUANTILE)

    def above_zero(count: int) -> list[float]:
        """Quantiles at `count` equal distances from the median to the largest, in units of the largest."""
        width = (LARGEST_QUANTILE - 0.5) / count
        return [*(quantile(0.5 + width * step) / largest for step in range(1, count)), 1.0]

    return (*(-level for level in reversed(above_zero(7))), 0.0, *above_zero(8))


class NF4Quantizer(Quantizer):
    """NormalFloat codes.

    Args:
        code_format: the meaning of the codes.
    """

    smooths_keys = True

    def quantize(self, states: Tensor) -> QuantizedGroups:
        """Quantize `[batch, kv_heads, tokens, head_dim]`. The state of the largest magnitude loses nothing if it is
        positive, or negative: the outermost levels are 1 and -1."""
        groups = grouped(states.float(), self.format)
        scale = groups.abs().amax(GROUP_DIMS, keepdim=True).to(states.dtype)
        return nearest_levels(groups, scale, self.format)


@register_quantizer("nf4")
class NF4Backend(Backend):
    """Keys by 64 neighbouring tokens of a channel, values by the channels of a token."""

    name = "nf4"
    widths = (4,)
    has_zero = False

    def quantizer(self, options: SideOptions, head_dim: int) -> NF4Quantizer:
        """A quantizer for keys, or values, of a head_dim.

        Raises:
            OptionError: the backend does not take the options.
        """
        self.check(options)
        levels = normal_float_levels()
        if options.side == "keys":
            return NF4Quantizer(CodeFormat(4, options.group_size or DEFAULT_GROUP_SIZE, 1, levels=levels))
        return NF4Quantizer(CodeFormat(4, 1, channel_group(options, head_dim), levels=levels))
