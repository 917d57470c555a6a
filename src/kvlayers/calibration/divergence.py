"""How far what a cache makes a model predict is from what it predicts in full precision."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dynamic_cache import DynamicCache


def mean_divergence(expected: Tensor, seen: Tensor) -> float:
    """Mean KL divergence of next-token distributions from the expected ones, in nats.

    Args:
        expected: log-probabilities `[tokens, vocab]`, float32.
        seen: the same.

    Example:
        >>> halves, other = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
        >>> round(mean_divergence(halves, other), 4)  # 0.5 * log(0.5 / 0.25) + 0.5 * log(0.5 / 0.75)
        0.1438
    """
    return float((expected.exp() * (expected - seen)).sum(-1, dtype=torch.float64).mean())


def read(model: Any, ids: Tensor, cache: Any, scored: int) -> Tensor:
    """Log-probabilities `[scored, vocab]` after each of the newest `scored` of the tokens `[1, tokens]`, on `cache`."""
    only_scored = {"logits_to_keep": scored} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        logits: Tensor = model(ids, past_key_values=cache, use_cache=True, **only_scored).logits
    return logits[0, -scored:].float().log_softmax(-1)


def divergence_in_use(model: Any, passages: Sequence[Tensor], caches: Sequence[Any], scored: int, chunk: int) -> float:
    """Mean divergence where each passage is read in chunks through a cache, as decoding does.

    What a chunk reads was rounded, and so are the states that it adds: errors add up as they do in use.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens]`.
        caches: an empty cache for each of them.
        scored: newest tokens that count.
        chunk: tokens that are read at once.
    """
    found = []
    for ids, cache in zip(passages, caches, strict=True):
        exact = _read_in_chunks(model, ids, DynamicCache(config=model.config), scored, chunk)
        found.append(mean_divergence(exact, _read_in_chunks(model, ids, cache, scored, chunk)))
    return sum(found) / len(found)


def _read_in_chunks(model: Any, ids: Tensor, cache: Any, scored: int, chunk: int) -> Tensor:
    context = ids[:, :-scored]
    for part in context.split(chunk, dim=1):
        read(model, part, cache, 1)
    return torch.cat([read(model, part, cache, part.shape[1]) for part in ids[:, -scored:].split(chunk, dim=1)])
