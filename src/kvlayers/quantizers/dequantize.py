"""Dequantization of codes to states, in the simplest way."""

import functools

import torch
from torch import Tensor

from kvlayers.quantizers.contract import CodeFormat, QuantizedGroups
from kvlayers.quantizers.grouping import grouped, ungrouped
from kvlayers.quantizers.hadamard import rotate


def dequantize(groups: QuantizedGroups, code_format: CodeFormat, dtype: torch.dtype) -> Tensor:
    """The states that codes stand for, computed in float32.

    Args:
        groups: codes, scales and zeros from a quantizer.
        code_format: `format` of that quantizer.
        dtype: dtype of the result.

    Returns:
        `[batch, kv_heads, tokens, head_dim]` of `dtype`.
    """
    states = grouped(numbers_of(groups.codes, code_format), code_format) * _for_each_state(groups.scale)
    if groups.zero is not None:
        states = states + _for_each_state(groups.zero)
    flat = ungrouped(states)
    return (rotate(flat) if code_format.rotated else flat).to(dtype)


def numbers_of(codes: Tensor, code_format: CodeFormat) -> Tensor:
    """What codes stand for before the scale, float32 of the same shape as the codes, uint8 `[batch, kv_heads, ...]`."""
    if code_format.floating:
        numbers = codes.view(torch.float8_e4m3fn).float()
        return numbers * scales_by_head(code_format, codes) if code_format.fixed_scales else numbers
    if code_format.levels:
        return torch.tensor(code_format.levels, dtype=torch.float32, device=codes.device)[codes.int()]
    return codes.float()


def scales_by_head(code_format: CodeFormat, states: Tensor) -> Tensor:
    """The fixed scales of a format in float32, in a shape that broadcasts over states `[batch, kv_heads, ...]`.

    Raises:
        StateMismatchError: there are scales for another number of KV heads.
    """
    code_format.check_heads(states.shape[1])
    return _on_device(code_format.fixed_scales, states.device).view(-1, *(1,) * (states.dim() - 2))


@functools.lru_cache(maxsize=4096)
def _on_device(scales: tuple[float, ...], device: torch.device) -> Tensor:
    # A tensor of inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return torch.tensor(scales, dtype=torch.float32, device=device)


def _for_each_state(parameters: Tensor) -> Tensor:
    """View `[batch, kv_heads, token groups, channel groups]` so that it broadcasts over grouped states."""
    return parameters.float().unsqueeze(-2).unsqueeze(-1)
