"""Attention of queries over a history: which kernel, and what it is told."""

import math

import torch
from torch import Tensor

from kvlayers.attention import reference
from kvlayers.attention.cpu import kernel
from kvlayers.attention.cuda import segments
from kvlayers.attention.path_counter import PathCounter
from kvlayers.attention.segments import KVSegments
from kvlayers.attention.shared_prefix import SharedPrefixSegments
from kvlayers.utils.autocast import without_autocast

AnyHistory = KVSegments | SharedPrefixSegments

CPU = "a compiled kernel on packed states"
CUDA = "a Triton kernel on packed states"
BLOCKS = "plain torch, block by block"
SHARED = "plain torch, what sequences share once for all of them"
"""Ways on states as they are held."""


def attend(query: Tensor, history: AnyHistory, mask: Tensor | None, scale: float | None, ways: PathCounter) -> Tensor:
    """Softmax attention of queries over a history.

    Args:
        query: `[batch, heads, queries, key_head_dim]`, heads a multiple of the history's kv_heads.
        history: what they attend to.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(key_head_dim)` where not given.
        ways: is told which way it goes.

    Returns:
        `[batch, heads, queries, value_head_dim]` in the dtype of the query.
    """
    batch, heads, queries, head_dim = query.shape
    if mask is not None:
        mask = mask.expand(batch, heads, queries, history.tokens)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    with without_autocast(query.device):
        if isinstance(history, SharedPrefixSegments):
            ways.note(SHARED)
            return history.attend(query, mask, scale)
        if query.device.type == "cuda":
            obstacle = segments.obstacle(query, history)
            ways.note(CUDA if obstacle is None else f"{BLOCKS}, as {obstacle}")
            return (reference.attend if obstacle else segments.attend)(query, history, mask, scale)
        return (kernel.attend if _has_kernel(query, history, ways) else reference.attend)(query, history, mask, scale)


def scores(query: Tensor, history: AnyHistory, ways: PathCounter) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`."""
    with without_autocast(query.device):
        if isinstance(history, SharedPrefixSegments):
            ways.note(SHARED)
            return history.scores(query)
        return (kernel.scores if _has_kernel(query, history, ways) else reference.scores)(query, history)


def combine(weights: Tensor, history: AnyHistory, ways: PathCounter) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`."""
    with without_autocast(weights.device):
        if isinstance(history, SharedPrefixSegments):
            ways.note(SHARED)
            return history.combine(weights)
        return (kernel.combine if _has_kernel(weights, history, ways) else reference.combine)(weights, history)


def _has_kernel(rows: Tensor, history: KVSegments, ways: PathCounter) -> bool:
    """Whether the CPU's kernel is for rows `[batch, heads, queries, any]`, which is noted."""
    obstacle = kernel.obstacle(rows, history)
    ways.note(CPU if obstacle is None else f"{BLOCKS}, as {obstacle}")
    return obstacle is None


def wants_gradients(*tensors: Tensor) -> bool:
    """Whether autograd would follow what is computed from these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
