"""What turns a block of states into codes: the contract of a quantizer, and of the backend that makes it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.upstream.deprecation import warn_the_caller

Side = Literal["keys", "values"]

WIDTHS = (1, 2, 3, 4, 8)
"""Bits that a code may have."""


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """What the codes of a quantizer mean: `state = scale * code + zero`, with one scale and zero for each group.

    Attributes:
        bits: width of a code: 1, 2, 3, 4 or 8.
        group_tokens: neighbouring tokens that share a scale and a zero.
        group_channels: neighbouring channels that share a scale and a zero. One of the two numbers is 1.
        floating: codes are float8 (e4m3fn) by their bytes, and there is no zero.
        rotated: what was quantized are the states after `hadamard.rotate`.
    """

    bits: int
    group_tokens: int
    group_channels: int
    floating: bool = False
    rotated: bool = False

    def __post_init__(self) -> None:
        sizes = (self.group_tokens, self.group_channels)
        if self.bits not in WIDTHS or not all(map(_is_whole, sizes)) or min(sizes) < 1 or 1 not in sizes:
            raise OptionError(
                f"expected codes of {', '.join(map(str, WIDTHS))} bits, in groups along tokens or along channels, but "
                f"saw {self.bits!r} bits in groups of {sizes[0]!r} tokens and {sizes[1]!r} channels."
            )
        if self.floating and self.bits != 8:
            raise OptionError(f"expected floating codes of 8 bits, but saw {self.bits}.")

    @property
    def parameters(self) -> int:
        """Numbers beside the codes of a group: scale and zero, or the scale alone."""
        return 1 if self.floating else 2


@dataclass(frozen=True)
class QuantizedGroups:
    """What a quantizer returns.

    Attributes:
        codes: uint8 `[batch, kv_heads, tokens, head_dim]`.
        scale: `[batch, kv_heads, tokens / group_tokens, head_dim / group_channels]`, in the dtype of the states.
        zero: as `scale`; `None` where the format is floating.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None


def check_groups(groups: QuantizedGroups, code_format: CodeFormat, states: Tensor) -> None:
    """Raise `StateMismatchError` where `groups` is not what quantizing `states` in a format gives.

    That codes are no larger than the format says is checked on a CPU alone, as elsewhere it would mean to wait.
    """
    batch, kv_heads, tokens, head_dim = states.shape
    grid = (batch, kv_heads, tokens // code_format.group_tokens, head_dim // code_format.group_channels)
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("codes", groups.codes, tuple(states.shape), torch.uint8),
        ("scale", groups.scale, grid, states.dtype),
    ]
    if not code_format.floating:
        expected.append(("zero", groups.zero, grid, states.dtype))
    for name, seen, shape, dtype in expected:
        if seen is None or tuple(seen.shape) != shape or seen.dtype != dtype or seen.device != states.device:
            shown = None if seen is None else f"{list(seen.shape)} of {seen.dtype} on {seen.device}"
            raise StateMismatchError(
                f"expected a quantizer to return {name} {list(shape)} of {dtype} on {states.device}, but saw {shown}: "
                "correct the quantizer."
            )
    largest = (1 << code_format.bits) - 1
    if largest < 255 and groups.codes.device.type == "cpu" and groups.codes.numel() and groups.codes.max() > largest:
        raise StateMismatchError(
            f"expected codes up to {largest}, for {code_format.bits} bits, but saw {int(groups.codes.max())}: correct "
            "the quantizer."
        )


class Quantizer(ABC):
    """Turns keys, or values, into codes. It keeps nothing of what it has seen.

    Args:
        code_format: what its codes mean.
    """

    def __init__(self, code_format: CodeFormat) -> None:
        self.format = code_format

    @abstractmethod
    def quantize(self, states: Tensor) -> QuantizedGroups:
        """Quantize states that are finite.

        Args:
            states: `[batch, kv_heads, tokens, head_dim]` of any floating dtype; tokens and head_dim are multiples of
                the group's.
        """


@dataclass(frozen=True, slots=True)
class SideOptions:
    """What was asked of the keys, or of the values.

    Attributes:
        side: which of the two.
        nbits: bits of a code.
        axis: the axis option of a backend, `None` for what the backend recommends.
        group_size: states that share a scale, `None` for what suits the head_dim.
    """

    side: Side
    nbits: int
    axis: int | None = None
    group_size: int | None = None

    @property
    def axis_name(self) -> str:
        """Name of the option that `axis` came from."""
        return "axis_key" if self.side == "keys" else "axis_value"


DEFAULT_GROUP_SIZE = 64


class Backend(ABC):
    """Makes quantizers.

    Attributes:
        name: the name that it is registered by.
        widths: bits that it takes.
        axes: values of `axis_key` and `axis_value` that it takes; empty where it has no such option.
        default_axis: the one of them that is meant if none is given.
    """

    name: str
    widths: tuple[int, ...]
    axes: tuple[int, ...] = ()
    default_axis: int | None = None

    def check(self, options: SideOptions) -> None:
        """Raise `OptionError` where the backend does not take the options. Also where its package is missing."""
        if not _is_whole(options.nbits) or options.nbits not in self.widths:
            raise OptionError(
                f"expected nbits of the {self.name} backend to be one of {', '.join(map(str, self.widths))}, but saw "
                f"{options.nbits!r} for {options.side}."
            )
        if options.axis is not None and (not _is_whole(options.axis) or options.axis not in self.axes):
            taken = f"to be one of {', '.join(map(str, self.axes))}" if self.axes else "to be left out"
            raise OptionError(
                f"expected {options.axis_name} of the {self.name} backend {taken}, but saw {options.axis!r}."
            )
        size = options.group_size
        if size is not None and (not _is_whole(size) or size < 1):
            raise OptionError(f"expected a group size of at least 1, but saw {size!r} for {options.side}.")

    @abstractmethod
    def quantizer(self, options: SideOptions, head_dim: int) -> Quantizer:
        """A quantizer for states of a head_dim.

        Raises:
            OptionError: the options are not ones that the backend takes.
        """


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def channel_group(options: SideOptions, head_dim: int) -> int:
    """Channels in a group along head_dim: the largest divisor of head_dim up to the size that was asked for, or to 64.

    It warns if that is another size than was asked for.
    """
    asked = options.group_size
    most = min(head_dim, DEFAULT_GROUP_SIZE if asked is None else asked)
    size = next(size for size in range(most, 0, -1) if head_dim % size == 0)
    if asked is not None and size != asked:
        warn_the_caller(
            f"expected a group size that divides the head_dim {head_dim} of the {options.side}, but saw {asked}: "
            f"groups of {size}, the largest smaller size that does, are used instead."
        )
    return size
