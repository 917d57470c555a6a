"""Reads text through several caches side by side, and scores the predictions with each."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvlayers.errors import KVLayersError
from kvlayers.tools.measuring.predictions import divergences, newest_logits

Key = TypeVar("Key", bound=Hashable)
"""Identifies a cache."""

CacheMaker = Callable[[Any], Any]
"""Makes an empty cache from a model config."""


class ReadingError(KVLayersError, RuntimeError):
    """The model cannot read a text, whichever cache it has."""


@dataclass
class Scores:
    """Scores of one cache, a tensor for each chunk.

    Attributes:
        kl: KL divergence of the next-token distributions from the reference's, in nats, float64 `[tokens]`, in a list
            for each passage.
        surprise: negative log-probability of each next token of the text, float64 `[tokens]`.
        agrees: whether the likeliest token is the reference's, bool `[tokens]`.
        seconds: seconds of the forward passes.
        failure: the error that ended the reading, `None` if there was none.
    """

    kl: list[list[Tensor]] = field(default_factory=list)
    surprise: list[Tensor] = field(default_factory=list)
    agrees: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    failure: str | None = None

    def add(self, expected: Tensor, seen: Tensor, targets: Tensor) -> None:
        """Score log-probabilities `[tokens, vocab]` against `expected`, and against the text's token ids `[tokens]`."""
        self.kl[-1].append(divergences(expected, seen))
        self.surprise.append(-seen.gather(1, targets[:, None])[:, 0])
        self.agrees.append(seen.argmax(-1) == expected.argmax(-1))

    def summary(self) -> dict[str, Any]:
        """The figures, or the failure."""
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
    """Read each passage through every cache, chunk by chunk, and score the predictions after the context.

    A cache that raises an error reads no further. The error of the reference, the first of `makers`, is raised.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens + 1]` on the model's device; the last one is only predicted.
        makers: the caches, the reference first.
        context: tokens before the scored ones, read through the same cache in the same chunks.
        chunk: tokens of a forward pass.
        tick: called after each chunk.

    Returns:
        The scores of each cache, in the order of `makers`.
    """
    scores = {key: Scores() for key in makers}
    reading = _Reading(scores, next(iter(makers)))
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
                newest = tokens.shape[1] if scored else 1
                seen = reading.attempt(key, newest_logits, model, tokens, cache, newest)
                scores[key].seconds += time.perf_counter() - begin
                if seen is None or not scored:
                    continue
                seen = seen.double().log_softmax(-1)
                expected = seen if expected is None else expected
                scores[key].add(expected, seen, targets)
            tick()
    return scores


class _Reading:
    """Records the errors of caches. Raises the errors of the reference.

    Args:
        scores: where errors are recorded.
        reference: the key of the reference.
    """

    def __init__(self, scores: Mapping[Any, Scores], reference: Hashable) -> None:
        self._scores, self._reference = scores, reference

    def attempt(self, key: Hashable, action: Callable[..., Any], *arguments: Any) -> Any:
        """Result of an action, `None` if it raises an error."""
        try:
            return action(*arguments)
        except Exception as error:
            if key == self._reference:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ReadingError(
                    f"The model cannot read the text in full precision, {type(error).__name__} ({reason}): check the "
                    "model, or read fewer tokens at once."
                ) from error
            self._scores[key].failure = f"{type(error).__name__}: {error}"
            return None
