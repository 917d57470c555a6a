"""Predictions of a model with a cache, and how two predictions are compared."""

from typing import Any

import torch
from torch import Tensor

from kvlayers.upstream import cache_argument, model_types


def newest_logits(model: Any, ids: Tensor, cache: Any, newest: int) -> Tensor:
    """Feed tokens `[1, tokens]` to a model with a cache: logits `[newest, vocab]` of the newest ones."""
    inputs = {
        cache_argument.name_for(model): cache,
        "use_cache": True,
        **model_types.newest_logits_only(model, newest),
    }
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **inputs).logits
    return logits[0, -newest:]


def is_tie(logits: Tensor, expected: int, seen: int, dtype: torch.dtype, roundings: int = 1) -> bool:
    """Whether two tokens are equally likely within the precision of a dtype.

    Args:
        logits: logits of the reference, float32 `[vocab]`.
        expected: the token that the reference chose.
        seen: the token that was chosen instead.
        dtype: dtype that the model computes in.
        roundings: the number of roundings by which each of the two logits may be off.

    Example:
        >>> logits = torch.tensor([8.0, 7.95, 7.5])
        >>> is_tie(logits, 0, 1, torch.bfloat16), is_tie(logits, 0, 2, torch.bfloat16)
        (True, False)
    """
    rounding = 2 * roundings * torch.finfo(dtype).eps * logits[expected].abs()
    return bool(logits[expected] - logits[seen] <= rounding)


def divergences(expected: Tensor, seen: Tensor) -> Tensor:
    """KL divergence of each next-token distribution from the expected one, in nats.

    Args:
        expected: log-probabilities `[tokens, vocab]`, float64. In float32 their rounding would make small divergences
            negative.
        seen: log-probabilities `[tokens, vocab]`, float64.

    Returns:
        `[tokens]`.

    Example:
        >>> halves, other = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
        >>> divergences(halves, other)  # 0.5 * log(0.5 / 0.25) + 0.5 * log(0.5 / 0.75)
        tensor([0.1438])
    """
    return (expected.exp() * (expected - seen)).sum(-1)


def mean_divergence(expected: Tensor, seen: Tensor) -> float:
    """Mean of `divergences` over the tokens."""
    return float(divergences(expected, seen).mean())
