"""Codes computed by optimum-quanto, as in transformers."""

from typing import Any

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
from kvlayers.quantizers.grouping import from_rows, one_group_a_row
from kvlayers.quantizers.packages import required
from kvlayers.quantizers.registry import register_quantizer


def _quanto() -> Any:
    return required("optimum.quanto", package="optimum-quanto", backend="quanto", extra="quanto")


class QuantoQuantizer(Quantizer):
    """Affine codes from the smallest to the largest state of a group, by the `MaxOptimizer` of optimum-quanto.

    Args:
        code_format: the meaning of the codes.
    """

    def __init__(self, code_format: CodeFormat) -> None:
        super().__init__(code_format)
        quanto = _quanto()
        self._width = {2: quanto.qint2, 4: quanto.qint4}[code_format.bits]
        self._optimizer = quanto.MaxOptimizer()

    def quantize(self, states: Tensor) -> QuantizedGroups:
        """Quantize `[batch, kv_heads, tokens, head_dim]`."""
        rows = one_group_a_row(states, self.format)
        scale, shift = self._scale_and_shift(rows)
        if states.dtype == torch.float16 and not bool(scale.isfinite().all()):
            # Quanto subtracts in the dtype of the states, in which the range of a group may be infinite.
            rows = rows.float()
            scale, shift = self._scale_and_shift(rows)
        codes: Tensor = torch.ops.quanto.quantize_affine(
            rows, bits=self.format.bits, axis=0, group_size=None, scale=scale, shift=shift
        )
        return from_rows(codes, scale.to(states.dtype), -shift.to(states.dtype), states.shape, self.format)

    def _scale_and_shift(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        # Not the optimizer's `__call__`, which treats a block of one group as one without groups.
        scale, shift = self._optimizer.optimize(rows, self._width, 0)
        return scale, shift


@register_quantizer("quanto")
class QuantoBackend(Backend):
    """optimum-quanto. Groups are neighbouring channels of a token (axis 0) or neighbouring tokens of a channel (-1)."""

    name = "quanto"
    widths = (2, 4)
    axes = (0, -1)
    default_axis = 0

    def check(self, options: SideOptions) -> None:
        """Raise `OptionError` if quanto does not take the options, or optimum-quanto is missing."""
        super().check(options)
        _quanto()

    def quantizer(self, options: SideOptions, head_dim: int) -> QuantoQuantizer:
        """A quantizer for keys, or values, of a head_dim.

        Raises:
            OptionError: quanto does not take the options, or optimum-quanto is missing.
        """
        self.check(options)
        if options.axis == -1:
            return QuantoQuantizer(CodeFormat(options.nbits, options.group_size or DEFAULT_GROUP_SIZE, 1))
        return QuantoQuantizer(CodeFormat(options.nbits, 1, channel_group(options, head_dim)))
