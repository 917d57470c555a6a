"""Attention on a CUDA device: the Triton kernel reads the packed segment, torch the dense ones; results are merged."""

import torch
from torch import Tensor

from kvlayers.attention.cuda import launch, support
from kvlayers.attention.reference import merge
from kvlayers.attention.segments import DenseSegment, KVSegments, PackedSegment
from kvlayers.quantizers.hadamard import rotate
from kvlayers.utils.triton_support import device_obstacle

MAXIMUM_ROWS = 4 * launch.MAXIMUM_ROWS
"""Queries of one kv head, over all heads that share it, up to which reading packed codes pays."""


def obstacle(query: Tensor, segments: KVSegments) -> str | None:
    """Why the kernel cannot take queries `[batch, heads, queries, key_head_dim]`; `None` if it can."""
    packed = segments.packed
    if (reason := device_obstacle(query.device)) is not None:
        return reason
    if packed is None:
        return "no token is packed yet"
    if query.shape[1] // segments.kv_heads * query.shape[2] > MAXIMUM_ROWS:
        return f"there are more than {MAXIMUM_ROWS} queries for a kv head, as in a prompt"
    if query.dtype != packed.keys.parameters.dtype:
        return f"queries are {query.dtype}, and scales {packed.keys.parameters.dtype}"
    supported = support.supports(
        packed.keys.format,
        packed.values.format,
        key_head_dim=packed.keys.head_dim,
        value_head_dim=packed.values.head_dim,
        block_tokens=packed.keys.block_tokens,
        dtype=query.dtype,
        device=query.device,
    )
    return None if supported else "the kernel does not support such codes"


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`."""
    parts = []
    position = 0
    for segment in segments.in_order:
        segment_mask = None if mask is None else mask[..., position : position + segment.tokens]
        position += segment.tokens
        if isinstance(segment, DenseSegment):
            parts.append(_attend_dense(query, segment, segment_mask, scale))
        else:
            parts.append(_attend_packed(query, segment, segment_mask, scale))
    outs, logsumexps = zip(*parts, strict=True)
    return merge(outs, logsumexps)[0].to(query.dtype)


def _attend_packed(query: Tensor, segment: PackedSegment, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    if segment.keys.format.rotated:
        # Products stay the same if both sides are rotated, so keys need not be rotated back.
        query = rotate(query.float()).to(query.dtype)
    ends = segment.kernel_cache.get("triton ends")
    if segment.ends is not None and ends is None:
        ends = segment.kernel_cache["triton ends"] = torch.tensor(segment.ends, dtype=torch.int32, device=query.device)
    out, logsumexp = launch.attend_packed(
        query, segment.keys, segment.values, first=segment.first, ends=ends, mask=mask, scale=scale
    )
    return (rotate(out) if segment.values.format.rotated else out), logsumexp


def _attend_dense(query: Tensor, segment: DenseSegment, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    kv_heads = segment.keys.shape[1]
    rows = query.reshape(batch, kv_heads, heads // kv_heads * queries, -1).float() * scale
    scores = (rows @ segment.keys.float().transpose(2, 3)).reshape(batch, heads, queries, segment.tokens)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    logsumexp = torch.logsumexp(scores, dim=-1)
    # A row that sees no token has -inf as its sum, and -inf - -inf is not a number.
    weights = torch.exp(scores - logsumexp.masked_fill(logsumexp == -torch.inf, 0).unsqueeze(-1))
    out = weights.reshape(batch, kv_heads, -1, segment.tokens) @ segment.values.float()
    return out.reshape(batch, heads, queries, -1), logsumexp
