"""KIVI (Liu et al. 2024, https://arxiv.org/abs/2402.02750): keys by channel, values by token, without a rotation.

Each group is divided into equal steps from its smallest to its largest state. As in the paper, groups have 32 states,
and the newest 128 tokens stay in full precision (`residual_length`).
"""

from typing_extensions import override

from kvlayers.quantizers.contract import Backend, CodeFormat, KernelSearch, SideOptions, channel_group
from kvlayers.quantizers.cpu.pack import LIBRARY
from kvlayers.quantizers.native import LARGEST_STATE, NativeQuantizer
from kvlayers.quantizers.registry import register_quantizer

GROUP_SIZE = 32


class KiviQuantizer(NativeQuantizer):
    """Affine codes of the whole range of each group.

    Args:
        code_format: the meaning of the codes.
    """

    @property
    @override
    def range_search(self) -> KernelSearch:
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
        if options.side == "keys":
            return KiviQuantizer(CodeFormat(options.nbits, options.group_size or GROUP_SIZE, 1))
        return KiviQuantizer(CodeFormat(options.nbits, 1, channel_group(options, head_dim, GROUP_SIZE)))
