"""The libraries that multiply packed codes. The kernel calls them by their address, which it is told with each side.

They are compiled apart from the kernel, so that attention in full precision is fast first, and then the common codes.
"""

import ctypes
import pathlib

from kvlayers.attention.gathered_segment import GatheredSegment
from kvlayers.attention.packed_segment import PackedSegment
from kvlayers.attention.segments import KVSegments
from kvlayers.quantizers.contract import CodeFormat
from kvlayers.utils.native_library import NativeLibrary

FOLDER = pathlib.Path(__file__).parent
WHOLE = NativeLibrary(FOLDER / "whole_products.cpp", "kvlayers_multiply", purpose="codes of 4 and 8 bits")
OTHER = NativeLibrary(FOLDER / "other_products.cpp", "kvlayers_multiply", purpose="other codes")

COMMON_BITS = (4, 8)


def library(bits: int, is_whole: bool) -> NativeLibrary:
    """The library for codes.

    Args:
        bits: width of a code.
        is_whole: whether a code stands for itself, before its scale and its zero.
    """
    return WHOLE if is_whole and bits in COMMON_BITS else OTHER


def of_format(code_format: CodeFormat) -> NativeLibrary:
    """The library for codes of a format."""
    return library(code_format.bits, code_format.has_zero)


def address(code_format: CodeFormat) -> int:
    """Address of the function that multiplies codes of a format. Its library must be loaded."""
    loaded = of_format(code_format).get()
    if loaded is None:
        raise RuntimeError("The CPU kernel's products are not loaded: call obstacle() first.")
    return ctypes.cast(loaded.kvlayers_multiply, ctypes.c_void_p).value or 0


def obstacle(segments: KVSegments) -> str | None:
    """Why the packed codes of segments cannot be multiplied; `None` if they can, or there are none."""
    for segment in segments.in_order:
        source = segment.source if isinstance(segment, GatheredSegment) else segment
        if isinstance(source, PackedSegment):
            for side in (source.keys, source.values):
                needed = of_format(side.format)
                if needed.get() is None:
                    return f"the kernel for {needed.purpose} {needed.obstacle}"
    return None
