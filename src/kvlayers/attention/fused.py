"""Attention by torch's fused kernels, on an accelerator: to packed states slab by slab, with one merge at the end.

It serves whatever the Triton kernel does not take: prompts behind a cache, long drafts, codes without a kernel, and
devices without Triton. A slab is as many packed tokens as may be in full precision at once, in the dtype of the states.
A fused kernel attends to each, and returns the log-sum-exp of the scores, by which `merge` puts slabs together.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.attention.segments import DenseSegment, KVSegments
from kvlayers.quantizers.contract import Side
from kvlayers.utils.triton_support import TritonKernel, runs_triton

SLAB_BYTES = 1 << 28
"""Bytes of keys and values that are in full precision at once."""

MINIMUM_SLAB_TOKENS = 8192
"""Fewest tokens of a slab, whatever the batch: with fewer, launches and merging cost more than attention."""

UNPACKING_BYTES = 16
"""Bytes that each state takes while plain torch unpacks it: in float32, at several stages at once."""

SCORES_AT_ONCE = 1 << 26
"""Most scores that are in memory at once if no fused kernel takes the states."""

PARTS_AT_ONCE = 8
"""Results of slabs that are kept until they are merged."""

LARGEST_HEAD_DIM = 256
"""Channels of a key or value that fused kernels take at most."""

SMALL_PART = 16
"""Queries are rearranged if keys are this many times larger: that costs less than what it saves."""

ALIGNED_TOKENS = 8
"""Rows of a mask begin at multiples of 16 bytes, as the kernel with a mask reads them."""

LOWEST_SCORE = -1e30
"""Score of a hidden token. Kernels do not agree on the log-sum-exp of a query that sees none if scores are `-inf`."""

HIDDEN = -2.3e38
"""Numbers of an additive mask up to which a token counts as hidden, as in the Triton kernel."""

MERGED_ROWS = 4
"""Rows of a result that one program of the Triton kernel merges."""

MERGE_PAIR = TritonKernel("kvlayers.attention.cuda.triton_merge_pair", "merge_pair")

FUSED = "torch's fused attention"
PLAIN = "plain torch"


def serves(device: torch.device) -> bool:
    """Whether attention on a device runs here: on accelerators, and where their paths are tested."""
    return device.type != "cpu" or runs_triton(device)


def description(query: Tensor, segments: KVSegments) -> str:
    """The path that attention takes."""
    key_dim, value_dim = segments.head_dims
    return PLAIN if _kernels(query.device, query.dtype, key_dim, value_dim).masked is None else FUSED


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`.

    A number of an additive mask below -2.3e38 hides a token as `-inf` does.
    """
    return merged([attend_partly(query, segments, mask, scale)], mask).to(query.dtype)


def attend_partly(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """As `attend`, for segments that are only a part of the tokens that the queries attend to; see `merge`.

    Returns:
        Attended values `[batch, heads, queries, value_head_dim]`, in the dtype of the query or float32, and the
        log-sum-exp of the scores, float32 `[batch, heads, queries]`. It is about `LOWEST_SCORE` (-65504 in float16) if
        a query sees no token of these, and the values are any finite ones.
    """
    mask = None if mask is None else unexpanded(mask)
    parts: list[tuple[Tensor, Tensor]] = []
    position = 0
    for slab in _slabs(segments, query.dtype, mask is not None):
        part = None if mask is None else mask[..., position : position + slab.tokens]
        position += slab.tokens
        parts.append(attend_dense(query, slab.keys, slab.values, part, scale))
        if len(parts) == PARTS_AT_ONCE:
            parts = [merge(parts)]
    out, logsumexp = parts[0] if len(parts) == 1 else merge(parts)
    return out.flatten(1, 2), logsumexp.flatten(1, 2)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries to several sets of tokens, in float32. All numbers must be finite.

    Args:
        parts: for each set of tokens, the attended values `[..., queries, value_head_dim]` and the log-sum-exp of the
            scores `[..., queries]`.
    """
    outs, logsumexps = zip(*parts, strict=True)
    stacked = torch.stack(logsumexps)
    shares = torch.softmax(stacked, 0)
    return (torch.stack(outs) * shares[..., None]).sum(0), torch.logsumexp(stacked, 0)


def merged(parts: Sequence[tuple[Tensor, Tensor]], mask: Tensor | None) -> Tensor:
    """Attended values of all parts together, with zeros for queries that may attend to no token, as in torch.

    Args:
        parts: results of `attend_partly` that are not merged yet.
        mask: the mask of all tokens.
    """
    if len(parts) == 1:
        out = parts[0][0]
    elif len(parts) == 2 and mask is None:
        out = _merge_two(*parts)
    else:
        out = merge(parts)[0]
    if mask is None:
        return out
    mask = unexpanded(mask)
    if mask.dtype == torch.bool:
        return out.masked_fill(mask.any(-1, keepdim=True).logical_not(), 0)
    return out.masked_fill(mask.amax(-1, keepdim=True) <= HIDDEN, 0)


def _merge_two(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """As `merge` for two parts `[batch, heads, queries, value_head_dim]` of one dtype, in that dtype."""
    if not runs_triton(first[0].device):
        share = second[1] - first[1]
        share = torch.sigmoid(share, out=torch.empty_like(share, dtype=first[0].dtype))
        return torch.lerp(first[0], second[0], share[..., None])
    batch, heads, queries, width = first[0].shape
    outs, logsumexps = zip(first, second, strict=True)
    outs = tuple(out if out.stride(3) == 1 else out.contiguous() for out in outs)
    # In the memory layout of torch's attention, in which the next layer reads it.
    found = torch.empty((batch, queries, heads, width), dtype=outs[0].dtype, device=outs[0].device)
    rows = batch * heads * queries
    strides = [stride for tensor in (*outs, *logsumexps) for stride in tensor.stride()[:3]]
    MERGE_PAIR.launch(
        found.device,
        (-(-rows // MERGED_ROWS),),
        (*outs, *logsumexps, found, *strides, rows, heads, queries),
        {
            "VALUE_DIM": width,
            "CHANNELS": 1 << (width - 1).bit_length(),
            "ROWS": MERGED_ROWS,
            "num_warps": 4,
            # Not the default of every version of triton.
            "enable_fp_fusion": True,
        },
    )
    return found.transpose(1, 2)


def scores(query: Tensor, segments: KVSegments) -> Tensor:
    """Products with all keys; arguments and result are those of `reference.scores`."""
    batch, heads, queries, head_dim = query.shape
    rows = query.reshape(batch, segments.kv_heads, heads // segments.kv_heads * queries, head_dim)
    products = [rows @ keys.transpose(2, 3) for keys in _slabs_of_side(segments, "keys", query.dtype)]
    return torch.cat(products, dim=3).reshape(batch, heads, queries, segments.tokens)


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Weighted sums of all values; arguments and result are those of `reference.combine`."""
    batch, heads, queries, tokens = weights.shape
    rows = weights.reshape(batch, segments.kv_heads, heads // segments.kv_heads * queries, tokens)
    sums: list[Tensor] = []
    position = 0
    for values in _slabs_of_side(segments, "values", weights.dtype):
        sums.append(rows.narrow(3, position, values.shape[2]) @ values)
        position += values.shape[2]
    result = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0, dtype=torch.float32).to(weights.dtype)
    return result.reshape(batch, heads, queries, result.shape[3])


def _slabs(segments: KVSegments, dtype: torch.dtype, masked: bool) -> Iterator[DenseSegment]:
    """The segments in slabs of full precision. Dense states are divided only if a mask as long must be converted."""
    for segment in segments.in_order:
        tokens = _slab_tokens(segments, dtype)
        if isinstance(segment, DenseSegment):
            step = tokens if masked else max(segment.tokens, 1)
            for start in range(0, segment.tokens, step):
                end = start + step
                yield DenseSegment(segment.keys[:, :, start:end], segment.values[:, :, start:end])
            continue
        for piece in segment.pieces(max(tokens // segment.keys.block_tokens, 1)):
            if piece.tokens:
                yield DenseSegment(piece.states("keys", dtype), piece.states("values", dtype))


def _slabs_of_side(segments: KVSegments, side: Side, dtype: torch.dtype) -> Iterator[Tensor]:
    for segment in segments.in_order:
        if isinstance(segment, DenseSegment):
            yield segment.side(side)
            continue
        for piece in segment.pieces(max(_slab_tokens(segments, dtype) // segment.keys.block_tokens, 1)):
            yield piece.states(side, dtype)


def _slab_tokens(segments: KVSegments, dtype: torch.dtype) -> int:
    itemsize = dtype.itemsize if runs_triton(segments.device) else UNPACKING_BYTES
    token_bytes = segments.batch * segments.kv_heads * sum(segments.head_dims) * itemsize
    return max(SLAB_BYTES // token_bytes, MINIMUM_SLAB_TOKENS)


# Masks


def unexpanded(mask: Tensor) -> Tensor:
    """A mask of four dimensions with a size of 1 wherever it is the same along a dimension."""
    for dim in range(3):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool or additive mask as finite numbers to be added to scores, in rows that are aligned."""
    tokens = mask.shape[3]
    padded = -(-tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS
    lowest = max(LOWEST_SCORE, torch.finfo(dtype).min)
    bias = torch.full((*mask.shape[:3], padded), lowest, dtype=dtype, device=mask.device)[..., :tokens]
    if mask.dtype == torch.bool:
        return bias.masked_fill_(mask, 0)
    return bias.copy_(mask).clamp_(min=lowest)


# Kernels


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Kernels:
    """Kernels of a device without and with a mask, `None` if it has none for the states."""

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
        As `attend_partly`, `[batch, kv_heads, heads of a group, queries, value_head_dim]` and without the last size.
    """
    kernels = _kernels(query.device, query.dtype, keys.shape[3], values.shape[3])
    bias = None if mask is None else _as_bias(mask, query.dtype)
    kernel = kernels.unmasked if bias is None else kernels.masked
    return (_plain if kernel is None else kernel)(query, keys, values, bias, scale)


@functools.lru_cache(maxsize=64)
def _kernels(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> _Kernels:
    """The fused kernels for states of a dtype and head_dims on a device."""
    none = _Kernels(None, None)
    if dtype not in (torch.float16, torch.bfloat16) or max(key_dim, value_dim) > LARGEST_HEAD_DIM:
        return none
    if key_dim % 8 or value_dim % 8:
        return none
    if device.type == "cpu":
        return _Kernels(_of_cpu, _of_cpu) if key_dim == value_dim else none
    if device.type == "meta":
        # Counting launches: as on a current GPU.
        return _Kernels(_flash if key_dim == value_dim else _efficient, _efficient)
    # Builds for other GPUs have such kernels too, whose log-sum-exp nobody has compared.
    if device.type != "cuda" or torch.version.cuda is None:
        return none
    states = [torch.empty((1, 1, 8, width), dtype=dtype, device=device) for width in (key_dim, key_dim, value_dim)]
    asked = torch.backends.cuda.SDPAParams(*states, None, 0.0, False, False)
    efficient = _efficient if torch.backends.cuda.can_use_efficient_attention(asked) else None
    return _Kernels(_flash if torch.backends.cuda.can_use_flash_attention(asked) else efficient, efficient)


def _flash(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 (Dao 2023, arXiv:2307.08691), which knows query heads that share keys."""
    batch, heads, queries, head_dim = query.shape
    kv_heads = keys.shape[1]
    if query.is_contiguous() or query.numel() * SMALL_PART < keys.numel():
        # As rows of one head, the query heads of a group read each key once.
        query = query.reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, scale=scale)
    if query.shape[1] == heads:
        return out.unflatten(1, (kv_heads, -1)), logsumexp.unflatten(1, (kv_heads, -1))
    return out.unflatten(2, (-1, queries)), logsumexp.unflatten(2, (-1, queries))


def _efficient(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Memory-efficient attention (Rabe and Staats 2021, arXiv:2112.05682), as xFormers has it."""
    return _of_equal_heads(_efficient_of_equal_heads, query, keys, values, bias, scale)


def _efficient_of_equal_heads(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, bias, True, scale=scale
    )
    # Rows are padded to multiples of 32.
    return out, logsumexp[..., : query.shape[2]]


def _of_cpu(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Torch's kernel for a CPU, on which the whole path can be tested."""
    return _of_equal_heads(_of_cpu_of_equal_heads, query, keys, values, bias, scale)


def _of_cpu_of_equal_heads(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
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
        full = bias.unflatten(1, (kv_heads, group)) if bias.shape[1] > 1 else bias.unsqueeze(1)
        full = full.expand(batch, kv_heads, group, queries, tokens)
    if full is None or queries == 1 or group == 1:
        # The query heads of a group are rows of one head.
        rows = query.reshape(batch, kv_heads, group * queries, head_dim)
        out, logsumexp = kernel(rows, keys, values, None if full is None else full.flatten(2, 3), scale)
        return out.unflatten(2, (group, queries)), logsumexp.unflatten(2, (group, queries))
    by_group = query.unflatten(1, (kv_heads, group))
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
    return out.unflatten(1, (kv_heads, -1)), logsumexp.unflatten(1, (kv_heads, -1))
