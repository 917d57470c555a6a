"""Codes computed by HQQ and by optimum-quanto, as in transformers."""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.errors import OptionError
from kvlayers.kernels.codes.groups import from_rows, one_group_a_row
from kvlayers.kernels.codes.quantizer_contract import (
    DEFAULT_GROUP_SIZE,
    Backend,
    CodeFormat,
    QuantizedGroups,
    Quantizer,
    SideOptions,
    channel_group,
    register_quantizer,
)

BLOCK_TOKENS = 64
"""Tokens of a sequence that are passed to HQQ at once. HQQ stops when their mean error no longer falls, so this number
affects the codes."""


class HQQQuantizer(Quantizer):
    """Affine codes by half-quadratic quantization (https://dropbox.github.io/hqq_blog/), from the package `hqq`.

    Args:
        code_format: the meaning of the codes.
    """

    def __init__(self, code_format: CodeFormat) -> None:
        super().__init__(code_format)
        self._package: Any = HQQBackend.package().Quantizer
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


class QuantoQuantizer(Quantizer):
    """Affine codes from the smallest to the largest state of a group, by the `MaxOptimizer` of optimum-quanto.

    Args:
        code_format: the meaning of the codes.
    """

    def __init__(self, code_format: CodeFormat) -> None:
        super().__init__(code_format)
        quanto: Any = QuantoBackend.package()
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

    def _scale_and_shift(self, rows: Tensor) -> Any:
        # Not the optimizer's `__call__`, which treats a block of one group as one without groups.
        return self._optimizer.optimize(rows, self._width, 0)


class _OtherPackage(Backend):
    """A backend whose codes another package computes, by groups of neighbouring channels or of neighbouring tokens.

    Attributes:
        module: what is imported of the package.
        pip_name: its name for pip. The extra of kvlayers that installs it has the name of the backend.
        axis_of_tokens: the axis for groups of neighbouring tokens of a channel.
        made: the class of its quantizers.
    """

    module: str
    pip_name: str
    axis_of_tokens: int
    made: type[Quantizer]

    @classmethod
    def package(cls) -> ModuleType:
        """The module.

        Raises:
            OptionError: it cannot be imported.
        """
        try:
            return importlib.import_module(cls.module)
        except ImportError as error:
            raise OptionError(
                f"The {cls.name} backend needs the package {cls.pip_name}, but importing {cls.module} failed "
                f'({error}): run `pip install {cls.pip_name}`, or `pip install ".[{cls.name}]"` in a checkout of '
                "kvlayers."
            ) from error

    @override
    def check(self, options: SideOptions) -> None:
        """Raise `OptionError` if the package does not take the options, or is missing."""
        super().check(options)
        self.package()

    @override
    def quantizer(self, options: SideOptions, head_dim: int) -> Quantizer:
        """A quantizer for keys, or values, of a head_dim.

        Raises:
            OptionError: the package does not take the options, or is missing.
        """
        self.check(options)
        along_tokens = options.axis == self.axis_of_tokens
        size = (options.group_size or DEFAULT_GROUP_SIZE, 1) if along_tokens else (1, channel_group(options, head_dim))
        return self.made(CodeFormat(options.nbits, *size))


@register_quantizer("hqq")
class HQQBackend(_OtherPackage):
    """HQQ. Groups are neighbouring channels of a token for axis 1, neighbouring tokens of a channel for axis 0."""

    name, module, pip_name = "hqq", "hqq.core.quantize", "hqq"
    widths = (1, 2, 3, 4, 8)
    axes = (0, 1)
    default_axis, axis_of_tokens = 1, 0
    made = HQQQuantizer


@register_quantizer("quanto")
class QuantoBackend(_OtherPackage):
    """optimum-quanto. Groups are neighbouring channels of a token (axis 0) or neighbouring tokens of a channel (-1)."""

    name, module, pip_name = "quanto", "optimum.quanto", "optimum-quanto"
    widths = (2, 4)
    axes = (0, -1)
    default_axis, axis_of_tokens = 0, -1
    made = QuantoQuantizer
