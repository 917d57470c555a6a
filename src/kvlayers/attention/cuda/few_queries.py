"""Attention of few query tokens to states in full precision with a mask, by the Triton kernel in place of torch.

A mask keeps flash attention out. What torch takes instead reads keys and values that transformers has repeated for each
query head, and on some GPUs prepares a plan of cuDNN for each number of tokens (`flash.py`), which for several queries
takes the host half a second.
"""

from typing import Any

import torch
from torch import Tensor

from kvlayers.attention import fused
from kvlayers.attention.cuda import kernel
from kvlayers.attention.dense_segment import DenseSegment
from kvlayers.attention.segments import KVSegments
from kvlayers.utils.transforms import is_changed_by_torch
from kvlayers.utils.triton_support import runs_triton

MAXIMUM_QUERIES = 16
"""Queries of a sequence that are few: those of a step, or of a draft."""

MAXIMUM_ROWS = 64
"""Queries of one KV head, over the heads that share it, up to which results were compared with torch's on a GPU."""

DTYPES = (torch.float16, torch.bfloat16)

_settings: Any = torch.backends.cuda


def serves(states: Tensor) -> bool:
    """Whether the kernel may attend to states `[batch, kv_heads, tokens, head_dim]` of this dtype and device."""
    return not states.is_cpu and states.dtype in DTYPES and runs_triton(states.device)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
    """Softmax attention, `[batch, heads, queries, value_head_dim]`, or `None` if it is left to torch.

    Args:
        query: `[batch, heads, queries, head_dim]`, heads a multiple of the kv_heads.
        keys: `[batch, kv_heads, tokens, head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
    """
    # First, because a tracer would specialize a program on the sizes that are compared.
    if torch.compiler.is_compiling() or not _takes(query, keys, values, mask):
        return None
    if mask is not None:
        mask = mask.expand(*query.size()[:3], keys.size(2))
    segments = KVSegments((DenseSegment(keys, values),))
    if kernel.obstacle(query, segments, mask) is not None:
        return None
    scale = query.size(3) ** -0.5 if scale is None else float(scale)
    out = kernel.attend(query, segments, mask, scale)
    to_compare = kernel.variants_to_compare(query, segments, mask) if query.is_cuda else []
    if to_compare and kernel.compare(to_compare, out, fused.attend(query, segments, mask, scale)) is not None:
        return None
    return out


def _takes(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    if not serves(keys) or type(query) is not Tensor or query.dim() != 4 or query.size(2) > MAXIMUM_QUERIES:
        return False
    # One query without a mask is flash attention's. Who allows no fused attention wants torch's arithmetic.
    if (mask is None and query.size(2) == 1) or not _settings.mem_efficient_sdp_enabled():
        return False
    if (keys.size(0), keys.size(3)) != (query.size(0), query.size(3)) or query.size(1) % keys.size(1):
        return False
    if query.size(1) // keys.size(1) * query.size(2) > MAXIMUM_ROWS:
        return False
    if values.size()[:3] != keys.size()[:3] or not (query.numel() and keys.numel() and values.numel()):
        return False
    if not query.dtype == keys.dtype == values.dtype or not query.device == keys.device == values.device:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad):
        return False
    if mask is not None and not _takes_mask(mask, query, keys.size(2)):
        return False
    return not is_changed_by_torch(query) and torch._C._get_tracing_state() is None


def _takes_mask(mask: Tensor, query: Tensor, tokens: int) -> bool:
    if type(mask) is not Tensor or mask.device != query.device or (mask.requires_grad and torch.is_grad_enabled()):
        return False
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) or mask.dim() > 4:
        return False
    wanted = (*query.size()[:3], tokens)[4 - mask.dim() :]
    return all(given in (1, size) for given, size in zip(mask.size(), wanted, strict=True))
