"""Codes that look up a level in a codebook: the level nearest to each state, in units of the scale of its group.

NormalFloat codes of 4 bits are from QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314). The 16 levels are
quantiles of a normal number, divided by the largest, with an exact zero: each is used about as often if states are
normal. The scale of a group is its largest magnitude.

TurboQuant (Zandieh et al. 2025, https://arxiv.org/abs/2504.19874) is here without its second stage. A rotated vector
has coordinates that are nearly normal, whatever the vector is. So one codebook, the best for a normal number (Lloyd
1982, Max 1960), serves all of them, and only the norm of a vector is stored beside its codes. The paper's second stage
spends one more bit of each coordinate on the signs of a projection of the residue, for unbiased products.
"""

import torch
from torch import Tensor

from kvlayers.errors import OptionError
from kvlayers.kernels.codes.groups import GROUP_DIMS, grouped, rotate, rotation_size, smallest_positive, ungrouped
from kvlayers.kernels.codes.quantizer_contract import (
    Backend,
    CodeFormat,
    QuantizedGroups,
    Quantizer,
    SideOptions,
    groups_for,
    register_quantizer,
)
from kvlayers.quantized.quantizers.native import LARGEST_STATE


def nearest_levels(groups: Tensor, scale: Tensor, code_format: CodeFormat) -> QuantizedGroups:
    """The codes of the nearest levels.

    Args:
        groups: float32 states by groups, as `grouped` gives them.
        scale: of each group, in the dtype of the states, with the last dimensions `[1, groups, 1]` of `groups`.
        code_format: the format, with its levels in rising order.
    """
    levels = torch.tensor(code_format.levels, dtype=torch.float32, device=groups.device)
    # A group of zeros has the scale 0, which takes all levels to 0.
    units = groups / scale.float().clamp(min=smallest_positive(torch.float32))
    codes = torch.bucketize(units.contiguous(), (levels[1:] + levels[:-1]) / 2)
    return QuantizedGroups(ungrouped(codes.to(torch.uint8)), scale.squeeze(-1).squeeze(-2), None)


GAUSSIAN_LEVELS = {
    1: (0.7978845608028654,),
    2: (0.4527800352846405, 1.51041760983732),
    3: (0.24509417719662997, 0.756005276433696, 1.3439092719940869, 2.151945698110019),
    4: (
        *(0.12839502608909783, 0.3880482884786794, 0.6567591010738018, 0.9423404338515167),
        *(1.2562311711835066, 1.6180463582585474, 2.069017199319697, 2.732589546908619),
    ),
}
"""For each width, the upper half of the levels with the least mean squared error for a standard normal number (Lloyd,
Max): each is the mean of the numbers that are nearest to it. The lower half are their negatives."""

NORMAL_FLOAT_LEVELS = (
    *(-1.0, -0.6961928056323436, -0.5250729594465011, -0.39491742591990747),
    *(-0.28444130892108244, -0.18477340280045582, -0.09104997598578062, 0.0),
    *(0.07958031495840917, 0.16093014438029093, 0.24611225134745948, 0.3379151367131283),
    *(0.4407097318642165, 0.5626168879699854, 0.7229566441594739, 1.0),
)
"""Seven levels below zero, zero, and eight above it: quantiles of a normal number at as many equal distances from the
median to the largest one, in units of it. The largest is the paper's mean of the outermost quantiles of 16 and of 15
equal parts."""


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
        return NF4Quantizer(CodeFormat(4, *groups_for(options, head_dim), levels=NORMAL_FLOAT_LEVELS))


class TurboQuantizer(Quantizer):
    """Codes of the levels for a normal number. The scale is the root mean square of a vector.

    Args:
        code_format: the meaning of the codes.
    """

    smooths_keys = True

    def quantize(self, states: Tensor) -> QuantizedGroups:
        """Quantize `[batch, kv_heads, tokens, head_dim]`.

        States are clipped to half the largest number of the dtype, or to 2^123 if that is less, divided by the square
        root of the number of channels that are mixed.
        """
        limit = min(torch.finfo(states.dtype).max, LARGEST_STATE) / 2 / rotation_size(states.shape[-1]) ** 0.5
        groups = grouped(rotate(states.float().clamp(-limit, limit)), self.format)
        # Squares of the largest states would overflow, and those of the smallest vanish.
        largest = groups.abs().amax(GROUP_DIMS, keepdim=True).clamp(min=smallest_positive(torch.float32))
        scale = largest * (groups / largest).square().mean(GROUP_DIMS, keepdim=True).sqrt()
        return nearest_levels(groups, scale.to(states.dtype), self.format)


@register_quantizer("turboquant")
class TurboQuantBackend(Backend):
    """Rotated keys and values, with one scale for all channels of a token."""

    name = "turboquant"
    widths = (1, 2, 3, 4)
    has_zero = False

    def check(self, options: SideOptions) -> None:
        """Raise `OptionError` if the backend does not take the options."""
        super().check(options)
        if options.group_size is not None:
            raise OptionError(
                "The group size must be left out for turboquant, which has one scale for each vector, got "
                f"{options.group_size!r} for {options.side}: leave it out."
            )

    def quantizer(self, options: SideOptions, head_dim: int) -> TurboQuantizer:
        """A quantizer for keys, or values, of a head_dim.

        Raises:
            OptionError: the backend does not take the options.
        """
        self.check(options)
        above = GAUSSIAN_LEVELS[options.nbits]
        levels = (*(-level for level in reversed(above)), *above)
        return TurboQuantizer(CodeFormat(options.nbits, 1, head_dim, rotated=True, levels=levels))
