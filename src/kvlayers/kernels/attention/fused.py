"""Attention by torch's fused kernels, on an accelerator: to packed states slab by slab, with one merge at the end.

It serves whatever the Triton kernel does not take: prompts behind a cache, long drafts, codes without a kernel, and
devices without Triton. A slab is as many packed tokens as may be in full precision at once, in the dtype of the states.
A fused kernel attends to each, and returns the log-sum-exp of the scores, by which slabs are merged. It takes grouped
query heads, and does not copy keys or values for them. States that no fused kernel takes go through plain torch.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers.kernels.attention.pieces import StatePiece, slabs
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, smoothing_of
from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import TritonKernel, power_of_two, runs_triton

PARTS_AT_ONCE = 8
"""Results of slabs that are kept until they are merged."""

HIDDEN = -2.3e38
"""Numbers of an additive mask up to which a token counts as hidden, as in the Triton kernel."""

MERGED_ROWS = 4
"""Rows of a result that one program of the Triton kernel merges."""

MERGE_PARTS = TritonKernel("kvlayers.kernels.attention.cuda.triton_kernels", "merge_parts")

FUSED = "torch's fused attention"
PLAIN = "plain torch"


INTERPRETED = triton_support.is_interpreted()
"""Whether Triton interprets its kernels, so that tests take the paths of accelerators on a CPU."""


def serves(queries: Tensor) -> bool:
    """Whether attention of queries runs here: on accelerators, and where their paths are tested."""
    return not queries.is_cpu or INTERPRETED


def description(query: Tensor, segments: KVSegments) -> str:
    """The path that attention takes."""
    key_dim, value_dim = segments.head_dims
    return PLAIN if kernels_for(query.device, query.dtype, key_dim, value_dim).masked is None else FUSED


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`.

    A number of an additive mask below -2.3e38 hides a token as `-inf` does.
    """
    out, _ = _merged(_attend_slabs(query, segments, mask, scale), query.dtype)
    return _clear_hidden(out.flatten(1, 2), mask, segments).to(query.dtype)


def attend_partly(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """As `attend`, for segments that are only a part of the tokens that the queries attend to; see `attend_all`.

    Returns:
        Attended values `[batch, heads, queries, value_head_dim]`, in the dtype of the query or float32, and the
        log-sum-exp of the scores, float32 `[batch, heads, queries]`. It is about -1e30 (-65504 in float16) if a query
        sees no token of these, and its values are any finite ones.
    """
    out, logsumexp = _merged(_attend_slabs(query, segments, mask, scale))
    return out.flatten(1, 2), logsumexp.flatten(1, 2)


def attend_all(
    parts: Sequence[Sequence[Tensor]], mask: Tensor | None, segments: KVSegments, dtype: torch.dtype
) -> Tensor:
    """Attention to several sets of tokens together, in a dtype, with zeros for queries that see none.

    Args:
        parts: what `attend_partly` returned for each set.
        mask: the mask of all tokens.
        segments: all tokens.
        dtype: dtype of the result.
    """
    # All query heads as one group.
    grouped = [(out.unsqueeze(1), logsumexp.unsqueeze(1)) for out, logsumexp in parts]
    return _clear_hidden(_merged(grouped, dtype)[0].squeeze(1), mask, segments).to(dtype)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge attention of the same queries to several sets of tokens, in float32. All numbers must be finite.

    Args:
        parts: for each set of tokens, the attended values `[..., queries, value_head_dim]` and the log-sum-exp of the
            scores `[..., queries]`.
    """
    outs, logsumexps = zip(*parts, strict=True)
    shares = torch.softmax(torch.stack(logsumexps), 0)
    return (torch.stack(outs) * shares[..., None]).sum(0)


def _merged(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """As `merge`, for parts `[batch, kv_heads, group, queries, value_head_dim]`, with the log-sum-exp of all.

    If a dtype is given, results are in it if that costs nothing, and the log-sum-exp may be that of any part.
    """
    (first, its_logsumexp), *others = parts
    if not others:
        return first, its_logsumexp
    if _merges_by_triton(first, dtype or torch.float32):
        return _launch_merge(parts, dtype or torch.float32, logsumexp=dtype is None)
    if len(others) == 1 and first.dtype == others[0][0].dtype == dtype:
        share = others[0][1] - its_logsumexp
        share = torch.sigmoid(share, out=torch.empty_like(share, dtype=dtype))
        return torch.lerp(first, others[0][0], share[..., None]), its_logsumexp
    # The log-sum-exp would cost launches that nobody needs.
    return merge(parts), its_logsumexp if dtype else torch.logsumexp(torch.stack([total for _, total in parts]), 0)


def _attend_slabs(
    query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """What `attend_dense` returns for each slab; a few are merged if there are many."""
    mask = None if mask is None else unexpanded(mask)
    if query.stride(3) != 1 or any(stride % ALIGNED_NUMBERS for stride in query.stride()[:3]):
        query = query.contiguous()
    parts: list[tuple[Tensor, Tensor]] = []
    smoothing, rows, offsets = None, query, None
    for slab in slabs(segments, query.dtype, 0 if mask is None else mask.shape[:3].numel()):
        if (of_slab := smoothing_of(slab.segment)) is not smoothing:
            smoothing = of_slab
            rows = query if smoothing is None else smoothing.queries(query)
            offsets = None if smoothing is None else smoothing.offsets(query)
        out, logsumexp = attend_dense(
            rows, slab.states("keys"), slab.states("values"), _mask_of(slab, query, mask), scale
        )
        if offsets is not None:
            logsumexp = logsumexp + (offsets[..., 0] * scale).view(logsumexp.shape)
        parts.append((out, logsumexp))
        if len(parts) == PARTS_AT_ONCE:
            parts = [_merged(parts)]
    return parts


def _clear_hidden(out: Tensor, mask: Tensor | None, segments: KVSegments) -> Tensor:
    """Results with zeros, written in place, for queries that may attend to no token, as in torch."""
    hidden = _hidden_queries(None if mask is None else unexpanded(mask), segments)
    if hidden is None:
        return out
    if hidden.shape[1] not in (1, out.shape[1]):
        hidden = hidden.repeat_interleave(out.shape[1] // hidden.shape[1], 1)
    return out.masked_fill_(hidden, 0)


def _hidden_queries(mask: Tensor | None, segments: KVSegments) -> Tensor | None:
    """Which queries see no token, bool of four dimensions, with any number of heads that divides that of queries."""
    if not segments.holds_gathered:
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            return mask.any(-1, keepdim=True).logical_not()
        return mask.amax(-1, keepdim=True) <= HIDDEN
    seen: Tensor | bool = False
    for position, segment in segments.with_columns:
        part = None if mask is None else mask.narrow(3, position, segment.tokens)
        if part is not None and part.dtype != torch.bool:
            part = part > HIDDEN
        if not isinstance(segment, GatheredSegment):
            if part is None and segment.tokens:
                return None
            seen = seen | (False if part is None else part.any(-1, keepdim=True))
            continue
        held = segment.held
        if part is not None and part.shape[1] > 1:
            held = held.repeat_interleave(part.shape[1] // held.shape[1], 1)
        if part is None:
            found = held.any(-1)[..., None, None]
        else:
            found = torch.einsum("bhqc,bhc->bhq", part.float(), held.float())[..., None] > 0
        seen = seen | found
    return None if isinstance(seen, bool) else seen.logical_not()


def _launch_merge(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, logsumexp: bool) -> tuple[Tensor, Tensor]:
    """As `_merged`, by the Triton kernel, in the memory layout of torch's attention."""
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


def _merges_by_triton(out: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device of a part can run `merge_parts` with results of a dtype."""
    return runs_triton(out.device) and _has_merge_parts(out.device, dtype, out.shape[-1])


@functools.lru_cache(maxsize=64)
def _has_merge_parts(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    # The kernel is compiled, not launched.
    out, logsumexp = (torch.empty(1, dtype=kind, device=device) for kind in (dtype, torch.float32))
    arguments = (out, out), (logsumexp, logsumexp), (16,) * 16, out, logsumexp, 16, 16, 16, 16
    return MERGE_PARTS.obstacle(device, (1,), arguments, _merge_constants(width, 2, False)) is None


def _mask_of(piece: StatePiece, query: Tensor, mask: Tensor | None) -> Tensor | None:
    """Entries of the mask of all tokens for those of a piece, without padding."""
    if piece.gathered is None:
        return None if mask is None else piece.columns_of(mask)
    batch, heads = query.shape[:2]
    padding = piece.gathered.is_padding
    hidden = padding.repeat_interleave(heads // padding.shape[1], 1)
    if mask is None:
        return hidden.logical_not()
    part = piece.columns_of(mask.expand(batch, heads, -1, -1))
    return part.masked_fill(hidden, False if part.dtype == torch.bool else -torch.inf)


def unexpanded(mask: Tensor) -> Tensor:
    """A mask of four dimensions with a size of 1 wherever it is the same along a dimension."""
    for dim in range(3):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


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
