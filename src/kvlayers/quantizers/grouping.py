"""Views of a block of states by groups, and numbers that a dtype can hold."""

import torch
from torch import Tensor

from kvlayers.quantizers.contract import CodeFormat, QuantizedGroups

GROUP_DIMS = (-3, -1)
"""Dimensions of a grouped view that lie within a group."""


def grouped(states: Tensor, code_format: CodeFormat) -> Tensor:
    """View `[batch, kv_heads, tokens, head_dim]` as `[batch, kv_heads, tokens / group_tokens, group_tokens, head_dim /
    group_channels, group_channels]`."""
    by_channels = torch.unflatten(states, -1, (-1, code_format.group_channels))
    return torch.unflatten(by_channels, -3, (-1, code_format.group_tokens))


def ungrouped(groups: Tensor) -> Tensor:
    """The states of a grouped view, `[batch, kv_heads, tokens, head_dim]`."""
    return groups.flatten(-2).flatten(-3, -2)


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers, rounded to the precision of a dtype."""
    return numbers.to(dtype).float()


def smallest_positive(dtype: torch.dtype) -> float:
    """The smallest number of a dtype that is safe to divide by. Every device keeps float16's subnormal numbers."""
    numbers = torch.finfo(dtype)
    return numbers.smallest_normal * numbers.eps if dtype == torch.float16 else numbers.smallest_normal


LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


def largest_float8_scale(dtype: torch.dtype) -> float:
    """The largest scale whose product with the largest float8 is finite in a dtype."""
    numbers = torch.finfo(dtype)
    return numbers.max / LARGEST_FLOAT8 * (1 - numbers.eps)


def one_group_a_row(states: Tensor, code_format: CodeFormat) -> Tensor:
    """Rearrange `[batch, kv_heads, tokens, head_dim]` to `[groups, states of a group]`."""
    return grouped(states, code_format).transpose(-3, -2).flatten(-2).flatten(0, -2)


def from_rows(
    codes: Tensor, scale: Tensor, zero: Tensor, shape: torch.Size, code_format: CodeFormat
) -> QuantizedGroups:
    """Inverse of `one_group_a_row`, for codes and for one scale and one zero per row.

    Args:
        codes: uint8 `[groups, states of a group]`.
        scale: `[groups, 1]`.
        zero: `[groups, 1]`.
        shape: shape of the states.
        code_format: the format that the groups follow.
    """
    tokens, channels = code_format.group_tokens, code_format.group_channels
    groups = (*shape[:-2], shape[-2] // tokens, shape[-1] // channels)
    by_group = codes.view(*groups, tokens, channels).transpose(-3, -2)
    return QuantizedGroups(by_group.reshape(shape), scale.view(groups), zero.view(groups))
