"""Attention of queries over a history: which kernel, and what it is told."""

import math

import torch
from torch import Tensor

from ..autocast import without_autocast
from . import blocks, cpu, cuda
from .history import History
from .shared import SharedHistory

AnyHistory = History | SharedHistory


def attend(query: Tensor, history: AnyHistory, mask: Tensor | None, scale: float | None) -> Tensor:
    """Softmax attention of queries over a history.

    Args:
        query: `[batch, heads, queries, key_head_dim]`, heads a multiple of the history's kv_heads.
        history: what they attend to.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(key_head_dim)` where not given.

    Returns:
        `[batch, heads, queries, value_head_dim]` in the dtype of the query.
    """
    batch, heads, queries, head_dim = query.shape
    if mask is not None:
        mask = mask.expand(batch, heads, queries, history.tokens)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    rows = heads // history.kv_heads * queries
    with without_autocast(query.device):
        if isinstance(history, SharedHistory):
            return history.attend(query, mask, scale)
        if rows <= cpu.MOST_ROWS and cpu.supports(query, history):
            return cpu.attend(query, history, mask, scale)
        if rows <= cuda.MOST_ROWS and cuda.supports(query, history):
            return cuda.attend(query, history, mask, scale)
        return blocks.attend(query, history, mask, scale)


def scores(query: Tensor, history: AnyHistory) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`."""
    with without_autocast(query.device):
        if isinstance(history, SharedHistory):
            return history.scores(query)
        return cpu.scores(query, history) if _few(query, history) else blocks.scores(query, history)


def combine(weights: Tensor, history: AnyHistory) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`."""
    with without_autocast(weights.device):
        if isinstance(history, SharedHistory):
            return history.combine(weights)
        return cpu.combine(weights, history) if _few(weights, history) else blocks.combine(weights, history)


def _few(rows: Tensor, history: History) -> bool:
    few = rows.shape[1] // history.kv_heads * rows.shape[2] <= cpu.MOST_ROWS
    return few and cpu.supports(rows, history)


def wants_gradients(*tensors: Tensor) -> bool:
    """Whether autograd would follow what is computed from these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
