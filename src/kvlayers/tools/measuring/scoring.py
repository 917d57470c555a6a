"""Reads text through several caches at once, and scores what each makes the model predict."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvlayers.errors import KVLayersError
from kvlayers.tools.measuring.predictions import divergences, newest_logits_only
from kvlayers.upstream import model_types

Key = TypeVar("Key", bound=Hashable)
"""What a cache is known by."""

CacheMaker = Callable[[Any], Any]
"""Makes an empty cache from a model config."""


class ReadingError(KVLayersError, RuntimeError):
    """The model itself cannot read a text, whatever the cache."""


@dataclass
class Scores:
    """What was seen of one cache, one tensor for each passage and chunk.

    Attributes:
        kl: divergence of its next-token distribution from the reference's in nats, float64 `[tokens]`, by passages.
        surprise: negative log-probability of the token that came, float64 `[tokens]`.
        agrees: whether its likeliest token is the reference's, bool `[tokens]`.
        seconds: that its forward passes took.
        failure: what it raised, which ends it.
    """

    kl: list[list[Tensor]] = field(default_factory=list)
    surprise: list[Tensor] = field(default_factory=list)
    agrees: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    failure: str | None = None

    def add(self, expected: Tensor, seen: Tensor, targets: Tensor) -> None:
        """Score log-probabilities `[tokens, vocab]` against `expected` and the token ids `[tokens]` that came."""
        self.kl[-1].append(divergences(expected, seen))
        self.surprise.append(-seen.gather(1, targets[:, None])[:, 0])
        self.agrees.append(seen.argmax(-1) == expected.argmax(-1))

    def summary(self) -> dict[str, Any]:
        """The figures of a table, or the failure."""
        if self.failure is not None:
            return {"failure": self.failure}
        passages = [torch.cat(chunks) for chunks in self.kl]
        divergence = torch.cat(passages)
        return {
            "tokens": divergence.numel(),
            "kl": float(divergence.mean()),
            "kl_99": float(divergence.quantile(0.99)),
            "kl_of_passages": [float(passage.mean()) for passage in passages],
            "perplexity": float(torch.cat(self.surprise).mean().exp()),
            "agreement": float(torch.cat(self.agrees).double().mean()),
            "seconds": self.seconds,
        }


def read(
    model: Any,
    passages: Sequence[Tensor],
    makers: Mapping[Key, CacheMaker],
    context: int,
    chunk: int,
    tick: Callable[[], None],
) -> dict[Key, Scores]:
    """Read each passage through every cache, chunk by chunk side by side, and score what follows the context.

    A cache that raises is left out from there on, unless it is the reference, the first of `makers`.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens + 1]` on the model's device, the last of which is only predicted.
        makers: the caches; the others are compared with the first.
        context: tokens read before scoring begins, through the same cache in the same chunks.
        chunk: tokens of a forward pass.
        tick: called after each chunk.

    Returns:
        The scores of each cache, in the order of `makers`.
    """
    scores = {key: Scores() for key in makers}
    reading = _Reading(model, scores, next(iter(makers)))
    for ids in passages:
        caches: dict[Key, Any] = {}
        for key in (key for key, score in scores.items() if score.failure is None):
            scores[key].kl.append([])
            caches[key] = reading.attempt(key, makers[key], model.config)
        for start in range(0, ids.shape[1] - 1, chunk):
            tokens, targets = ids[:, start : start + chunk], ids[0, start + 1 : start + chunk + 1]
            scored = start >= context
            expected = None
            for key, cache in caches.items():
                if scores[key].failure is not None:
                    continue
                begin = time.perf_counter()
                seen = reading.attempt(key, reading.forward, cache, tokens, scored)
                scores[key].seconds += time.perf_counter() - begin
                if seen is None or not scored:
                    continue
                seen = seen[0].double().log_softmax(-1)
                expected = seen if expected is None else expected
                scores[key].add(expected, seen, targets)
            tick()
    return scores


class _Reading:
    """Forward passes that may fail.

    Args:
        model: in eval mode.
        scores: where failures are kept.
        reference: the key of the cache whose failures are raised.
    """

    def __init__(self, model: Any, scores: Mapping[Any, Scores], reference: Hashable) -> None:
        self._model, self._scores, self._reference = model, scores, reference
        self._argument = model_types.cache_argument(model)
        self._last_alone = newest_logits_only(model)

    def forward(self, cache: Any, tokens: Tensor, scored: bool) -> Tensor:
        """Logits `[1, tokens, vocab]` of tokens `[1, tokens]`; of the last alone where none are scored."""
        options = {self._argument: cache, "use_cache": True, **({} if scored else self._last_alone)}
        with torch.no_grad():
            logits: Tensor = self._model(input_ids=tokens, **options).logits
        return logits

    def attempt(self, key: Hashable, action: Callable[..., Any], *arguments: Any) -> Any:
        """What an action returns, `None` where it raises."""
        try:
            return action(*arguments)
        except Exception as error:
            if key == self._reference:
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ReadingError(
                    f"expected a model that reads the text in full precision, but it raised {type(error).__name__} "
                    f"({said}): check the model, or read less at once."
                ) from error
            self._scores[key].failure = f"{type(error).__name__}: {error}"
            return None
