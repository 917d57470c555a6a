"""Which packed states the Triton kernel of attention supports."""

import torch

from kvlayers.quantizers.contract import CodeFormat, Side
from kvlayers.utils.triton_support import runs_triton

WIDTHS = (2, 4, 8)
"""Bits of a code that the kernel unpacks."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the states."""

LARGEST_BLOCK = 256
"""Tokens of a block: the scores of more do not fit into registers."""

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
    if not runs_triton(device) or dtype not in DTYPES:
        return False
    # Two tiles of scores must have 16 columns.
    if block_tokens & (block_tokens - 1) or block_tokens * key_format.bits < 128 or block_tokens > LARGEST_BLOCK:
        return False
    sides: tuple[tuple[CodeFormat, Side, int], ...] = (
        (key_format, "keys", key_head_dim),
        (value_format, "values", value_head_dim),
    )
    return all(_supports_side(code_format, side, head_dim, block_tokens) for code_format, side, head_dim in sides)


def _supports_side(code_format: CodeFormat, side: Side, head_dim: int, block_tokens: int) -> bool:
    if code_format.bits not in WIDTHS or code_format.levels or code_format.fixed_scales:
        return False
    if head_dim > LARGEST_HEAD_DIM or block_tokens % code_format.group_tokens or head_dim % code_format.group_channels:
        return False
    # Rows are read in words of two bytes.
    return side == "keys" or code_format.bits != 8 or head_dim % 2 == 0
