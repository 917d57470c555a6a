"""The contract of a quantizer, which turns a block of states into codes, and of the backend that makes it.

Backends have names, for the option `backend="..."`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.upstream.callers import warn_the_caller
from kvlayers.utils.native_library import NativeLibrary
from kvlayers.utils.registry import FactoryRegistry

Side = Literal["keys", "values"]

WIDTHS = (1, 2, 3, 4, 5, 6, 8)
"""Numbers of bits that a code may have. A new width needs its planes in `groups`, and in the kernel for CPUs."""

MOST_CODEBOOK_BITS = 4
"""The widest code that may look up a level: kernels hold a codebook in registers."""


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """The meaning of codes: `state = scale * code + zero`, with one scale and one zero for each group.

    Codes of float8 numbers, and codes that look up a level in a codebook, have no zero: `state = scale * level`.

    Attributes:
        bits: width of a code, one of `WIDTHS`.
        group_tokens: neighbouring tokens that share a scale and a zero.
        group_channels: neighbouring channels that share a scale and a zero. One of the two numbers is 1.
        floating: whether codes are the bytes of float8 numbers (e4m3fn), without a zero.
        rotated: whether the states were rotated by `groups.rotate` before they were quantized.
        levels: the codebook: the number that each code stands for, before the scale. Empty if a code stands for itself.
        fixed_scales: float32 factors of float8 numbers, before the scale of the group, that never change: one for all
            KV heads or one for each. Empty if there are none.
    """

    bits: int
    group_tokens: int
    group_channels: int
    floating: bool = False
    rotated: bool = False
    levels: tuple[float, ...] = ()
    fixed_scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        sizes = (self.group_tokens, self.group_channels)
        if self.bits not in WIDTHS or not all(map(_is_whole, sizes)) or min(sizes) < 1 or 1 not in sizes:
            raise OptionError(
                f"Codes must have {', '.join(map(str, WIDTHS))} bits, in groups along tokens or along channels, got "
                f"{self.bits!r} bits in groups of {sizes[0]!r} tokens and {sizes[1]!r} channels."
            )
        if self.floating and self.bits != 8:
            raise OptionError(f"Floating codes must have 8 bits, got {self.bits}.")
        if self.fixed_scales and not self.floating:
            raise OptionError("Only floating codes may have fixed scales.")
        if self.levels and (self.floating or self.bits > MOST_CODEBOOK_BITS or len(self.levels) != 1 << self.bits):
            raise OptionError(
                f"A codebook must have a level for each code of at most {MOST_CODEBOOK_BITS} bits, got "
                f"{len(self.levels)} levels for {'floating ' * self.floating}codes of {self.bits} bits."
            )

    @property
    def parameters(self) -> int:
        """Parameters of a group: scale and zero, or only the scale."""
        return 2 if self.has_zero else 1

    @property
    def has_zero(self) -> bool:
        """Whether a group has a zero, which is added to its states."""
        return not self.floating and not self.levels

    def check_heads(self, kv_heads: int) -> None:
        """Raise `StateMismatchError` if there are fixed scales for another number of KV heads."""
        if self.fixed_scales and not fits_heads(len(self.fixed_scales), kv_heads):
            raise StateMismatchError(
                f"The fixed scales of codes must be one number, or one for each of {kv_heads} KV heads, got "
                f"{len(self.fixed_scales)}: give scales for these heads."
            )


def fits_heads(scales: int, kv_heads: int) -> bool:
    """Whether this number of scales is one for all KV heads, or one for each."""
    return scales in (1, kv_heads)


@dataclass(frozen=True)
class QuantizedGroups:
    """The codes, scales and zeros that a quantizer returns.

    Attributes:
        codes: uint8 `[batch, kv_heads, tokens, head_dim]`.
        scale: `[batch, kv_heads, tokens / group_tokens, head_dim / group_channels]`, in the dtype of the states.
        zero: as `scale`; `None` if the format has no zero.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None


def check_groups(groups: QuantizedGroups, code_format: CodeFormat, states: Tensor) -> None:
    """Raise `StateMismatchError` if `groups` do not have the shapes and dtypes of `states` in a format.

    The largest code is checked only on a CPU, because on other devices the host would have to wait for it.
    """
    batch, kv_heads, tokens, head_dim = states.shape
    grid = (batch, kv_heads, tokens // code_format.group_tokens, head_dim // code_format.group_channels)
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("codes", groups.codes, tuple(states.shape), torch.uint8),
        ("scale", groups.scale, grid, states.dtype),
    ]
    if code_format.has_zero:
        expected.append(("zero", groups.zero, grid, states.dtype))
    for name, seen, shape, dtype in expected:
        if seen is None or tuple(seen.shape) != shape or seen.dtype != dtype or seen.device != states.device:
            shown = None if seen is None else f"{list(seen.shape)} of {seen.dtype} on {seen.device}"
            raise StateMismatchError(
                f"A quantizer must return {name} {list(shape)} of {dtype} on {states.device}, got {shown}: correct the "
                "quantizer."
            )
    largest = (1 << code_format.bits) - 1
    if largest < 255 and groups.codes.device.type == "cpu" and groups.codes.numel() and groups.codes.max() > largest:
        raise StateMismatchError(
            f"A quantizer of {code_format.bits} bits must return codes up to {largest}, got {int(groups.codes.max())}: "
            "correct the quantizer."
        )


CLIPS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (1, -1), (-1, 1), (-1, 0), (0, -1), (0.5, 0.5))
"""Ranges that are tried, by the steps that are cut off below and above: as many at both ends, and then so many more
than in the best of these five.

On groups of 64 normal states, these ten ranges leave 1.008 of the squared error that all 25 pairs leave at 4 bits, and
1.012 at 2 bits. Five other neighbours leave more.
"""


@dataclass(frozen=True, slots=True)
class KernelSearch:
    """How the kernels of this package find the codes of a quantizer; see `native`.

    Attributes:
        clip_step: ranges are tried from which multiples of this fraction of the whole range are cut off: see
            `CLIPS`. 0 takes the whole range.
        refits: how often the best range is fitted to its own codes.
        largest_stretch: the most by which the scale is stretched in the end, as a fraction of it.
        largest_state: states above this magnitude are clipped, divided by the square root of the channels that are
            mixed if states are rotated.
    """

    clip_step: float = 0.0
    refits: int = 0
    largest_stretch: float = 0.0
    largest_state: float = math.inf


class Quantizer(ABC):
    """Turns keys, or values, into codes. It has no state: equal inputs give equal codes.

    Args:
        code_format: the meaning of its codes.

    Attributes:
        smooths_keys: whether a store smooths keys first, by what helps the format; see `smoothing`.
    """

    smooths_keys = False

    def __init__(self, code_format: CodeFormat) -> None:
        self.format = code_format

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        # Another `quantize` finds other codes: the kernels of its parent class must not take its place.
        if "quantize" in cls.__dict__ and "kernel_search" not in cls.__dict__:
            cls.kernel_search = Quantizer.kernel_search  # type: ignore[method-assign]

    @property
    def kernel_search(self) -> KernelSearch | None:
        """How kernels find the same codes as `quantize`; `None` if only `quantize` can find them."""
        return None

    @abstractmethod
    def quantize(self, states: Tensor) -> QuantizedGroups:
        """Quantize finite states.

        Args:
            states: `[batch, kv_heads, tokens, head_dim]` of any floating dtype; tokens and head_dim are
                multiples of the group sizes.
        """


@dataclass(frozen=True, slots=True)
class SideOptions:
    """Options for the keys, or for the values.

    Attributes:
        side: keys or values.
        nbits: bits of a code.
        axis: the axis option of a backend, `None` for the backend's default.
        group_size: states that share a scale, `None` for a size that suits the head_dim.
        scales: scales that never change, one for all KV heads or one for each; empty if each group has its own.
    """

    side: Side
    nbits: int
    axis: int | None = None
    group_size: int | None = None
    scales: tuple[float, ...] = ()


DEFAULT_GROUP_SIZE = 64


class Backend(ABC):
    """Makes quantizers.

    Attributes:
        name: the name that it is registered by.
        widths: numbers of bits that it takes.
        axes: values of `axis_key` and `axis_value` that it takes; empty if it has no such option.
        default_axis: the axis that is used if none is given.
        takes_scales: whether it takes scales that never change.
        has_zero: as `CodeFormat.has_zero`, of all of its formats.
        kernel: the compiled kernel that packs its blocks on a CPU, `None` if it has none.
    """

    name: str
    widths: tuple[int, ...]
    axes: tuple[int, ...] = ()
    default_axis: int | None = None
    takes_scales: bool = False
    has_zero: bool = True
    kernel: NativeLibrary | None = None

    def check(self, options: SideOptions) -> None:
        """Raise `OptionError` if the backend does not take the options, or its package is missing."""
        if not _is_whole(options.nbits) or options.nbits not in self.widths:
            raise OptionError(
                f"`nbits` of the {self.name} backend must be one of {', '.join(map(str, self.widths))}, got "
                f"{options.nbits!r} for {options.side}: pass one of them."
            )
        if options.axis is not None and (not _is_whole(options.axis) or options.axis not in self.axes):
            taken = f"one of {', '.join(map(str, self.axes))}" if self.axes else "left out"
            name = "axis_key" if options.side == "keys" else "axis_value"
            raise OptionError(
                f"`{name}` of the {self.name} backend must be {taken}, got {options.axis!r}: it has a default."
            )
        size = options.group_size
        if size is not None and (not _is_whole(size) or size < 1):
            raise OptionError(
                f"The group size must be a whole number of at least 1, got {size!r} for {options.side}: pass 64, for "
                "example."
            )
        if options.scales:
            self.check_takes_scales()
            if size is not None:
                raise OptionError(
                    f"With `scales`, a group size has no effect, got {size!r} for {options.side}: leave one out."
                )

    def check_takes_scales(self) -> None:
        """Raise `OptionError` if the backend does not take scales that never change."""
        if not self.takes_scales:
            raise OptionError(
                f"`scales` are of float8 numbers, which the {self.name} backend does not hold: pass backend='fp8'."
            )

    @abstractmethod
    def quantizer(self, options: SideOptions, head_dim: int) -> Quantizer:
        """A quantizer for states of a head_dim.

        Raises:
            OptionError: the backend does not take the options.
        """


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def channel_group(options: SideOptions, head_dim: int, default: int = DEFAULT_GROUP_SIZE) -> int:
    """Channels in a group along head_dim: the largest divisor of head_dim up to the given group size, or the default.

    It warns if that differs from the given size.
    """
    asked = options.group_size
    most = min(head_dim, default if asked is None else asked)
    size = next(size for size in range(most, 0, -1) if head_dim % size == 0)
    if asked is not None and size != asked:
        warn_the_caller(
            f"The group size must divide the head_dim {head_dim} of the {options.side}, got {asked}: groups of {size}, "
            "the largest smaller size that does, are used instead."
        )
    return size


def groups_for(options: SideOptions, head_dim: int, default: int = DEFAULT_GROUP_SIZE) -> tuple[int, int]:
    """Tokens and channels that share a scale: neighbouring tokens of a key channel, or channels of a value."""
    if options.side == "keys":
        return options.group_size or default, 1
    return 1, channel_group(options, head_dim, default)


ENTRY_POINT_GROUP = "kvlayers.quantizers"
"""Entry points in this group are factories in other packages. The entry point's name is the backend's name."""

_backends: FactoryRegistry[Backend] = FactoryRegistry(
    "quantization backend", ENTRY_POINT_GROUP, "unregister_quantizer", Backend
)

register_quantizer = _backends.register
"""Decorator that registers a factory, a class or function that returns a `Backend`, as the backend of a name.

It raises `RegistryError` if the name is empty or taken, or if the factory can make nothing.
"""

unregister_quantizer = _backends.remove
"""Remove the backend of a name. It raises `RegistryError` if the name is not registered."""

quantizer_names = _backends.names
"""All names of backends, including those of entry points in other packages."""


def backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        OptionError: no backend has this name.
        RegistryError: the factory with this name does not return a backend.

    Example:
        >>> from kvlayers.quantizers import backend
        >>> backend("native").widths
        (1, 2, 3, 4, 5, 6, 8)
    """
    return _backends.make(name)
