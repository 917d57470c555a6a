"""Attention by torch's fused kernels, on an accelerator: to packed states slab by slab, with one merge at the end.

It serves whatever the Triton kernel does not take: prompts behind a cache, long drafts, codes without a kernel, and
devices without Triton. A slab is as many packed tokens as may be in full precision at once, in the dtype of the states.
A fused kernel attends to each, and returns the log-sum-exp of the scores, by which slabs are merged.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.kernels.attention.fused_kernels import ALIGNED_NUMBERS, attend_dense, kernels_for
from kvlayers.kernels.attention.pieces import StatePiece, slabs
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments
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


def serves(queries: Tensor) -> bool:
    """Whether attention of queries runs here: on accelerators, and where their paths are tested."""
    return not queries.is_cpu or _triton_runs_on_cpu()


@functools.cache
def _triton_runs_on_cpu() -> bool:
    """Whether Triton interprets its kernels on the CPU (`TRITON_INTERPRET=1`), as tests let it."""
    return runs_triton(torch.device("cpu"))


def description(query: Tensor, segments: KVSegments) -> str:
    """The path that attention takes."""
    key_dim, value_dim = segments.head_dims
    return PLAIN if kernels_for(query.device, query.dtype, key_dim, value_dim).masked is None else FUSED


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`.

    A number of an additive mask below -2.3e38 hides a token as `-inf` does.
    """
    parts = _attend_slabs(query, segments, mask, scale)
    return _clear_hidden(_merged(parts, query.dtype).flatten(1, 2), mask, segments).to(query.dtype)


def attend_partly(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """As `attend`, for segments that are only a part of the tokens that the queries attend to; see `attend_all`.

    Returns:
        Attended values `[batch, heads, queries, value_head_dim]`, in the dtype of the query or float32, and the
        log-sum-exp of the scores, float32 `[batch, heads, queries]`. It is about -1e30 (-65504 in float16) if a query
        sees no token of these, and its values are any finite ones.
    """
    out, logsumexp = _merged_partly(_attend_slabs(query, segments, mask, scale))
    return out.flatten(1, 2), logsumexp.flatten(1, 2)


def attend_all(
    parts: Sequence[tuple[Tensor, Tensor]], mask: Tensor | None, segments: KVSegments, dtype: torch.dtype
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
    return _clear_hidden(_merged(grouped, dtype).squeeze(1), mask, segments).to(dtype)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge attention of the same queries to several sets of tokens, in float32. All numbers must be finite.

    Args:
        parts: for each set of tokens, the attended values `[..., queries, value_head_dim]` and the log-sum-exp of the
            scores `[..., queries]`.
    """
    outs, logsumexps = zip(*parts, strict=True)
    shares = torch.softmax(torch.stack(logsumexps), 0)
    return (torch.stack(outs) * shares[..., None]).sum(0)


def _merged(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """As `merge`, for parts `[batch, kv_heads, group, queries, value_head_dim]`; in `dtype` if that costs nothing."""
    if len(parts) == 1:
        return parts[0][0]
    if _merges_by_triton(parts[0][0], dtype):
        return _launch_merge(parts, dtype, logsumexp=False)[0]
    if len(parts) > 2 or {out.dtype for out, _ in parts} != {dtype}:
        return merge(parts)
    (first, its_logsumexp), (second, other) = parts
    share = other - its_logsumexp
    share = torch.sigmoid(share, out=torch.empty_like(share, dtype=dtype))
    return torch.lerp(first, second, share[..., None])


def _merged_partly(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """As `_merged`, in float32 if there are several parts, with the log-sum-exp of all."""
    if len(parts) == 1:
        return parts[0]
    if _merges_by_triton(parts[0][0], torch.float32):
        return _launch_merge(parts, torch.float32, logsumexp=True)
    return merge(parts), torch.logsumexp(torch.stack([logsumexp for _, logsumexp in parts]), 0)


def _attend_slabs(
    query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """What `attend_dense` returns for each slab; a few are merged if there are many."""
    mask = None if mask is None else unexpanded(mask)
    if query.stride(3) != 1 or any(stride % ALIGNED_NUMBERS for stride in query.stride()[:3]):
        query = query.contiguous()
    parts: list[tuple[Tensor, Tensor]] = []
    smoothing = segments.smoothing
    for_packed = query if smoothing is None else smoothing.queries(query)
    offsets = None if smoothing is None else smoothing.offsets(query)
    for slab in slabs(segments, query.dtype, 0 if mask is None else mask.shape[:3].numel()):
        rows = for_packed if slab.is_packed else query
        out, logsumexp = attend_dense(
            rows, slab.states("keys"), slab.states("values"), _mask_of(slab, query, mask), scale
        )
        if slab.is_packed and offsets is not None:
            logsumexp = logsumexp + (offsets[..., 0] * scale).view(logsumexp.shape)
        parts.append((out, logsumexp))
        if len(parts) == PARTS_AT_ONCE:
            parts = [_merged_partly(parts)]
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
    """As `_merged` and `_merged_partly`, by the Triton kernel, in the memory layout of torch's attention."""
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
