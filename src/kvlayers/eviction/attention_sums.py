"""The attention that tokens receive from the newest queries."""

import math

import torch
from torch import Tensor

from kvlayers.errors import StateMismatchError

CPU_SCORES_AT_ONCE = 1 << 21
"""Scores of one KV head that are computed at once on a CPU, unless one query has more."""

ACCELERATOR_SCORES_AT_ONCE = 1 << 26
"""The same on other devices, where launches cost more than memory: 256 MiB in float32. Estimated, not measured."""


def attention_sums(keys: Tensor, queries: Tensor, scale: float | None) -> Tensor:
    """The probabilities with which the newest queries attend to each token, summed over the queries.

    Queries do not attend to tokens behind their own. Scores are computed for a few queries at a time, since those of
    all queries with all keys may not fit into memory.

    Args:
        keys: `[batch, kv_heads, tokens, head_dim]`, of any floating-point dtype.
        queries: `[batch, heads, observed, head_dim]`; the last query is that of the last token.
        scale: factor of the scores, `None` for `1 / sqrt(head_dim)`.

    Returns:
        float32 (float64 for float64 keys) `[batch, kv_heads, query heads of a KV head, tokens]`.
    """
    batch, kv_heads, tokens, head_dim = keys.shape
    observed = queries.shape[2]
    wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
    groups = queries.shape[1] // kv_heads
    grouped = queries.view(batch, kv_heads, groups, observed, head_dim)
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    sums = torch.zeros(batch, kv_heads, groups, tokens, dtype=wide, device=keys.device)
    at_once = CPU_SCORES_AT_ONCE if keys.is_cpu else ACCELERATOR_SCORES_AT_ONCE
    step = max(1, min(observed, at_once // (batch * groups * tokens)))
    later = torch.ones(step, step, dtype=torch.bool, device=keys.device).triu(1)
    for head in range(kv_heads):
        own = keys[:, head].to(wide).transpose(1, 2)
        for first in range(0, observed, step):
            block = grouped[:, head, :, first : first + step].to(wide) * factor
            queries_now = block.shape[2]
            seen = tokens - observed + first + queries_now
            # As rows of one product, since matmul would copy the keys for each query head.
            scores = (block.flatten(1, 2) @ own[..., :seen]).view(batch, groups, queries_now, seen)
            scores[..., seen - queries_now :].masked_fill_(later[:queries_now, :queries_now], -torch.inf)
            sums[:, head, :, :seen] += scores.softmax(dim=-1).sum(dim=2)
    return sums


def needed(queries: Tensor | None, rule: str) -> Tensor:
    """The queries that a rule has asked for.

    Raises:
        StateMismatchError: there are no queries.
    """
    if queries is None or not queries.shape[2]:
        raise StateMismatchError(f"`{rule}.scores` needs the queries of the newest tokens, got {queries}: pass them.")
    return queries
