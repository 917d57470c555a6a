"""Attention of few queries to states in full precision, by the kernel that takes less time than torch's own choice.

On a CPU that is the compiled kernel (`cpu/kernel.py`). On a GPU there are two cases:

- One query without a mask is flash attention's. On some GPUs (Hopper, from torch 2.11 on) torch prefers cuDNN, which
  prepares a plan for shapes and strides that it has not seen before. That takes the host some 30 ms, and a cache has
  another length at each decode step. Flash attention takes any length at once.
- With a mask, or with a few queries, the Triton kernel takes the call. A mask keeps flash attention out, and what torch
  takes instead reads keys and values that transformers has repeated for each query head, or waits for cuDNN's plan.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvlayers.kernels.attention import fused
from kvlayers.kernels.attention.cpu import kernel as cpu_kernel
from kvlayers.kernels.attention.cpu.kernel import DTYPES
from kvlayers.kernels.attention.cuda import kernel as cuda_kernel
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.utils.transforms import is_changed_by_torch
from kvlayers.utils.triton_support import runs_triton

CPU_MAXIMUM_QUERIES = 16
"""Queries of a sequence up to which the compiled kernel takes less time than torch's attention, measured on a CPU."""

CPU_MAXIMUM_FLOAT32_QUERIES = 4
"""As `CPU_MAXIMUM_QUERIES`, in float32 and if no query heads share a KV head."""

CPU_MINIMUM_STATES = 1 << 18
"""Numbers in the keys from which the compiled kernel takes less time than torch's attention, measured on a CPU."""

GPU_MAXIMUM_QUERIES = 16
"""Queries of a sequence that are few: those of a step, or of a draft."""

GPU_MAXIMUM_ROWS = 64
"""Queries of one KV head, over the heads that share it, up to which results were compared with torch's on a GPU."""

_GPU_DTYPES = (torch.float16, torch.bfloat16)

_settings: Any = torch.backends.cuda


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
    """Softmax attention, `[batch, heads, queries, value_head_dim]`, or `None` if it is left to torch.

    Args:
        query: `[batch, heads, queries, head_dim]`, whose groups of heads share a KV head.
        keys: `[batch, kv_heads, tokens, head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
    """
    if keys.is_cpu:
        if not takes_on_cpu(query, keys, values, mask):
            return None
        return attend_on_cpu(query, keys, values, mask, scale)
    # First, because a tracer would specialize a program on the sizes that are compared.
    if torch.compiler.is_compiling():
        return None
    if mask is None and replaces_cudnn(keys) and query.size(2) == 1:
        strided = query.stride(3) == keys.stride(3) == values.stride(3) == 1
        if strided and values.size() == keys.size() and _belong_together(query, keys, values, mask):
            # The query heads that share a KV head become rows of one product, and programs divide the tokens.
            return torch._scaled_dot_product_flash_attention(query, keys, values, scale=scale)[0]
    if not serves_few_queries(keys) or query.size(2) > GPU_MAXIMUM_QUERIES:
        return None
    # One query without a mask is flash attention's. Who allows no fused attention wants torch's arithmetic.
    if (mask is None and query.size(2) == 1) or not _settings.mem_efficient_sdp_enabled():
        return None
    if not _belong_together(query, keys, values, mask):
        return None
    if query.size(1) // keys.size(1) * query.size(2) > GPU_MAXIMUM_ROWS:
        return None
    return _attend_by_triton(query, keys, values, mask, scale)


def _belong_together(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether the shapes fit, and nobody would miss what torch does besides: derivatives, autocast or a trace."""
    return (
        type(query) is Tensor
        and query.dim() == values.dim() == 4
        and min(query.numel(), keys.numel(), values.numel()) > 0
        and (keys.size(0), keys.size(3)) == (query.size(0), query.size(3))
        and query.size(1) % keys.size(1) == 0
        and values.size()[:3] == keys.size()[:3]
        and query.dtype == keys.dtype == values.dtype
        and query.device == keys.device == values.device
        and not (torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad))
        # The kernels read memory, which the tensors of a tracer do not have, and a trace would not record their result.
        and torch._C._get_tracing_state() is None
        and not is_changed_by_torch(query)
        and (mask is None or _is_mask_of(mask, query, keys))
    )


def _is_mask_of(mask: Tensor, query: Tensor, keys: Tensor) -> bool:
    """Whether the kernels read a mask of these queries and keys."""
    if type(mask) is not Tensor or mask.device != query.device or (mask.requires_grad and torch.is_grad_enabled()):
        return False
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) or mask.dim() > 4:
        return False
    wanted = (*query.size()[:3], keys.size(2))[4 - mask.dim() :]
    return all(given in (1, size) for given, size in zip(mask.size(), wanted, strict=True))


def takes_on_cpu(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether the compiled kernel can compute this attention, and is expected to take less time than torch's.

    Arguments are those of `attend`.
    """
    # First, because a tracer would specialize a program on the sizes that are compared.
    if torch.compiler.is_compiling() or not keys.is_cpu or keys.numel() < CPU_MINIMUM_STATES:
        return False
    alone = query.dtype == torch.float32 and query.size(1) == keys.size(1)
    if query.dtype not in DTYPES or query.size(-2) > (CPU_MAXIMUM_FLOAT32_QUERIES if alone else CPU_MAXIMUM_QUERIES):
        return False
    return _belong_together(query, keys, values, mask) and cpu_kernel.library() is not None


def attend_on_cpu(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `attend`, of what the compiled kernel takes.

    Args:
        query: as of `attend`, like those up to `scale`.
        keys: as of `attend`.
        values: as of `attend`.
        mask: as of `attend`.
        scale: as of `attend`.
        softcap: limit of the scores, `None` for no limit.
        sinks: `[heads]`, the score of each head's learned sink, a key without a value; `None` for no sinks.
    """
    if mask is not None:
        mask = mask.expand(*query.size()[:3], keys.size(2))
    scale = query.size(3) ** -0.5 if scale is None else float(scale)
    return cpu_kernel.attend_dense(query, keys, values, mask, scale, softcap, sinks)


def serves_few_queries(states: Tensor) -> bool:
    """Whether the Triton kernel may attend to states `[batch, kv_heads, tokens, head_dim]` of this dtype and device."""
    return not states.is_cpu and states.dtype in _GPU_DTYPES and runs_triton(states.device)


def _attend_by_triton(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor | None:
    if mask is not None:
        mask = mask.expand(*query.size()[:3], keys.size(2))
    segments = KVSegments((DenseSegment(keys, values),))
    if cuda_kernel.obstacle(query, segments, mask) is not None:
        return None
    scale = query.size(3) ** -0.5 if scale is None else float(scale)
    out = cuda_kernel.attend(query, segments, mask, scale)
    to_compare = cuda_kernel.variants_to_compare(query, segments, mask) if query.is_cuda else []
    if to_compare and cuda_kernel.compare(to_compare, out, fused.attend(query, segments, mask, scale)) is not None:
        return None
    return out


def replaces_cudnn(states: Tensor) -> bool:
    """Whether torch would leave attention to states `[batch, kv_heads, tokens, head_dim]` to cuDNN, and flash attention
    takes such states.
    """
    if not states.is_cuda or states.dtype not in _GPU_DTYPES:
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
