"""Attention of one query token to states in full precision by torch's flash attention, where torch would ask cuDNN.

On some GPUs (Hopper, from torch 2.11 on) torch prefers cuDNN, which prepares a plan for shapes and strides that it has
not seen before. That takes the host some 30 ms. A cache has another length at each decode step, so each step would wait
for a plan. Flash attention takes any length at once.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvlayers.utils.transforms import is_changed_by_torch

_DTYPES = (torch.float16, torch.bfloat16)

_settings: Any = torch.backends.cuda


def replaces_cudnn(states: Tensor) -> bool:
    """Whether torch would leave attention to states `[batch, kv_heads, tokens, head_dim]` to cuDNN, and flash attention
    takes such states.
    """
    if not states.is_cuda or states.dtype not in _DTYPES:
        return False
    # What is allowed may change: a context such as `sdpa_kernel` ends.
    allowed = _settings.flash_sdp_enabled() and _settings.cudnn_sdp_enabled()
    return bool(allowed and _replaces_cudnn(states.device, states.dtype, states.size(3)))


@functools.lru_cache(maxsize=64)
def _replaces_cudnn(device: torch.device, dtype: torch.dtype, head_dim: int) -> Any:
    some = torch.empty((1, 1, 8, head_dim), dtype=dtype, device=device)
    if torch._fused_sdp_choice(some, some, some) != SDPBackend.CUDNN_ATTENTION.value:
        return False
    return _settings.can_use_flash_attention(_settings.SDPAParams(some, some, some, None, 0.0, False, False))


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether this is attention of one query token that torch would leave to cuDNN, and flash attention takes.

    Args:
        query: `[batch, heads, queries, head_dim]`.
        keys: `[batch, kv_heads, tokens, head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
    """
    # First, because a tracer would specialize a program on the sizes that are compared.
    if torch.compiler.is_compiling() or not replaces_cudnn(keys):
        return False
    if type(query) is not Tensor or query.dim() != 4 or query.size(2) != 1 or values.size() != keys.size():
        return False
    if (keys.size(0), keys.size(3)) != (query.size(0), query.size(3)) or query.size(1) % keys.size(1):
        return False
    if not query.dtype == keys.dtype == values.dtype or not query.device == keys.device == values.device:
        return False
    if not query.stride(3) == keys.stride(3) == values.stride(3) == 1 or not keys.numel():
        return False
    if torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad):
        return False
    return not is_changed_by_torch(query) and torch._C._get_tracing_state() is None


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Softmax attention, `[batch, heads, 1, head_dim]`, of what flash attention `takes`.

    Args:
        query: as of `takes`.
        keys: as of `takes`.
        values: as of `takes`.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
    """
    # The query heads that share a KV head become rows of one product there, and the tokens are divided among programs.
    return torch._scaled_dot_product_flash_attention(query, keys, values, scale=scale)[0]
