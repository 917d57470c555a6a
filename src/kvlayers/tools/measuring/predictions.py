"""How a model is asked for its predictions, and how two of them are compared."""

import inspect
from typing import Any

import torch
from torch import Tensor


def newest_logits_only(model: Any, tokens: int = 1) -> dict[str, int]:
    """Arguments that make a model compute logits of the newest tokens alone; none where it cannot.

    Example:
        >>> import torch, transformers
        >>> with torch.device("meta"):
        ...     newest_logits_only(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1)))
        {'logits_to_keep': 1}
    """
    return {"logits_to_keep": tokens} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def is_tie(logits: Tensor, expected: int, seen: int, dtype: torch.dtype, roundings: int = 1) -> bool:
    """Whether two tokens are equally likely as far as a dtype can say.

    Args:
        logits: of the reference, float32 `[vocab]`.
        expected: the token that the reference chose.
        seen: the token that was chosen instead.
        dtype: what the model computes in.
        roundings: by how many roundings each of the two logits may be off.

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
        expected: log-probabilities `[tokens, vocab]`, float64: in float32 they sum to 1 so roughly that small
            divergences come out below 0.
        seen: the same.

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
