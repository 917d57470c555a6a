"""Attention of the same queries over several sets of tokens, put together as if it had been over all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial attentions by the log-sum-exp of their scores.

    Args:
        outs: for each set of tokens, the attended values float32 `[batch, heads, q_tokens, head_dim]`, normalised
            within the set.
        lses: for each set, float32 `[batch, heads, q_tokens]`: the logarithm of the summed exponentials of its
            scores; `-inf` where a query sees no token of the set.

    Returns:
        The attended values of all sets, zeros where a query sees no token at all, and their log-sum-exp.
    """
    stacked = torch.stack(tuple(lses))
    largest = stacked.amax(0)
    # Where every set is -inf, -inf - -inf would be nan.
    weights = torch.exp(stacked - largest.masked_fill(largest == -torch.inf, 0))
    total = weights.sum(0)
    shares = weights / total.masked_fill(total == 0, 1)
    # A set that a query sees nothing of may hold anything there, nan also, which a weight of zero would not remove.
    parts = (torch.stack(tuple(outs)) * shares[..., None]).masked_fill(shares[..., None] == 0, 0)
    return parts.sum(0), largest + torch.log(total)
