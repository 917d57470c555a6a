"""Prefill and decode steps of a model through one cache after the other, timed and compared."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlayers.tools.measuring.contenders import Contender
from kvlayers.tools.measuring.interleave import quiet_clock, there_and_back
from kvlayers.tools.measuring.nbytes import cache_nbytes
from kvlayers.tools.measuring.predictions import divergences, is_tie, newest_logits_only
from kvlayers.tools.measuring.scoring import ReadingError
from kvlayers.upstream import model_types

WARM_UP_TOKENS = 512
"""Enough for a quantized cache to have packed blocks, so that what compiles code for them has compiled it."""


@dataclass(frozen=True)
class Trial:
    """A prefill and the steps behind it.

    Attributes:
        prefill_seconds: of the forward pass over the whole prompt.
        step_seconds: of each step.
        nbytes: bytes that the cache held at the end.
        predicted: the likeliest token after the prompt and after each step, int64 `[batch, steps + 1]`, on the host.
        kl: mean divergence of these predictions from the reference's, in nats.
    """

    prefill_seconds: float
    step_seconds: list[float]
    nbytes: int
    predicted: Tensor
    kl: float = 0.0


@dataclass
class Row:
    """What the trials of one cache came to.

    Attributes:
        contender: the cache.
        trials: those that it ended.
        failure: what it raised, which ended it.
        other_tokens: in how many predictions the likeliest token was not the reference's, over all trials.
        ties: in how many of those both tokens are equally likely, as far as the dtype can say.
    """

    contender: Contender
    trials: list[Trial] = field(default_factory=list)
    failure: str | None = None
    other_tokens: int = 0
    ties: int = 0

    @property
    def prefill_seconds(self) -> float:
        """Median over the trials."""
        return statistics.median(trial.prefill_seconds for trial in self.trials)

    @property
    def step_seconds(self) -> float:
        """Median over the trials of their median steps."""
        return statistics.median(statistics.median(trial.step_seconds) for trial in self.trials)

    @property
    def step_range(self) -> tuple[float, float]:
        """The least and the greatest median step of a trial; for a single trial, the quartiles of its steps."""
        medians = [statistics.median(trial.step_seconds) for trial in self.trials]
        if len(medians) > 1:
            return min(medians), max(medians)
        steps = self.trials[0].step_seconds
        if len(steps) == 1:
            return steps[0], steps[0]
        first, _, third = statistics.quantiles(steps, n=4, method="inclusive")
        return first, third

    @property
    def step_spread(self) -> float:
        """Half of the range, as a part of the median."""
        least, greatest = self.step_range
        return (greatest - least) / 2 / self.step_seconds

    def is_as_fast_as(self, other: "Row") -> bool:
        """Whether its steps cannot be told from those of another cache: the ranges of the two overlap."""
        (least, greatest), (other_least, other_greatest) = self.step_range, other.step_range
        return least <= other_greatest and other_least <= greatest

    @property
    def nbytes(self) -> int:
        """The most bytes that any trial held at its end."""
        return max(trial.nbytes for trial in self.trials)

    @property
    def kl(self) -> float:
        """Mean divergence of its predictions from the reference's over all trials, in nats."""
        return statistics.fmean(trial.kl for trial in self.trials)

    @property
    def agreement(self) -> float:
        """In which part of the predictions the likeliest token was the reference's."""
        return 1 - self.other_tokens / sum(trial.predicted.numel() for trial in self.trials)

    @property
    def same_tokens(self) -> bool:
        """Whether all tokens were those of the reference, ties aside."""
        return self.other_tokens == self.ties


@dataclass(frozen=True)
class Continuation:
    """A prompt and how it goes on.

    Attributes:
        prompt: int64 `[batch, tokens]`, on the model's device.
        tokens: the tokens that go into each step, int64 `[batch, steps]`, there as well.
        expected: the reference's logits of each prediction, `[steps + 1, batch, vocab]` on the host, if they are known.
    """

    prompt: Tensor
    tokens: Tensor
    expected: Tensor | None = None


def measure(
    model: Any,
    prompt: Tensor,
    steps: int,
    trials: int,
    rivals: Sequence[Contender],
    on_run: Callable[[Contender, int], None],
) -> list[Row]:
    """Time the prefill of a prompt, and the decode steps behind it, through every cache in turns.

    The first cache decodes greedily once, untimed. In the trials every cache is fed those tokens, so that all decode
    one sequence and every prediction is compared by itself; where all are the same, each would have decoded it alone.
    Only one cache is alive at a time. The order turns round every trial.

    Args:
        model: in eval mode.
        prompt: token ids, int64 `[batch, tokens]`.
        steps: decode steps of one token.
        trials: of each cache.
        rivals: the caches; the others are compared with the first. One that raises is left out from there on.
        on_run: called before each run, with the cache and the index of the trial.

    Returns:
        A row for each cache, in the order of `rivals`. Where the first one fails, it is the only one.
    """
    rows = [Row(rival) for rival in rivals]
    reference = rows[0]
    try:
        sequence, logits = _greedy(model, prompt.to(model.device), steps, reference.contender)
    except Exception as error:
        reference.failure = _said(error)
        return rows[:1]
    for trial in range(trials):
        for row in there_and_back(rows, trial):
            on_run(row.contender, trial)
            if row.failure is None:
                _attempt(model, sequence, row)
    for row in rows:
        _compare(row, logits, model.dtype)
    return rows


def warm_up(model: Any, prompt: Tensor, rivals: Sequence[Contender]) -> None:
    """Let every cache run once, on the beginning of a prompt `[batch, tokens]`: some compile code the first time."""
    first = prompt[:, :WARM_UP_TOKENS].to(model.device)
    for rival in rivals:
        # Whoever fails now does so again where it is measured, and is recorded there.
        _attempt(model, Continuation(first, first[:, :2]), Row(rival))


def _attempt(model: Any, sequence: Continuation, row: Row) -> None:
    try:
        row.trials.append(_run(model, sequence, row.contender))
    except Exception as error:
        row.failure = _said(error)
    # What a failure keeps alive, the next cache may have no room for.
    gc.collect()


def _run(model: Any, sequence: Continuation, rival: Contender) -> Trial:
    decoder = _Decoder(model, rival.make())
    with quiet_clock():
        prefill_seconds, newest = decoder.timed(sequence.prompt, **newest_logits_only(model))
        logits, step_seconds = [newest.cpu()], []
        for step in range(sequence.tokens.shape[1]):
            seconds, newest = decoder.timed(sequence.tokens[:, step : step + 1])
            step_seconds.append(seconds)
            logits.append(newest.cpu())
    predicted = torch.stack([newest.argmax(-1) for newest in logits], 1)
    kl = 0.0 if sequence.expected is None else _mean_divergence(sequence.expected, logits)
    return Trial(prefill_seconds, step_seconds, cache_nbytes(decoder.cache), predicted, kl)


def _mean_divergence(expected: Tensor, seen: Sequence[Tensor]) -> float:
    """Mean KL divergence, in nats, of predictions `[batch, vocab]` from `expected`, `[steps + 1, batch, vocab]`."""
    pairs = zip(expected, seen, strict=True)
    each = [divergences(wanted.double().log_softmax(-1), new.double().log_softmax(-1)) for wanted, new in pairs]
    return float(torch.stack(each).mean())


def _greedy(model: Any, prompt: Tensor, steps: int, reference: Contender) -> tuple[Continuation, Tensor]:
    """The greedy continuation, and the logits of each prediction, `[steps + 1, batch, vocab]` on the host."""
    decoder = _Decoder(model, reference.make())
    with quiet_clock():
        _, logits = decoder.timed(prompt, **newest_logits_only(model))
        seen, tokens = [logits.cpu()], [logits.argmax(-1)]
        for _ in range(steps):
            _, logits = decoder.timed(tokens[-1][:, None])
            seen.append(logits.cpu())
            tokens.append(logits.argmax(-1))
    logits = torch.stack(seen)
    # The likeliest of tokens that all are not-a-number is always the first: every cache would agree.
    if logits.isnan().any():
        raise ReadingError("expected logits that are numbers, but saw not-a-number: check the model's weights.")
    return Continuation(prompt, torch.stack(tokens[:-1], 1), logits), logits


class _Decoder:
    """A model with a cache.

    Args:
        model: in eval mode.
        cache: an empty one.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        self.cache = cache
        self._model = model
        self._given = {model_types.cache_argument(model): cache, "use_cache": True}

    def timed(self, ids: Tensor, **options: int) -> tuple[float, Tensor]:
        """Seconds of a forward pass of tokens `[batch, tokens]`, and its last logits `[batch, vocab]`."""
        self._finish()
        begin = time.perf_counter()
        logits: Tensor = self._model(input_ids=ids, **self._given, **options).logits
        self._finish()
        return time.perf_counter() - begin, logits[:, -1]

    def _finish(self) -> None:
        if self._model.device.type != "cpu":
            torch.accelerator.synchronize()


def _compare(row: Row, logits: Tensor, dtype: torch.dtype) -> None:
    expected = logits.argmax(-1).T
    for trial in row.trials:
        for index, step in (trial.predicted != expected).nonzero().tolist():
            row.other_tokens += 1
            wanted, seen = int(expected[index, step]), int(trial.predicted[index, step])
            row.ties += is_tie(logits[step, index].float(), wanted, seen, dtype)


def _said(error: Exception) -> str:
    first = (str(error).strip() or "no words").splitlines()[0]
    return f"{type(error).__name__}: {first}"
