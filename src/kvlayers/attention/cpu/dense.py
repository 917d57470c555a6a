"""Attention of few queries to states in full precision, by the compiled kernel where it takes less time than torch."""

import torch
from torch import Tensor

from kvlayers.attention.cpu import kernel
from kvlayers.attention.cpu.call import DTYPES
from kvlayers.utils.transforms import is_changed_by_torch

CPU_MAXIMUM_QUERIES = 16
"""Queries of a sequence up to which the kernel takes less time than torch's attention, measured on a CPU."""

CPU_MAXIMUM_FLOAT32_QUERIES = 4
"""As `CPU_MAXIMUM_QUERIES`, in float32 and if no query heads share a KV head."""

CPU_MINIMUM_STATES = 1 << 18
"""Numbers in the keys from which the kernel takes less time than torch's attention, measured on a CPU."""


def takes(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel can compute this attention, and is expected to take less time than torch's.

    Args:
        query: `[batch, heads, queries, head_dim]`.
        keys: `[batch, kv_heads, tokens, head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
    """
    # First, because a tracer would specialize a program on the sizes that are compared.
    if torch.compiler.is_compiling() or not keys.is_cpu or keys.numel() < CPU_MINIMUM_STATES:
        return False
    if query.dim() != 4 or values.dim() != 4 or not query.numel():
        return False
    alone = query.dtype == torch.float32 and query.size(1) == keys.size(1)
    if query.size(2) > (CPU_MAXIMUM_FLOAT32_QUERIES if alone else CPU_MAXIMUM_QUERIES):
        return False
    if (keys.size(0), keys.size(3)) != (query.size(0), query.size(3)) or query.size(1) % keys.size(1):
        return False
    if values.size()[:3] != keys.size()[:3] or not values.numel():
        return False
    if not query.dtype == keys.dtype == values.dtype or query.dtype not in DTYPES:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad):
        return False
    # The kernel reads memory, which the tensors of a tracer do not have, and a trace would not record its result.
    if type(query) is not Tensor or not values.is_cpu or torch._C._get_tracing_state() is not None:
        return False
    if mask is not None and not _takes_mask(mask, query, keys.size(2)):
        return False
    return not is_changed_by_torch(query) and kernel.library() is not None


def _takes_mask(mask: Tensor, query: Tensor, tokens: int) -> bool:
    if type(mask) is not Tensor or not mask.is_cpu or (mask.requires_grad and torch.is_grad_enabled()):
        return False
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) or mask.dim() > 4:
        return False
    wanted = (*query.size()[:3], tokens)[4 - mask.dim() :]
    return all(given in (1, size) for given, size in zip(mask.size(), wanted, strict=True))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention, `[batch, heads, queries, value_head_dim]`, of what the kernel `takes`.

    Args:
        query: as of `takes`.
        keys: as of `takes`.
        values: as of `takes`.
        mask: as of `takes`.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
        softcap: limit of the scores, `None` for no limit.
        sinks: `[heads]`, the score of each head's learned sink, a key without a value; `None` for no sinks.
    """
    if mask is not None:
        mask = mask.expand(*query.size()[:3], keys.size(2))
    scale = query.size(3) ** -0.5 if scale is None else float(scale)
    return kernel.attend_dense(query, keys, values, mask, scale, softcap, sinks)
