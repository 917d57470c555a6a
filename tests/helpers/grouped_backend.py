"""A quantizer of formats that the native one does not have, such as a scale for each token, without other packages."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import kvlayers
from kvlayers.kernels.codes.groups import GROUP_DIMS, grouped, ungrouped
from kvlayers.kernels.codes.quantizer_contract import Backend, CodeFormat, QuantizedGroups, Quantizer, SideOptions

NAME = "grouped"


class GroupedQuantizer(Quantizer):
    """Codes from the least to the greatest state of each group."""

    def quantize(self, states: Tensor) -> QuantizedGroups:
        """See `Quantizer.quantize`."""
        groups = grouped(states.float(), self.format)
        top = 2**self.format.bits - 1
        least = groups.amin(GROUP_DIMS, keepdim=True)
        scale = ((groups.amax(GROUP_DIMS, keepdim=True) - least) / top).clamp(min=1e-4)
        codes = ((groups - least) / scale).round().clamp(0, top)
        scale, least = (numbers.squeeze(-1).squeeze(-2).to(states.dtype) for numbers in (scale, least))
        return QuantizedGroups(ungrouped(codes).to(torch.uint8), scale, least)


class GroupedBackend(Backend):
    """Groups of neighbouring tokens of a channel for axis 0, of neighbouring channels of a token for axis 1."""

    name = NAME
    widths = (2, 4, 8)
    axes = (0, 1)
    default_axis = 1

    def quantizer(self, options: SideOptions, head_dim: int) -> GroupedQuantizer:
        """See `Backend.quantizer`."""
        self.check(options)
        size = options.group_size or min(64, head_dim)
        tokens, channels = (size, 1) if options.axis == 0 else (1, size)
        return GroupedQuantizer(CodeFormat(options.nbits, tokens, channels))


@contextmanager
def registered() -> Iterator[None]:
    """The backend has a name for the length of a block."""
    kvlayers.quantizers.register_quantizer(NAME)(GroupedBackend)
    try:
        yield
    finally:
        kvlayers.quantizers.unregister_quantizer(NAME)
