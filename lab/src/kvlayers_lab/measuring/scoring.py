"""Predictions of a model with a cache, how two are compared, and texts that are read through caches side by side."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvlayers import models
from kvlayers.commands.console import first_line
from kvlayers.errors import KVLayersError


def newest_logits(model: Any, ids: Tensor, cache: Any, newest: int) -> Tensor:
    """Feed tokens `[1, tokens]` to a model with a cache: logits `[newest, vocab]` of the newest ones."""
    inputs = {
        models.name_for(model): cache,
        "use_cache": True,
        **models.newest_logits_only(model, newest),
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


def token_scores(expected: Tensor, seen: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL divergence, surprise by the text, and whether the likeliest token is the same, of each token, `[tokens]`.

    Args:
        expected: log-probabilities of the reference, `[tokens, vocab]`, float64.
        seen: log-probabilities `[tokens, vocab]`, float64.
        targets: the next token ids of the text, `[tokens]`.
    """
    surprise = -seen.gather(1, targets[:, None])[:, 0]
    return divergences(expected, seen), surprise, seen.argmax(-1) == expected.argmax(-1)


Key = TypeVar("Key", bound=Hashable)
"""Identifies a cache."""

CacheMaker = Callable[[Any], Any]
"""Makes an empty cache from a model config."""


class ReadingError(KVLayersError, RuntimeError):
    """The model cannot read a text, whichever cache it has."""


@dataclass(frozen=True)
class PassageScores:
    """Scores of one cache on one passage. Each tuple has an entry for each scored token.

    Attributes:
        kl: KL divergence of the next-token distribution from the reference's, in nats.
        surprise: negative log-probability of the next token of the text, in nats.
        agrees: whether the likeliest next token is the reference's.
        seconds: seconds of the forward passes.
        failure: the error that ended the reading, `None` if there was none. The tuples are empty after an error.
    """

    kl: tuple[float, ...] = ()
    surprise: tuple[float, ...] = ()
    agrees: tuple[bool, ...] = ()
    seconds: float = 0.0
    failure: str | None = None


@dataclass
class Scores:
    """Scores of one cache.

    Attributes:
        passages: the scores of each passage that it has read.
    """

    passages: list[PassageScores] = field(default_factory=list)

    @property
    def failure(self) -> str | None:
        """The error that ended the reading, `None` if there was none."""
        return self.passages[-1].failure if self.passages else None

    def summary(self) -> dict[str, Any]:
        """The figures, or the failure."""
        if self.failure is not None:
            return {"failure": self.failure}
        passages = [torch.tensor(each.kl, dtype=torch.float64) for each in self.passages]
        surprise = [torch.tensor(each.surprise, dtype=torch.float64) for each in self.passages]
        divergence, agreements = torch.cat(passages), sum(sum(each.agrees) for each in self.passages)
        return {
            "tokens": divergence.numel(),
            "kl": float(divergence.mean()),
            "kl_99": float(divergence.quantile(0.99)),
            "kl_of_passages": [float(passage.mean()) for passage in passages],
            "perplexity": float(torch.cat(surprise).mean().exp()),
            "agreement": agreements / divergence.numel(),
            "seconds": sum(each.seconds for each in self.passages),
        }


class NoRecord:
    """What is known of passages that were read before, and what is kept of others: here nothing."""

    def of_passage(self, index: int) -> Mapping[Any, PassageScores]:
        """The scores of each cache that has read the passage with this index, by what identifies it."""
        return {}

    def add(self, index: int, cache: Any, scores: PassageScores) -> None:
        """Keep the scores of a cache on the passage with this index."""


def read(
    model: Any,
    passages: Sequence[Tensor],
    makers: Mapping[Key, CacheMaker],
    context: int,
    chunk: int,
    record: NoRecord,
    tick: Callable[[], None],
) -> dict[Key, Scores]:
    """Read passages through every cache. Raises as `read_passage`.

    Args:
        model: in eval mode.
        passages: token ids, int64 `[1, tokens + 1]`, on any device.
        makers: the caches, the reference first.
        context: tokens of each passage before the scored ones.
        chunk: tokens of a forward pass.
        record: what was read before, which is not read again, and keeps what is read now. If any cache reads a
            passage, so does the reference.
        tick: called after each chunk.

    Returns:
        The scores of each cache, in the order of `makers`. A cache that raises an error reads no further.
    """
    reference = next(iter(makers))
    scores = {key: Scores() for key in makers}
    for index, ids in enumerate(passages):
        alive = {key: make for key, make in makers.items() if scores[key].failure is None}
        known = record.of_passage(index)
        missing = [key for key in alive if key not in known]
        found: Mapping[Key, PassageScores] = {}
        if missing:
            wanted = {key: make for key, make in alive.items() if key in (reference, *missing)}
            found = read_passage(model, ids.to(model.device), wanted, context, chunk, tick)
        else:
            for _ in range(0, ids.shape[1] - 1, chunk):
                tick()
        for key in missing:
            record.add(index, key, found[key])
        for key in alive:
            scores[key].passages.append(found[key] if key in missing else known[key])
    return scores


def read_passage(
    model: Any,
    ids: Tensor,
    makers: Mapping[Key, CacheMaker],
    context: int,
    chunk: int,
    tick: Callable[[], None],
) -> dict[Key, PassageScores]:
    """Read a passage through every cache, chunk by chunk, and score the predictions after the context.

    Args:
        model: in eval mode.
        ids: token ids `[1, tokens + 1]` on the model's device; the last one is only predicted.
        makers: the caches, the reference first.
        context: tokens before the scored ones, read through the same cache in the same chunks.
        chunk: tokens of a forward pass.
        tick: called after each chunk.

    Returns:
        The scores of each cache, in the order of `makers`.

    Raises:
        ReadingError: the model cannot read the passage through the reference.
    """
    reference = next(iter(makers))
    readers = {key: _Reader(make, model, key == reference) for key, make in makers.items()}
    for start in range(0, ids.shape[1] - 1, chunk):
        tokens, targets = ids[:, start : start + chunk], ids[0, start + 1 : start + chunk + 1]
        expected = None
        for reader in readers.values():
            if start < context:
                reader.read(tokens, 1)
                continue
            seen = reader.read(tokens, chunk)
            if seen is not None:
                seen = seen.double().log_softmax(-1)
                expected = seen if expected is None else expected
                reader.score(expected, seen, targets)
        tick()
    return {key: reader.scores() for key, reader in readers.items()}


class _Reader:
    """Reads one passage through one cache, and records the error that ends it.

    Args:
        make: makes the cache.
        model: the model.
        is_reference: whether an error is raised, because no other cache can be scored without this one.
    """

    def __init__(self, make: CacheMaker, model: Any, is_reference: bool) -> None:
        self._model = model
        self._is_reference = is_reference
        self._failure: str | None = None
        self._seconds = 0.0
        self._scores: list[tuple[Tensor, Tensor, Tensor]] = []
        self._cache = self._attempt(make, model.config)

    def read(self, tokens: Tensor, newest: int) -> Tensor | None:
        """Logits `[newest, vocab]` of the newest of the tokens; `None` after an error."""
        if self._failure is not None:
            return None
        begin = time.perf_counter()
        logits: Tensor | None = self._attempt(newest_logits, self._model, tokens, self._cache, newest)
        self._seconds += time.perf_counter() - begin
        return logits

    def score(self, expected: Tensor, seen: Tensor, targets: Tensor) -> None:
        """Score log-probabilities `[tokens, vocab]` against `expected`, and against the text's token ids `[tokens]`."""
        self._scores.append(token_scores(expected, seen, targets))

    def scores(self) -> PassageScores:
        """All scores, on the host."""
        if self._failure is not None:
            return PassageScores(seconds=self._seconds, failure=self._failure)
        kl, surprise, agrees = (torch.cat(parts).tolist() for parts in zip(*self._scores, strict=True))
        return PassageScores(tuple(kl), tuple(surprise), tuple(agrees), self._seconds)

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """Result of an action, `None` if it raises an error."""
        try:
            return action(*arguments)
        except Exception as error:
            if self._is_reference:
                raise ReadingError(
                    f"The model cannot read the text in full precision, {type(error).__name__} ({first_line(error)}): "
                    "check the model, or read fewer tokens at once."
                ) from error
            self._failure = f"{type(error).__name__}: {error}"
            return None
