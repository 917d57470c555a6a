"""Torch's fused attention on an accelerator, which returns the log-sum-exp of the scores, and the merge of its results.

The kernels take grouped query heads, and do not copy keys or values for them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.utils.triton_support import TritonKernel, power_of_two, runs_triton

MERGED_ROWS = 4
"""Rows of a result that one program of the Triton kernel merges."""

MERGE_PARTS = TritonKernel("kvlayers.kernels.attention.cuda.triton_kernels", "merge_parts")


def merged(
    parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, *, wants_logsumexp: bool
) -> tuple[Tensor, Tensor]:
    """Merges attention of the same queries to several sets of tokens. All numbers must be finite.

    Results are in a dtype if that costs nothing, else in float32.

    Args:
        parts: for each set of tokens, the attended values `[batch, kv_heads, group, queries, value_head_dim]` and the
            log-sum-exp of the scores, `[batch, kv_heads, group, queries]`.
        dtype: see above.
        wants_logsumexp: whether the log-sum-exp must be that of all sets; if not, it may be that of any.
    """
    (first, its_logsumexp), *others = parts
    if not others:
        return first, its_logsumexp
    if runs_triton(first.device) and _has_merge_parts(first.device, dtype, first.shape[-1]):
        return _launch_merge(parts, dtype, wants_logsumexp)
    outs, logsumexps = zip(*parts, strict=True)
    total = torch.logsumexp(torch.stack(logsumexps), 0) if wants_logsumexp else its_logsumexp
    if len(others) == 1 and first.dtype == others[0][0].dtype == dtype:
        share = others[0][1] - its_logsumexp
        share = torch.sigmoid(share, out=torch.empty_like(share, dtype=dtype))
        return torch.lerp(first, others[0][0], share[..., None]), total
    shares = torch.softmax(torch.stack(logsumexps), 0)
    return (torch.stack(outs) * shares[..., None]).sum(0), total


def _launch_merge(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, logsumexp: bool) -> tuple[Tensor, Tensor]:
    """As `merged`, by the Triton kernel, in the memory layout of torch's attention."""
    batch, kv_heads, group, queries, width = parts[0][0].shape
    outs = tuple(out if out.stride(4) == 1 else out.contiguous() for out, _ in parts)
    logsumexps = tuple(logsumexp for _, logsumexp in parts)
    strides = tuple(
        stride for pair in zip(outs, logsumexps, strict=True) for one in pair for stride in one.stride()[:4]
    )
    found = outs[0].new_empty((batch, queries, kv_heads, group, width), dtype=dtype)
    total = logsumexps[0].new_empty(found.shape[:4]) if logsumexp else logsumexps[0]
    rows = batch * kv_heads * group * queries
    if rows:
        MERGE_PARTS.launch(
            found.device,
            (-(-rows // MERGED_ROWS),),
            (outs, logsumexps, strides, found, total, rows, kv_heads, group, queries),
            _merge_constants(width, len(parts), logsumexp),
        )
    return found.movedim(1, 3), total.movedim(1, 3) if logsumexp else total


@functools.lru_cache(maxsize=64)
def _merge_constants(width: int, parts: int, logsumexp: bool) -> Mapping[str, Any]:
    """Compile-time constants of `merge_parts` for so many parts with values of `width` channels."""
    # Fused multiply-add is not the default of every version of triton.
    options = {"num_warps": 4, "enable_fp_fusion": True}
    sizes = {"VALUE_DIM": width, "CHANNELS": power_of_two(width), "ROWS": MERGED_ROWS}
    return {**sizes, "PARTS": parts, "LOGSUMEXP": logsumexp, **options}


@functools.lru_cache(maxsize=64)
def _has_merge_parts(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether a device can run `merge_parts` with results of a dtype. The kernel is compiled, not launched."""
    out, logsumexp = (torch.empty(1, dtype=kind, device=device) for kind in (dtype, torch.float32))
    arguments = (out, out), (logsumexp, logsumexp), (16,) * 16, out, logsumexp, 16, 16, 16, 16
    return MERGE_PARTS.obstacle(device, (1,), arguments, _merge_constants(width, 2, False)) is None


def unexpanded(mask: Tensor) -> Tensor:
    """A mask of four dimensions with a size of 1 wherever it is the same along a dimension."""
    for dim in range(3):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


LARGEST_HEAD_DIM = 256
"""Channels of a key or value that fused kernels take at most."""

SMALL_PART = 16
"""Queries are rearranged if keys are this many times larger: that costs less than what it saves."""

ALIGNED_NUMBERS = 8
"""Rows of states and of masks begin at multiples of 16 bytes, as the kernels read them."""


def lowest_score(dtype: torch.dtype) -> float:
    """Score of a hidden token, for queries of a dtype.

    If all are `-inf`, kernels return a log-sum-exp of 0, as for one score of 0. Numbers below -2.3e38 overflow, as
    kernels compute in units of log2(e).
    """
    return max(-1e30, torch.finfo(dtype).min)


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


def takes(query: Tensor, head_dims: tuple[int, int], has_mask: bool) -> bool:
    """Whether the device has a fused kernel for queries, and keys and values of these head_dims."""
    return kernel_for(query.device, query.dtype, head_dims, has_mask) is not None


def attend_dense(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to states in full precision by the fused kernel of the device, which `takes` them.

    Args:
        query: `[batch, heads, queries, key_head_dim]`, heads a multiple of kv_heads.
        keys: `[batch, kv_heads, tokens, key_head_dim]` in the dtype of the query.
        values: `[batch, kv_heads, tokens, value_head_dim]` in the dtype of the query.
        mask: bool or additive, each size that of the scores `[batch, heads, queries, tokens]` or 1, or `None`.
        scale: factor of the scores.

    Returns:
        Attended values `[batch, kv_heads, heads of a group, queries, value_head_dim]` in the dtype of the query, and
        the log-sum-exp of the scores, float32 `[batch, kv_heads, heads of a group, queries]`. It is about
        `lowest_score` if a query sees no token, and its values are any finite ones.
    """
    head_dims = keys.shape[3], values.shape[3]
    kernel: Any = kernel_for(query.device, query.dtype, head_dims, has_mask=mask is not None)
    # The kernels read neighbouring channels, whatever the strides say. Unpacked keys may be a transposed view.
    query, keys, values = (part if part.stride(3) == 1 else part.contiguous() for part in (query, keys, values))
    bias = None if mask is None else _as_bias(mask, query.dtype)
    return kernel(query, keys, values, bias, scale)  # type: ignore[no-any-return]


def kernel_for(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], has_mask: bool) -> Kernel | None:
    """The fused kernel for states of a dtype and head_dims on a device, `None` if torch may use none."""
    settings: Any = torch.backends.cuda
    allowed = settings.flash_sdp_enabled(), settings.mem_efficient_sdp_enabled()
    return _allowed_kernel(device, dtype, head_dims, has_mask, allowed)


@functools.lru_cache(maxsize=64)
def _allowed_kernel(
    device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], has_mask: bool, allowed: tuple[bool, bool]
) -> Kernel | None:
    """As `kernel_for`. Torch looks up itself what is allowed; a context such as `sdpa_kernel` may end."""
    if dtype not in (torch.float16, torch.bfloat16) or max(head_dims) > LARGEST_HEAD_DIM:
        return None
    if any(width % ALIGNED_NUMBERS for width in head_dims):
        return None
    are_equal = head_dims[0] == head_dims[1]
    if device.type == "cpu":
        return functools.partial(_of_equal_heads, _of_cpu) if are_equal else None
    by_efficient = functools.partial(_of_equal_heads, _efficient)
    if device.type == "meta":
        # Counting launches: as on a current GPU.
        return _flash if are_equal and not has_mask else by_efficient
    # Builds for other GPUs have such kernels too, whose log-sum-exp nobody has compared.
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    keys, values = (torch.empty((1, 1, 8, width), dtype=dtype, device=device) for width in head_dims)
    asked = torch.backends.cuda.SDPAParams(keys, keys, values, None, 0.0, False, False)
    if not has_mask and torch.backends.cuda.can_use_flash_attention(asked):
        return _flash
    return by_efficient if torch.backends.cuda.can_use_efficient_attention(asked) else None


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
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        query, keys, values, attn_mask=bias, scale=scale
    )


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


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool or additive mask as finite numbers to be added to scores, in rows that are aligned."""
    tokens = mask.shape[3]
    padded = -(-tokens // ALIGNED_NUMBERS) * ALIGNED_NUMBERS
    lowest = lowest_score(dtype)
    bias = torch.full((*mask.shape[:3], padded), lowest, dtype=dtype, device=mask.device)[..., :tokens]
    if mask.dtype == torch.bool:
        return bias.masked_fill_(mask, 0)
    return bias.copy_(mask).clamp_(min=lowest)
