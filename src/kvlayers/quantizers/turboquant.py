"""TurboQuant (Zandieh et al. 2025, https://arxiv.org/abs/2504.19874), without its second stage.

A rotated vector has coordinates that are nearly normal, whatever the vector is. So one codebook, the best for a normal
number (Lloyd 1982, Max 1960), serves all of them, and only the norm of a vector is stored beside its codes. The
rotation is that of `hadamard`. The paper's second stage spends one more bit of each coordinate on the signs of a
projection of the residue, for unbiased products.
"""

import torch
from torch import Tensor

from kvlayers.errors import OptionError
from kvlayers.quantizers.codebook import gaussian_levels, nearest_levels
from kvlayers.quantizers.contract import Backend, CodeFormat, QuantizedGroups, Quantizer, SideOptions
from kvlayers.quantizers.grouping import GROUP_DIMS, grouped, smallest_positive
from kvlayers.quantizers.hadamard import rotate, rotation_size
from kvlayers.quantizers.native import LARGEST_STATE
from kvlayers.quantizers.registry import register_quantizer


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
                "The turboquant backend has one scale for each vector: leave out the group size, got "
                f"{options.group_size!r} for {options.side}."
            )

    def quantizer(self, options: SideOptions, head_dim: int) -> TurboQuantizer:
        """A quantizer for keys, or values, of a head_dim.

        Raises:
            OptionError: the backend does not take the options.
        """
        self.check(options)
        levels = gaussian_levels(options.nbits)
        return TurboQuantizer(CodeFormat(options.nbits, 1, head_dim, rotated=True, levels=levels))
