"""Attention over a history on a CUDA device: the packed run by the Triton kernel, the dense ones by torch, merged."""

import torch
from torch import Tensor

from kvlayers.attention.cuda import launch
from kvlayers.attention.merging import merge
from kvlayers.attention.segments import DenseSegment, KVSegments, PackedSegment
from kvlayers.quantizers.hadamard import rotate

MOST_ROWS = 4 * launch.MAXIMUM_ROWS
"""Queries of one kv head, over all heads that share it, up to which reading packed codes pays."""


def obstacle(query: Tensor, history: KVSegments) -> str | None:
    """Why the kernel is not for such queries `[batch, heads, queries, key_head_dim]`; `None` where it is."""
    run = history.packed
    if query.device.type != "cuda":
        return f"there is none for {query.device.type}"
    if run is None:
        return "nothing is packed yet"
    if query.shape[1] // history.kv_heads * query.shape[2] > MOST_ROWS:
        return f"there are more than {MOST_ROWS} queries for a kv head, as in a prompt"
    if query.dtype != run.keys.parameters.dtype:
        return f"queries are {query.dtype}, and scales {run.keys.parameters.dtype}"
    supported = launch.supports(
        run.keys.format,
        run.values.format,
        key_head_dim=run.keys.head_dim,
        value_head_dim=run.values.head_dim,
        block_tokens=run.keys.block_tokens,
        dtype=query.dtype,
        device=query.device,
    )
    return None if supported else "Triton, or the kernel, is not for such codes on this device"


def attend(query: Tensor, history: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention, as `blocks.attend`."""
    parts = []
    position = 0
    for run in history.runs:
        of_run = None if mask is None else mask[..., position : position + run.tokens]
        position += run.tokens
        if isinstance(run, DenseSegment):
            parts.append(_attend_dense(query, run, of_run, scale))
        else:
            parts.append(_attend_packed(query, run, of_run, scale))
    outs, lses = zip(*parts, strict=True)
    return merge(outs, lses)[0].to(query.dtype)


def _attend_packed(query: Tensor, run: PackedSegment, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    if run.keys.format.rotated:
        # Products stay what they are where both sides are rotated, so that keys need not be rotated back.
        query = rotate(query.float()).to(query.dtype)
    ends = run.for_kernels.get("triton ends")
    if run.ends is not None and ends is None:
        ends = run.for_kernels["triton ends"] = torch.tensor(run.ends, dtype=torch.int32, device=query.device)
    out, lse = launch.attend_packed(query, run.keys, run.values, first=run.first, ends=ends, mask=mask, scale=scale)
    return (rotate(out) if run.values.format.rotated else out), lse


def _attend_dense(query: Tensor, run: DenseSegment, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    kv_heads = run.keys.shape[1]
    rows = query.reshape(batch, kv_heads, heads // kv_heads * queries, -1).float() * scale
    scores = (rows @ run.keys.float().transpose(2, 3)).reshape(batch, heads, queries, run.tokens)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    # A row that sees nothing has -inf for its sum, and -inf - -inf is not a number.
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
    out = weights.reshape(batch, kv_heads, -1, run.tokens) @ run.values.float()
    return out.reshape(batch, heads, queries, -1), lse
