"""Attention of few queries to states in full precision, by the kernel that takes less time than torch's own choice.

On a CPU that is a compiled kernel (`cpu/kernel.py`), one for the few queries of a step and one for the many of a
prompt. Without a compiler, a prompt's queries attend block by block to what they see, if that is a small part. On a GPU
there are two cases:

- One query without a mask is flash attention's. On some GPUs (Hopper, from torch 2.11 on) torch prefers cuDNN, which
  prepares a plan for shapes and strides that it has not seen before. That takes the host some 30 ms, and a cache has
  another length at each decode step. Flash attention takes any length at once.
- With a mask, or with a few queries, the Triton kernel takes the call. A mask keeps flash attention out, and what torch
  takes instead reads keys and values that transformers has repeated for each query head, or waits for cuDNN's plan.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from kvlayers.kernels.attention import slabs
from kvlayers.kernels.attention.cpu import kernel as cpu_kernel
from kvlayers.kernels.attention.cpu.kernel import CPU_MAXIMUM_QUERIES, DTYPES
from kvlayers.kernels.attention.cuda import kernel as cuda_kernel
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.utils.transforms import is_changed_by_torch
from kvlayers.utils.triton_support import runs_triton

CPU_MAXIMUM_FLOAT32_QUERIES = 4
"""Queries up to which the kernel for few takes less time than torch's attention, in float32 and if no query heads share
a KV head. Measured on a CPU."""

CPU_MINIMUM_STATES = 1 << 18
"""Numbers in the keys from which the kernel for few queries takes less time than torch's attention, on a CPU."""

CPU_MINIMUM_PRODUCTS = 1 << 22
"""Products of queries and numbers of keys below which the kernel for many queries would save some ten microseconds."""

CPU_BLOCK_QUERIES = 256
"""Queries that attend at once where there is no kernel for many."""

MOST_SEEN = 0.4
"""Share of the tokens that a block of queries sees up to which cutting them pays: torch's attention skips nothing."""

GPU_MAXIMUM_QUERIES = 16
"""Queries of a sequence that are few: those of a step, or of a draft."""

GPU_MAXIMUM_ROWS = 64
"""Queries of one KV head, over the heads that share it, up to which results were compared with torch's on a GPU."""

LOWEST_VISIBLE = -1e30
"""Numbers of additive masks that hide a token are lower: `-inf`, or the lowest of a dtype."""

_GPU_DTYPES = (torch.float16, torch.bfloat16)

_settings: Any = torch.backends.cuda


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    is_causal: bool = False,
) -> Tensor | None:
    """Softmax attention, `[batch, heads, queries, value_head_dim]`, or `None` if it is left to torch.

    Args:
        query: `[batch, heads, queries, head_dim]`, whose groups of heads share a KV head.
        keys: `[batch, kv_heads, tokens, head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
        is_causal: whether a query attends to the tokens up to its own number alone.
    """
    if keys.is_cpu:
        if not _serves_on_cpu(query, keys, values, mask, is_causal):
            return None
        if _library_for(query.size(2)) is not None:
            return cpu_kernel.attend_dense(query, keys, values, mask, scale, is_causal=is_causal)
        return None if mask is None else attend_in_blocks(query, keys, values, mask, scale)
    # First, because a tracer would specialize a program on the sizes that are compared.
    if torch.compiler.is_compiling() or is_causal:
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
    rows = query.size(1) // keys.size(1) * query.size(2)
    if not _belong_together(query, keys, values, mask) or rows > GPU_MAXIMUM_ROWS:
        return None
    if mask is not None:
        mask = mask.expand(*query.size()[:3], keys.size(2))
    segments = KVSegments((DenseSegment(keys, values),))
    scale = query.size(3) ** -0.5 if scale is None else float(scale)
    by_torch = functools.partial(slabs.attend, query, segments, mask, scale)
    found = cuda_kernel.attend(query, segments, mask, scale, by_torch)
    return found if isinstance(found, Tensor) else None


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
        and (mask is None or is_mask_of(mask, query, keys))
    )


def is_mask_of(mask: Tensor, query: Tensor, keys: Tensor) -> bool:
    """Whether the kernels read a mask of these queries and keys."""
    return (
        type(mask) is Tensor
        and mask.device == query.device
        and not (mask.requires_grad and torch.is_grad_enabled())
        and mask.dtype in (torch.bool, torch.float32, query.dtype)
        and 2 <= mask.dim() <= 4
        # Memory of a negation that torch only notes has the other sign.
        and not mask.is_neg()
        # Against the right of `[batch, heads, queries, tokens]`.
        and all(
            given in (1, size)
            for given, size in zip(mask.size(), (*query.size()[:3], keys.size(2))[4 - mask.dim() :], strict=True)
        )
    )


def takes_on_cpu(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool = False) -> bool:
    """Whether a compiled kernel can compute this attention, and is expected to take less time than torch's.

    Arguments are those of `attend`.
    """
    return _serves_on_cpu(query, keys, values, mask, is_causal) and _library_for(query.size(2)) is not None


def _serves_on_cpu(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    # First, because a tracer would specialize a program on the sizes that are compared.
    if torch.compiler.is_compiling() or not keys.is_cpu or query.dtype not in DTYPES:
        return False
    queries = query.size(-2)
    if not is_worth_a_kernel(keys, queries) or (is_causal and (mask is not None or queries <= CPU_MAXIMUM_QUERIES)):
        return False
    alone = query.dtype == torch.float32 and query.size(1) == keys.size(1)
    if alone and CPU_MAXIMUM_FLOAT32_QUERIES < queries <= CPU_MAXIMUM_QUERIES:
        return False
    return _belong_together(query, keys, values, mask)


def is_worth_a_kernel(keys: Tensor, queries: int) -> bool:
    """Whether attention to keys `[batch, kv_heads, tokens, head_dim]` is long enough on a CPU for a kernel to pay."""
    if queries <= CPU_MAXIMUM_QUERIES:
        return keys.numel() >= CPU_MINIMUM_STATES
    return keys.numel() * queries >= CPU_MINIMUM_PRODUCTS


def _library_for(queries: int) -> Any:
    return (cpu_kernel.LIBRARY if queries <= CPU_MAXIMUM_QUERIES else cpu_kernel.MANY).get()


def attend_in_blocks(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> Tensor | None:
    """As `attend`, by torch's attention of some queries at a time to the tokens from the first to the last they see.

    It is `None` if they see so many that torch's attention at once takes no more time. If the mask is causal, torch's
    attention is told so, which skips what is hidden only then.
    """
    queries, tokens = query.size(2), keys.size(2)
    mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, queries, tokens)
    blocks = torch.split(mask, CPU_BLOCK_QUERIES, dim=2)
    if queries == tokens and mask.dtype == torch.bool and _are_causal(blocks):
        return scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scale, enable_gqa=query.size(1) != keys.size(1)
        )
    if len(blocks) == 1:
        return None
    seen = [_seen_columns(block) for block in blocks]
    if sum(end - begin for begin, end in seen) > MOST_SEEN * len(blocks) * tokens:
        return None
    attended = []
    for rows, block, (begin, end) in zip(torch.split(query, CPU_BLOCK_QUERIES, dim=2), blocks, seen, strict=True):
        out = attend_grouped(rows, keys[:, :, begin:end], values[:, :, begin:end], block[..., begin:end], scale)
        attended.append(out.transpose(1, 2))
    return torch.cat(attended, dim=1).transpose(1, 2)


def attend_grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Torch's attention, in which the query heads that share a KV head are rows of one product, and read keys once.

    Args:
        query: `[batch, heads, queries, head_dim]`, heads a multiple of `kv_heads`.
        keys: `[batch, kv_heads, tokens, head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        mask: `[1 or batch, 1 or heads, queries, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
    """
    batch, heads, queries, head_dim = query.size()
    kv_heads = keys.size(1)
    if mask is not None and (queries > 1 or mask.size(1) > 1):
        of_groups = torch.unflatten(mask, 1, (kv_heads if mask.size(1) > 1 else 1, -1))
        mask = of_groups.expand(-1, -1, heads // kv_heads, -1, -1).flatten(2, 3)
    rows = query.reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    attended = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(batch, heads, queries, values.size(3))


def _are_causal(blocks: Sequence[Tensor]) -> bool:
    """Whether blocks of a bool mask, `[..., some queries, tokens]`, are causal. It has as many queries as tokens."""
    first = 0
    for block in blocks:
        behind = first + block.size(-2)
        own = block[..., first:behind]
        # The own columns first: they tell a window, or padding, from a causal mask most cheaply.
        is_causal = torch.equal(own, torch.ones_like(own).tril()) and bool(block[..., :first].all())
        if not is_causal or bool(block[..., behind:].any()):
            return False
        first = behind
    return True


def _seen_columns(mask: Tensor) -> tuple[int, int]:
    """The first column that a row of a mask `[..., queries, tokens]` sees, and the one behind the last."""
    visible = mask if mask.dtype == torch.bool else mask > LOWEST_VISIBLE
    # A row that an additive mask hides wholly with finite numbers sees all tokens alike.
    if mask.dtype != torch.bool and not visible.any(-1).all():
        return 0, mask.size(-1)
    columns = visible.flatten(0, -2).any(0).nonzero()
    return (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 1)


def serves_few_queries(states: Tensor) -> bool:
    """Whether the Triton kernel may attend to states `[batch, kv_heads, tokens, head_dim]` of this dtype and device."""
    return not states.is_cpu and states.dtype in _GPU_DTYPES and runs_triton(states.device)


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
