"""Reads text through several caches at once, and scores what each makes the model predict."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantized import REFERENCE, CacheMaker, Contender


@dataclass
class Scores:
    """What was seen of one cache, one tensor for each passage and chunk.

    Attributes:
        kl: divergence of its next-token distribution from the reference's, float64 `[passages, tokens]`.
        surprise: negative log-probability of the token that came.
        agrees: whether its likeliest token is the reference's.
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
        self.kl[-1].append((expected.exp() * (expected - seen)).sum(-1, dtype=torch.float64))
        self.surprise.append(-seen.gather(1, targets[:, None])[:, 0].double())
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
            "perplexity": math.exp(statistics.fmean(torch.cat(self.surprise).tolist())),
            "agreement": float(torch.cat(self.agrees).double().mean()),
            "seconds": self.seconds,
        }


def read(
    model: Any,
    passages: list[Tensor],
    makers: dict[Contender, CacheMaker],
    context: int,
    chunk: int,
    tick: Callable[[], None],
) -> dict[Contender, Scores]:
    """Read each passage through every cache, chunk by chunk side by side, and score what follows the context.

    A cache that raises is left out from there on, unless it is the reference, the first of `makers`.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens + 1]`, the last of which is only predicted.
        makers: the caches.
        context: tokens read before scoring begins, through the same cache in the same chunks.
        chunk: tokens of a forward pass.
        tick: called after each chunk.
    """
    scores = {contender: Scores() for contender in makers}
    for ids in passages:
        caches: dict[Contender, Any] = {}
        for contender in (contender for contender, score in scores.items() if score.failure is None):
            scores[contender].kl.append([])
            caches[contender] = _attempt(contender, scores, makers[contender], model.config)
        for start in range(0, ids.shape[1] - 1, chunk):
            tokens, targets = ids[:, start : start + chunk], ids[0, start + 1 : start + chunk + 1]
            scored = start >= context
            expected = None
            for contender, cache in caches.items():
                if scores[contender].failure is not None:
                    continue
                begin = time.perf_counter()
                seen = _attempt(contender, scores, _forward, model, cache, tokens, scored)
                scores[contender].seconds += time.perf_counter() - begin
                if seen is None or not scored:
                    continue
                seen = seen[0].float().log_softmax(-1)
                expected = seen if expected is None else expected
                scores[contender].add(expected, seen, targets)
            tick()
    return scores


def _forward(model: Any, cache: Any, tokens: Tensor, scored: bool) -> Tensor:
    with torch.no_grad():
        kept = 0 if scored else 1
        logits: Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=kept).logits
    return logits


def _attempt(contender: Contender, scores: dict[Contender, Scores], action: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return action(*arguments)
    except Exception as error:
        if contender == REFERENCE:
            raise
        scores[contender].failure = f"{type(error).__name__}: {error}"
        return None
