"""A quantizer of one bit."""

from typing import Any

import torch
from torch import Tensor

from kvlayers.quantizers import Backend, CodeFormat, QuantizedGroups, Quantizer


class HalvesBackend(Backend):
    """Two codes for each group: the least state of it, or the greatest."""

    name = "halves"
    widths = (1,)

    def quantizer(self, options: Any, head_dim: int) -> Quantizer:
        return HalvesQuantizer(CodeFormat(1, 1, head_dim))


class HalvesQuantizer(Quantizer):
    """Rounds a state to the nearer end of its group's range."""

    def quantize(self, states: Tensor) -> QuantizedGroups:
        low, high = states.amin(-1, keepdim=True), states.amax(-1, keepdim=True)
        codes = (states > (low + high) / 2).to(torch.uint8)
        return QuantizedGroups(codes, high - low, low)
