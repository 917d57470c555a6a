"""KL divergence of a model's predictions with a cache from its predictions in full precision."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.caches.dynamic import DynamicCache
from kvlayers.tools.measuring.predictions import mean_divergence, newest_logits
from kvlayers.upstream import model_types


def read(model: Any, ids: Tensor, cache: Any, scored: int) -> Tensor:
    """Read tokens with a cache, and predict the token after each of the newest tokens.

    Args:
        model: in eval mode.
        ids: the next tokens, int64 `[1, tokens]`.
        cache: holds the tokens before them.
        scored: the number of newest tokens.

    Returns:
        Log-probabilities `[scored, vocab]`, float64.
    """
    at_once = model_types.tokens_at_once(model.config) if cache.get_seq_length() else None
    parts = torch.split(ids, at_once or ids.shape[1], dim=1)
    logits = [newest_logits(model, part, cache, min(scored, part.shape[1])) for part in parts]
    return torch.cat(logits)[-scored:].double().log_softmax(-1)


class DivergenceInUse:
    """Measures caches as they are used: passages are read in chunks, and each chunk attends to rounded states.

    The states that a chunk adds depend on the rounding before it, so errors add up as they do in decoding.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens]`.
        scored: newest tokens of a passage that are scored, and tokens of a chunk.
    """

    def __init__(self, model: Any, passages: Sequence[Tensor], scored: int) -> None:
        self._model, self._passages, self._scored = model, passages, scored
        self._exact = [self._predictions(ids, DynamicCache(config=model.config)) for ids in passages]

    def of(self, make_cache: Callable[[], Any]) -> float:
        """Mean KL divergence of the predictions from full precision, in nats.

        Args:
            make_cache: makes an empty cache; called for each passage.
        """
        found = [
            mean_divergence(exact, self._predictions(ids, make_cache()))
            for ids, exact in zip(self._passages, self._exact, strict=True)
        ]
        return sum(found) / len(found)

    def _predictions(self, ids: Tensor, cache: Any) -> Tensor:
        for part in torch.split(ids[:, : -self._scored], self._scored, dim=1):
            read(self._model, part, cache, 1)
        return read(self._model, ids[:, -self._scored :], cache, self._scored)
