"""Codes computed by HQQ, as in transformers."""

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

BLOCK_TOKENS = 64
"""Tokens of a sequence that are passed to HQQ at once. HQQ stops when their mean error no longer falls, so this number
affects the codes."""


def _hqq() -> Any:
    return required("hqq.core.quantize", package="hqq", backend="hqq", extra="hqq")


class HQQQuantizer(Quantizer):
    """Affine codes by half-quadratic quantization (https://dropbox.github.io/hqq_blog/), from the package `hqq`.

    Args:
        code_format: the meaning of the codes.
    """

    def __init__(self, code_format: CodeFormat) -> None:
        super().__init__(code_format)
        self._package = _hqq().Quantizer
        self._block = code_format.group_tokens if code_format.group_tokens > 1 else BLOCK_TOKENS

    def quantize(self, states: Tensor) -> QuantizedGroups:
        """Quantize `[batch, kv_heads, tokens, head_dim]` in blocks of 64 tokens, or of one group of tokens."""
        sequences = [
            [self._quantize_block(block) for block in torch.split(sequence, self._block, dim=-2)]
            for sequence in torch.split(states, 1)
        ]
        codes, scale, zero = (
            torch.cat([torch.cat([block[part] for block in blocks], -2) for blocks in sequences]) for part in range(3)
        )
        return QuantizedGroups(codes, scale, zero)

    def _quantize_block(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = one_group_a_row(states, self.format)
        along_rows = self.format.group_tokens == 1
        found, facts = self._package.quantize(
            rows if along_rows else rows.t().contiguous(),
            nbits=self.format.bits,
            group_size=rows.shape[1],
            axis=1 if along_rows else 0,
            bitpack=False,
            compute_dtype=states.dtype,
            device=states.device,
        )
        codes = (found if along_rows else found.t().contiguous()).to(torch.uint8)
        scale = facts["scale"].to(states.dtype)
        zero = -(facts["zero"].float() * scale.float()).to(states.dtype)
        made = from_rows(codes, scale, zero, states.shape, self.format)
        return made.codes, made.scale, zero.view(made.scale.shape)


@register_quantizer("hqq")
class HQQBackend(Backend):
    """HQQ. Groups are neighbouring channels of a token for axis 1, neighbouring tokens of a channel for axis 0."""

    name = "hqq"
    widths = (1, 2, 3, 4, 8)
    axes = (0, 1)
    default_axis = 1

    def check(self, options: SideOptions) -> None:
        """Raise `OptionError` if HQQ does not take the options, or hqq is missing."""
        super().check(options)
        _hqq()

    def quantizer(self, options: SideOptions, head_dim: int) -> HQQQuantizer:
        """A quantizer for keys, or values, of a head_dim.

        Raises:
            OptionError: HQQ does not take the options, or hqq is missing.
        """
        self.check(options)
        if options.axis == 0:
            return HQQQuantizer(CodeFormat(options.nbits, options.group_size or DEFAULT_GROUP_SIZE, 1))
        return HQQQuantizer(CodeFormat(options.nbits, 1, channel_group(options, head_dim)))
