"""Attention by torch's fused kernels, on an accelerator: to packed states slab by slab, with one merge at the end.

It serves whatever the Triton kernel does not take: prompts behind a cache, long drafts, codes without a kernel, and
devices without Triton. A slab is as many packed tokens as may be in full precision at once, in the dtype of the states.
A fused kernel attends to each, and returns the log-sum-exp of the scores, by which slabs are merged.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.dense_segment import DenseSegment
from kvlayers.attention.fused_kernels import ALIGNED_NUMBERS, attend_dense, kernels_for
from kvlayers.attention.gathered_segment import GatheredSegment
from kvlayers.attention.packed_segment import PackedSegment
from kvlayers.attention.piece_columns import PieceColumns
from kvlayers.attention.segments import KVSegments
from kvlayers.quantizers.contract import Side
from kvlayers.quantizers.smoothing import KeySmoothing
from kvlayers.utils.triton_support import TritonKernel, runs_triton

SLAB_BYTES = 1 << 28
"""Bytes of keys, values and mask that are in full precision at once."""

MINIMUM_SLAB_TOKENS = 8192
"""Fewest tokens of a slab, whatever the batch: with fewer, launches and merging cost more than attention."""

UNPACKING_BYTES = 16
"""Bytes that each state takes while plain torch unpacks it: in float32, at several stages at once."""

PARTS_AT_ONCE = 8
"""Results of slabs that are kept until they are merged."""

HIDDEN = -2.3e38
"""Numbers of an additive mask up to which a token counts as hidden, as in the Triton kernel."""

MERGED_ROWS = 4
"""Rows of a result that one program of the Triton kernel merges."""

MERGE_PARTS = TritonKernel("kvlayers.attention.cuda.triton_merge_parts", "merge_parts")

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
    for_packed, offsets = _for_packed(query, segments.smoothing)
    for slab in _slabs(segments, query.dtype, 0 if mask is None else mask.shape[:3].numel()):
        rows = for_packed if slab.is_packed else query
        out, logsumexp = attend_dense(rows, slab.keys, slab.values, slab.mask_of(query, mask), scale)
        if slab.is_packed and offsets is not None:
            logsumexp = logsumexp + (offsets[..., 0] * scale).view(logsumexp.shape)
        parts.append((out, logsumexp))
        if len(parts) == PARTS_AT_ONCE:
            parts = [_merged_partly(parts)]
    return parts


def _for_packed(query: Tensor, smoothing: KeySmoothing | None) -> tuple[Tensor, Tensor | None]:
    """Queries for packed keys, and what their products lack, as `KeySmoothing.offsets`."""
    return (query, None) if smoothing is None else (smoothing.queries(query), smoothing.offsets(query))


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
    if not segments.gathered:
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            return mask.any(-1, keepdim=True).logical_not()
        return mask.amax(-1, keepdim=True) <= HIDDEN
    seen: Tensor | bool = False
    position = 0
    for segment in segments.in_order:
        part = None if mask is None else mask[..., position : position + segment.tokens]
        position += segment.tokens
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
    sizes = {"VALUE_DIM": width, "CHANNELS": 1 << (width - 1).bit_length(), "ROWS": MERGED_ROWS}
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


def scores(query: Tensor, segments: KVSegments) -> Tensor:
    """Products with all keys; arguments and result are those of `reference.scores`."""
    batch, heads, queries, head_dim = query.shape
    rows = query.reshape(batch, segments.kv_heads, heads // segments.kv_heads * queries, head_dim)
    products: dict[int, Tensor] = {}
    for position, gathered in segments.gathered:
        # Padding is written behind the last column.
        products[position] = rows.new_full((*rows.shape[:3], gathered.width + 1), -torch.inf)
    for_packed, offsets = _for_packed(rows, segments.smoothing)
    for slab in _slabs_of_side(segments, "keys", query.dtype):
        found = (for_packed if slab.is_packed else rows) @ slab.states.transpose(2, 3)
        if slab.is_packed and offsets is not None:
            found = (found + offsets).to(found.dtype)
        if slab.gathered is not None:
            slab.gathered.write(found, products[slab.position], 0)
        elif found.shape[3] or not products:
            # An empty slab begins where the next one does.
            products[slab.position] = found
    for position, gathered in segments.gathered:
        products[position] = products[position][..., : gathered.width]
    in_order = [products[position] for position in sorted(products)]
    return torch.cat(in_order, dim=3).reshape(batch, heads, queries, segments.tokens)


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Weighted sums of all values; arguments and result are those of `reference.combine`."""
    batch, heads, queries, tokens = weights.shape
    rows = weights.reshape(batch, segments.kv_heads, heads // segments.kv_heads * queries, tokens)
    sums: list[Tensor] = []
    for slab in _slabs_of_side(segments, "values", weights.dtype):
        if slab.gathered is None:
            part = rows.narrow(3, slab.position, slab.states.shape[2])
        else:
            part = slab.gathered.read(rows.narrow(3, slab.position, slab.gathered.width))
            part = part.masked_fill(slab.gathered.is_padding, 0)
        sums.append(part @ slab.states)
    result = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0, dtype=torch.float32).to(weights.dtype)
    return result.reshape(batch, heads, queries, result.shape[3])


@dataclass(frozen=True, eq=False)
class _Slab:
    """Keys and values of a few tokens in full precision.

    Attributes:
        position: column of the first token, or that of the gathered segment.
        is_packed: whether the tokens were packed, so that the keys are smoothed.
        gathered: where the tokens stand in a gathered segment.
    """

    position: int
    keys: Tensor
    values: Tensor
    is_packed: bool
    gathered: PieceColumns | None = None

    def mask_of(self, query: Tensor, mask: Tensor | None) -> Tensor | None:
        """Entries of the mask of all tokens for those of the slab, without padding."""
        if self.gathered is None:
            return None if mask is None else mask.narrow(3, self.position, self.keys.shape[2])
        batch, heads = query.shape[:2]
        hidden = self.gathered.is_padding.repeat_interleave(heads // self.keys.shape[1], 1)
        if mask is None:
            return hidden.logical_not()
        part = self.gathered.read(mask.narrow(3, self.position, self.gathered.width).expand(batch, heads, -1, -1))
        return part.masked_fill(hidden, False if part.dtype == torch.bool else -torch.inf)


@dataclass(frozen=True, eq=False)
class _SlabOfSide:
    """As `_Slab`, of keys or of values."""

    position: int
    states: Tensor
    is_packed: bool
    gathered: PieceColumns | None


def _slabs(segments: KVSegments, dtype: torch.dtype, mask_rows: int) -> Iterator[_Slab]:
    """The segments in slabs of full precision. Dense states are divided only if a mask as long must be converted."""
    at_once = _slab_tokens(segments, dtype, mask_rows)
    for segment, position, gathered in _parts(segments, at_once):
        if isinstance(segment, DenseSegment):
            step = at_once if mask_rows and gathered is None else max(segment.tokens, 1)
            for start in range(0, segment.tokens, step):
                keys, values = (side[:, :, start : start + step].to(dtype) for side in (segment.keys, segment.values))
                values = values if gathered is None else gathered.cleared(values)
                yield _Slab(position + start, keys, values, False, gathered)
            continue
        if segment.tokens:
            keys, values = segment.states("keys", dtype), segment.states("values", dtype)
            yield _Slab(position, keys, values if gathered is None else gathered.cleared(values), True, gathered)


def _slabs_of_side(segments: KVSegments, side: Side, dtype: torch.dtype) -> Iterator[_SlabOfSide]:
    for segment, position, gathered in _parts(segments, _slab_tokens(segments, dtype, 0)):
        states = segment.side(side).to(dtype) if isinstance(segment, DenseSegment) else segment.states(side, dtype)
        states = states if gathered is None else gathered.cleared(states)
        yield _SlabOfSide(position, states, isinstance(segment, PackedSegment), gathered)


def _parts(
    segments: KVSegments, tokens: int
) -> Iterator[tuple[DenseSegment | PackedSegment, int, PieceColumns | None]]:
    """Dense segments as they are, others in parts of about so many tokens, with the column at which each begins."""
    position = 0
    for segment in segments.in_order:
        if isinstance(segment, DenseSegment):
            yield segment, position, None
        elif isinstance(segment, GatheredSegment):
            for padded, columns in segment.padded_pieces(tokens):
                yield padded, position, columns
        else:
            start = position
            for piece in segment.pieces(max(tokens // segment.keys.block_tokens, 1)):
                yield piece, start, None
                start += piece.tokens
        position += segment.tokens


def _slab_tokens(segments: KVSegments, dtype: torch.dtype, mask_rows: int) -> int:
    """Tokens of a slab, with the columns of a mask that belong to them."""
    itemsize = dtype.itemsize if runs_triton(segments.device) else UNPACKING_BYTES
    numbers = segments.batch * segments.kv_heads * sum(segments.head_dims)
    return max(SLAB_BYTES // (numbers * itemsize + mask_rows * dtype.itemsize), MINIMUM_SLAB_TOKENS)


def unexpanded(mask: Tensor) -> Tensor:
    """A mask of four dimensions with a size of 1 wherever it is the same along a dimension."""
    for dim in range(3):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask
