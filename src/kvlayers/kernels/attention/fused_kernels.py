"""Torch's fused attention kernels of a device, as functions that also return the log-sum-exp of the scores.

Each takes grouped query heads, and does not copy keys or values for them. States that no fused kernel takes go through
plain torch in float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SCORES_AT_ONCE = 1 << 26
"""Most scores that are in memory at once if no fused kernel takes the states."""

LARGEST_HEAD_DIM = 256
"""Channels of a key or value that fused kernels take at most."""

SMALL_PART = 16
"""Queries are rearranged if keys are this many times larger: that costs less than what it saves."""

ALIGNED_NUMBERS = 8
"""Rows of states and of masks begin at multiples of 16 bytes, as the kernels read them."""

LOWEST_SCORE = -1e30
"""Score of a hidden token. If all are `-inf`, kernels return a log-sum-exp of 0, as for one score of 0. Numbers below
-2.3e38 overflow, as kernels compute in units of log2(e)."""


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Kernels:
    """The kernels of a device for some states, `None` if it has none.

    Attributes:
        unmasked: attention without a mask.
        masked: attention with one.
    """

    unmasked: Kernel | None
    masked: Kernel | None


def attend_dense(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to states in full precision, by the fused kernel of the device if it takes them.

    Args:
        query: `[batch, heads, queries, key_head_dim]`, heads a multiple of kv_heads.
        keys: `[batch, kv_heads, tokens, key_head_dim]` in the dtype of the query.
        values: `[batch, kv_heads, tokens, value_head_dim]` in the dtype of the query.
        mask: bool or additive, each size that of the scores `[batch, heads, queries, tokens]` or 1, or `None`.
        scale: factor of the scores.

    Returns:
        Attended values `[batch, kv_heads, heads of a group, queries, value_head_dim]`, in the dtype of the query or
        float32, and the log-sum-exp of the scores, float32 `[batch, kv_heads, heads of a group, queries]`. It is about
        `LOWEST_SCORE` (-65504 in float16) if a query sees no token, and its values are any finite ones.
    """
    if not query.numel():
        group = query.shape[1] // keys.shape[1]
        out = query.new_empty((query.shape[0], keys.shape[1], group, query.shape[2], values.shape[3]))
        return out, out[..., 0].float()
    kernels = kernels_for(query.device, query.dtype, keys.shape[3], values.shape[3])
    bias = None if mask is None else _as_bias(mask, query.dtype)
    kernel = kernels.unmasked if bias is None else kernels.masked
    if kernel is None:
        return _plain(query, keys, values, bias, scale)
    # The kernels read neighbouring channels, whatever the strides say. Unpacked keys may be a transposed view.
    query, keys, values = (part if part.stride(3) == 1 else part.contiguous() for part in (query, keys, values))
    return kernel(query, keys, values, bias, scale)


def kernels_for(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> Kernels:
    """The fused kernels for states of a dtype and head_dims on a device, as far as torch may use them."""
    settings: Any = torch.backends.cuda
    allowed = settings.flash_sdp_enabled(), settings.mem_efficient_sdp_enabled()
    return _allowed_kernels(device, dtype, key_dim, value_dim, allowed)


@functools.lru_cache(maxsize=64)
def _allowed_kernels(
    device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, allowed: tuple[bool, bool]
) -> Kernels:
    """As `kernels_for`. Torch looks up itself what is allowed; a context such as `sdpa_kernel` may end."""
    none = Kernels(None, None)
    if dtype not in (torch.float16, torch.bfloat16) or max(key_dim, value_dim) > LARGEST_HEAD_DIM:
        return none
    if key_dim % ALIGNED_NUMBERS or value_dim % ALIGNED_NUMBERS:
        return none
    if device.type == "cpu":
        of_cpu = functools.partial(_of_equal_heads, _of_cpu)
        return Kernels(of_cpu, of_cpu) if key_dim == value_dim else none
    by_efficient = functools.partial(_of_equal_heads, _efficient)
    if device.type == "meta":
        # Counting launches: as on a current GPU.
        return Kernels(_flash if key_dim == value_dim else by_efficient, by_efficient)
    # Builds for other GPUs have such kernels too, whose log-sum-exp nobody has compared.
    if device.type != "cuda" or torch.version.cuda is None:
        return none
    keys, values = (torch.empty((1, 1, 8, width), dtype=dtype, device=device) for width in (key_dim, value_dim))
    asked = torch.backends.cuda.SDPAParams(keys, keys, values, None, 0.0, False, False)
    efficient = by_efficient if torch.backends.cuda.can_use_efficient_attention(asked) else None
    return Kernels(_flash if torch.backends.cuda.can_use_flash_attention(asked) else efficient, efficient)


def _flash(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 (Dao 2023, arXiv:2307.08691), which knows query heads that share keys."""
    batch, heads, queries, head_dim = query.shape
    kv_heads = keys.shape[1]
    if query.is_contiguous() or query.numel() * SMALL_PART < keys.numel():
        # As rows of one head, the query heads of a group read each key once.
        query = query.reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, scale=scale)
    if query.shape[1] == heads:
        return torch.unflatten(out, 1, (kv_heads, -1)), torch.unflatten(logsumexp, 1, (kv_heads, -1))
    return torch.unflatten(out, 2, (-1, queries)), torch.unflatten(logsumexp, 2, (-1, queries))


def _efficient(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Memory-efficient attention (Rabe and Staats 2021, arXiv:2112.05682), as xFormers has it, of equal heads."""
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, bias, True, scale=scale
    )
    # Rows are padded to multiples of 32.
    return out, logsumexp[..., : query.shape[2]]


def _of_cpu(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Torch's kernel for a CPU, on which the whole path can be tested, of equal heads."""
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=bias, scale=scale
    )
    return out, logsumexp


def _of_equal_heads(
    kernel: Kernel, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Runs a kernel that takes as many query heads as kv_heads, without a copy of any key or value.

    Args:
        kernel: the kernel; it gets a bias of the full shape of its scores.
        query: `[batch, heads, queries, key_head_dim]`.
        keys: `[batch, kv_heads, tokens, key_head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        bias: each size that of the scores `[batch, heads, queries, tokens]` or 1, or `None`.
        scale: factor of the scores.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    group = heads // kv_heads
    full = None
    if bias is not None:
        full = torch.unflatten(bias, 1, (kv_heads, group)) if bias.shape[1] > 1 else bias.unsqueeze(1)
        full = full.expand(batch, kv_heads, group, queries, tokens)
    if full is None or queries == 1 or group == 1:
        # The query heads of a group are rows of one head.
        rows = query.reshape(batch, kv_heads, group * queries, head_dim)
        out, logsumexp = kernel(rows, keys, values, None if full is None else full.flatten(2, 3), scale)
        return torch.unflatten(out, 2, (group, queries)), torch.unflatten(logsumexp, 2, (group, queries))
    by_group = torch.unflatten(query, 1, (kv_heads, group))
    if batch == 1:
        # The query heads of a group are sequences, whose keys are at one place in memory.
        keys, values = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
        found = kernel(by_group[0].transpose(0, 1), keys, values, full[0].transpose(0, 1), scale)
        out, logsumexp = (result.transpose(0, 1)[None] for result in found)
    else:
        each = [kernel(by_group[:, :, head], keys, values, full[:, :, head], scale) for head in range(group)]
        out, logsumexp = (torch.stack(results, 2) for results in zip(*each, strict=True))
    return out, logsumexp


def _plain(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The same in float32, a few queries at a time, for states that no fused kernel takes."""
    batch, heads, queries, head_dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    transposed, summands = keys.float().transpose(2, 3), values.float()
    at_once = max(SCORES_AT_ONCE // (batch * heads * tokens), 1)
    parts = []
    for start in range(0, queries, at_once):
        some = query[:, :, start : start + at_once]
        rows = some.reshape(batch, kv_heads, -1, head_dim).float() * scale
        products = (rows @ transposed).reshape(*some.shape[:3], tokens)
        if bias is not None:
            products += bias[:, :, start : start + at_once] if bias.shape[2] > 1 else bias
        logsumexp = torch.logsumexp(products, -1)
        weights = torch.exp(products.sub_(logsumexp[..., None])).reshape(*rows.shape[:3], tokens)
        parts.append(((weights @ summands).reshape(*some.shape[:3], -1), logsumexp))
    out, logsumexp = parts[0] if len(parts) == 1 else (torch.cat(results, 2) for results in zip(*parts, strict=True))
    return torch.unflatten(out, 1, (kv_heads, -1)), torch.unflatten(logsumexp, 1, (kv_heads, -1))


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool or additive mask as finite numbers to be added to scores, in rows that are aligned."""
    tokens = mask.shape[3]
    padded = -(-tokens // ALIGNED_NUMBERS) * ALIGNED_NUMBERS
    lowest = max(LOWEST_SCORE, torch.finfo(dtype).min)
    bias = torch.full((*mask.shape[:3], padded), lowest, dtype=dtype, device=mask.device)[..., :tokens]
    if mask.dtype == torch.bool:
        return bias.masked_fill_(mask, 0)
    return bias.copy_(mask).clamp_(min=lowest)
