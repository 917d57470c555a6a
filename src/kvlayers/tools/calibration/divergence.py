"""How far what a cache makes a model predict is from what it predicts in full precision."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.caches.dynamic import DynamicCache
from kvlayers.tools.measuring.predictions import mean_divergence, newest_logits_only
from kvlayers.upstream import model_types


def read(model: Any, ids: Tensor, cache: Any, scored: int) -> Tensor:
    """What a model predicts after each of the newest tokens, as it goes on from a cache.

    Args:
        model: in eval mode.
        ids: the next tokens, `[1, tokens]`.
        cache: what has been read before them.
        scored: newest tokens that count.

    Returns:
        Log-probabilities `[scored, vocab]`, float64.
    """
    given = {model_types.cache_argument(model): cache, "use_cache": True}
    at_once = model_types.tokens_at_once(model.config) if cache.get_seq_length() else None
    found = []
    with torch.no_grad():
        for part in torch.split(ids, at_once or ids.shape[1], dim=1):
            newest = min(scored, part.shape[1])
            found.append(model(input_ids=part, **given, **newest_logits_only(model, newest)).logits[0, -newest:])
    return torch.cat(found)[-scored:].double().log_softmax(-1)


class DivergenceInUse:
    """Measures caches by what they make of passages that are read in chunks, as decoding reads them.

    What a chunk attends to was rounded, and so are the states that it adds: errors add up as they do in use.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens]`.
        scored: newest tokens of a passage that count, and tokens that are read at once.
    """

    def __init__(self, model: Any, passages: Sequence[Tensor], scored: int) -> None:
        self._model, self._passages, self._scored = model, passages, scored
        self._exact = [self._predictions(ids, DynamicCache(config=model.config)) for ids in passages]

    def of(self, make_cache: Callable[[], Any]) -> float:
        """Mean KL divergence in nats of what such a cache makes of the passages.

        Args:
            make_cache: makes an empty one, for each passage.
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
