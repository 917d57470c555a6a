"""Which packed states and devices the Triton kernels support. triton itself is not imported here."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os

import torch
from packaging.version import Version

from kvlayers.quantizers.contract import CodeFormat, Side

WIDTHS = (2, 4, 8)
"""Bits of a code that the kernel unpacks."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the states."""

MINIMUM_VERSION = "3.5"
"""Earliest version of triton that has all language features that the kernels use."""

LARGEST_HEAD_DIM = 256
"""Channels of a key or value that one program holds at most."""


def supports(
    key_format: CodeFormat,
    value_format: CodeFormat,
    *,
    key_head_dim: int,
    value_head_dim: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether `attend_packed` takes packed states of this kind; otherwise the caller has to unpack them.

    Args:
        key_format: meaning of the key codes.
        value_format: meaning of the value codes.
        key_head_dim: channels of a key, and of a query.
        value_head_dim: channels of a value.
        block_tokens: tokens of a block.
        dtype: dtype of queries and parameters.
        device: device of the states.
    """
    if not available(device) or dtype not in DTYPES:
        return False
    # Two tiles of scores must have 16 columns.
    if block_tokens & (block_tokens - 1) or block_tokens * key_format.bits < 128:
        return False
    sides: tuple[tuple[CodeFormat, Side, int], ...] = (
        (key_format, "keys", key_head_dim),
        (value_format, "values", value_head_dim),
    )
    return all(_supports_side(code_format, side, head_dim, block_tokens) for code_format, side, head_dim in sides)


def _supports_side(code_format: CodeFormat, side: Side, head_dim: int, block_tokens: int) -> bool:
    if code_format.bits not in WIDTHS or (code_format.floating and code_format.bits != 8):
        return False
    if head_dim > LARGEST_HEAD_DIM or block_tokens % code_format.group_tokens or head_dim % code_format.group_channels:
        return False
    # Rows are read in words of two bytes.
    return side == "keys" or code_format.bits != 8 or head_dim % 2 == 0


@functools.lru_cache(maxsize=32)
def available(device: torch.device) -> bool:
    """Whether a triton is installed that compiles for the device, or interprets kernels for it."""
    if importlib.util.find_spec("triton") is None or triton_version() < Version(MINIMUM_VERSION):
        return False
    if is_interpreted():
        return True
    # Products of bfloat16 came with compute capability 8.
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 8


def triton_version() -> Version:
    """Version of triton, found without importing it. Nightly builds have a package name of their own."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return Version(importlib.metadata.version(name))
    return Version("0")


def is_interpreted() -> bool:
    """Whether triton interprets kernels instead of compiling them (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
