"""What turns a block of states into codes: the contract of a quantizer, and of the backend that makes it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..errors import OptionError

Side = Literal["keys", "values"]


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
    """

    name: str
    widths: tuple[int, ...]
    axes: tuple[int, ...] = ()

    def check(self, options: SideOptions) -> None:
        """Raise `OptionError` where the backend does not take the options. Also where its package is missing."""
        if options.nbits not in self.widths:
            raise OptionError(
                f"expected nbits of the {self.name} backend to be one of {', '.join(map(str, self.widths))}, but saw "
                f"{options.nbits!r} for {options.side}."
            )
        if options.axis is not None and options.axis not in self.axes:
            taken = f"to be one of {', '.join(map(str, self.axes))}" if self.axes else "to be left out"
            raise OptionError(
                f"expected {options.axis_name} of the {self.name} backend {taken}, but saw {options.axis!r}."
            )
        size = options.group_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise OptionError(f"expected a group size of at least 1, but saw {size!r} for {options.side}.")

    @abstractmethod
    def quantizer(self, options: SideOptions, head_dim: int) -> Quantizer:
        """A quantizer for states of a head_dim.

        Raises:
            OptionError: the group size does not divide the head_dim.
        """


def channel_group(options: SideOptions, head_dim: int) -> int:
    """Channels in a group along head_dim: the size that was asked for, or the largest divisor up to 64.

    Raises:
        OptionError: the size does not divide the head_dim.
    """
    if options.group_size is None:
        return max(size for size in range(1, min(head_dim, DEFAULT_GROUP_SIZE) + 1) if head_dim % size == 0)
    if head_dim % options.group_size:
        divisors = [size for size in range(1, head_dim + 1) if head_dim % size == 0]
        raise OptionError(
            f"expected a group size that divides the head_dim {head_dim} of the {options.side} "
            f"({', '.join(map(str, divisors))}), but saw {options.group_size}."
        )
    return options.group_size
