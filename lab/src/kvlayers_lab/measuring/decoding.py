"""Times the prefill and the decode steps of a model through several caches, and compares their predictions."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvlayers import models
from kvlayers.commands.console import first_line
from kvlayers_lab.measuring.contenders import Contender
from kvlayers_lab.measuring.nbytes import cache_nbytes
from kvlayers_lab.measuring.scoring import ReadingError, divergences, is_tie

WARM_UP_TOKENS = 512
"""Tokens enough for a quantized cache to pack blocks, so that the code for packed blocks is compiled before timing."""


Entrant = TypeVar("Entrant")


@contextmanager
def quiet_clock() -> Iterator[None]:
    """Time without garbage collection, and without gradients."""
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        gc.enable()


def there_and_back(entrants: Sequence[Entrant], turn: int) -> list[Entrant]:
    """The entrants in their order, reversed every other turn.

    Example:
        >>> there_and_back(["a", "b", "c"], 1)
        ['c', 'b', 'a']
    """
    return list(reversed(entrants)) if turn % 2 else list(entrants)


@dataclass(frozen=True)
class Trial:
    """A prefill and its decode steps.

    Attributes:
        prefill_seconds: seconds of the forward pass over the whole prompt.
        step_seconds: seconds of each step.
        nbytes: bytes that the cache held at the end.
        predicted: the likeliest token after the prompt and after each step, int64 `[batch, steps + 1]`, on the host.
        kl: mean KL divergence of these predictions from the reference's, in nats.
    """

    prefill_seconds: float
    step_seconds: list[float]
    nbytes: int
    predicted: Tensor
    kl: float = 0.0


@dataclass
class ContenderResult:
    """The trials of one cache.

    Attributes:
        contender: the cache.
        trials: the trials that the cache finished.
        failure: the error that ended its trials, `None` if there was none.
        other_tokens: predictions, over all trials, whose likeliest token is not the reference's.
        ties: how many of `other_tokens` are ties: both tokens are equally likely within the precision of the dtype.
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
        """Median over the trials of each trial's median step."""
        return statistics.median(statistics.median(trial.step_seconds) for trial in self.trials)

    @property
    def step_range(self) -> tuple[float, float]:
        """The shortest and the longest median step of a trial; for a single trial, the quartiles of its steps."""
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
        """Half of the range, as a fraction of the median."""
        least, greatest = self.step_range
        return (greatest - least) / 2 / self.step_seconds

    def is_as_fast_as(self, other: "ContenderResult") -> bool:
        """Whether the step times of two caches overlap."""
        (least, greatest), (other_least, other_greatest) = self.step_range, other.step_range
        return least <= other_greatest and other_least <= greatest

    @property
    def nbytes(self) -> int:
        """The most bytes that the cache held at the end of a trial."""
        return max(trial.nbytes for trial in self.trials)

    @property
    def kl(self) -> float:
        """Mean KL divergence of the predictions from the reference's over all trials, in nats."""
        return statistics.fmean(trial.kl for trial in self.trials)

    @property
    def agreement(self) -> float:
        """Share of the predictions whose likeliest token is the reference's."""
        return 1 - self.other_tokens / sum(trial.predicted.numel() for trial in self.trials)

    @property
    def same_tokens(self) -> bool:
        """Whether all predicted tokens are the reference's, ties aside."""
        return self.other_tokens == self.ties


@dataclass(frozen=True)
class Continuation:
    """A prompt and its continuation.

    Attributes:
        prompt: int64 `[batch, tokens]`, on the model's device.
        tokens: the input tokens of each step, int64 `[batch, steps]`, on the model's device.
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
    contenders: Sequence[Contender],
    on_run: Callable[[Contender, int], None],
    at_once: int = 1,
) -> list[ContenderResult]:
    """Time the prefill of a prompt and its decode steps through every cache, with the trials interleaved.

    The first cache is the reference. It decodes greedily once, untimed. In the trials, every cache is fed the tokens
    of that run, so that each prediction is compared by itself. A cache whose predictions are all the same would have
    decoded the same tokens alone. The order is reversed every other trial.

    Args:
        model: in eval mode.
        prompt: token ids, int64 `[batch, tokens]`.
        steps: decode steps of one token.
        trials: runs of each cache.
        contenders: the caches, the reference first. A cache that raises an error does not run again.
        on_run: called before each run, with the cache and the index of the trial.
        at_once: how many caches are alive together. They take turns after each step, so that a busy minute slows all.

    Returns:
        The result of each cache, in the order of `contenders`. If the reference fails, its result is the only one.
    """
    results = [ContenderResult(contender) for contender in contenders]
    reference = results[0]
    try:
        sequence, logits = _greedy(model, prompt.to(model.device), steps, reference.contender)
    except Exception as error:
        reference.failure = _named_line(error)
        return results[:1]
    for trial in range(trials):
        ordered = there_and_back(results, trial)
        for first in range(0, len(ordered), at_once):
            _run_together(model, sequence, ordered[first : first + at_once], trial, on_run)
    for result in results:
        _compare(result, logits, model.dtype)
    return results


def warm_up(model: Any, prompt: Tensor, contenders: Sequence[Contender]) -> None:
    """Run every cache once on the start of a prompt `[batch, tokens]`, since some compile code the first time."""
    first = prompt[:, :WARM_UP_TOKENS].to(model.device)
    for contender in contenders:
        # A cache that fails here fails again when it is measured, and that failure is recorded.
        _run_together(model, Continuation(first, first[:, :2]), [ContenderResult(contender)], 0, lambda *_: None)


def _run_together(
    model: Any,
    sequence: Continuation,
    results: Sequence[ContenderResult],
    trial: int,
    on_run: Callable[[Contender, int], None],
) -> None:
    """One trial of some caches, which take turns. An error is that of one cache, and the others go on."""
    # These caches may need the memory of earlier ones.
    gc.collect()
    runs: list[tuple[ContenderResult, _TimedRun]] = []
    for result in results:
        on_run(result.contender, trial)
        if result.failure is None:
            with _failing_alone(result):
                run = _TimedRun(model, result.contender)
                run.prefill(sequence.prompt)
                runs.append((result, run))
    for step in range(sequence.tokens.shape[1]):
        for result, run in there_and_back(runs, step):
            with _failing_alone(result):
                run.step(sequence.tokens[:, step : step + 1])
        runs = [(result, run) for result, run in runs if result.failure is None]
    for result, run in runs:
        result.trials.append(run.trial(sequence.expected))


@contextmanager
def _failing_alone(result: ContenderResult) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        result.failure = _named_line(error)
    if result.failure is not None:
        # An error keeps tensors alive in its traceback, and the next cache may need their memory.
        gc.collect()


class _TimedRun:
    """A prompt and its steps through one cache.

    Attributes:
        logits: `[batch, vocab]` on the host, after the prompt and after each step.
        newest: the last of them, on the model's device.
    """

    def __init__(self, model: Any, contender: Contender) -> None:
        self.logits: list[Tensor] = []
        self._model = model
        self._cache = contender.make()
        self._inputs = {models.name_for(model): self._cache, "use_cache": True}
        self._prefill_seconds = 0.0
        self._step_seconds: list[float] = []

    def prefill(self, prompt: Tensor) -> None:
        """Read the prompt, `[batch, tokens]`."""
        self._prefill_seconds = self._pass(prompt, **models.newest_logits_only(self._model))

    def step(self, ids: Tensor) -> None:
        """Take a step with tokens `[batch, 1]`."""
        self._step_seconds.append(self._pass(ids))

    @quiet_clock()
    def _pass(self, ids: Tensor, **options: int) -> float:
        """Seconds of a forward pass over tokens `[batch, tokens]`."""
        finish(self._model.device)
        begin = time.perf_counter()
        logits: Tensor = self._model(input_ids=ids, **self._inputs, **options).logits
        finish(self._model.device)
        seconds = time.perf_counter() - begin
        self.newest = logits[:, -1]
        self.logits.append(self.newest.cpu())
        return seconds

    def trial(self, expected: Tensor | None) -> Trial:
        """What was timed, beside the reference's logits."""
        predicted = torch.stack([newest.argmax(-1) for newest in self.logits], 1)
        kl = 0.0 if expected is None else _mean_divergence(expected, self.logits)
        return Trial(self._prefill_seconds, self._step_seconds, cache_nbytes(self._cache), predicted, kl)


def finish(device: torch.device) -> None:
    """Wait until a device has done its work, so that a clock sees it."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _mean_divergence(expected: Tensor, seen: Sequence[Tensor]) -> float:
    """Mean KL divergence, in nats, of predictions `[batch, vocab]` from `expected`, `[steps + 1, batch, vocab]`."""
    pairs = zip(expected, seen, strict=True)
    each = [divergences(wanted.double().log_softmax(-1), new.double().log_softmax(-1)) for wanted, new in pairs]
    return float(torch.stack(each).mean())


def _greedy(model: Any, prompt: Tensor, steps: int, reference: Contender) -> tuple[Continuation, Tensor]:
    """The greedy continuation, and the logits of each prediction, `[steps + 1, batch, vocab]` on the host."""
    run, tokens = _TimedRun(model, reference), []
    run.prefill(prompt)
    for _ in range(steps):
        tokens.append(run.newest.argmax(-1))
        run.step(tokens[-1][:, None])
    logits = torch.stack(run.logits)
    # If all logits are NaN, argmax is always the first token, and every cache would agree.
    if logits.isnan().any():
        raise ReadingError("The model's logits are not numbers: check its weights.")
    return Continuation(prompt, torch.stack(tokens, 1), logits), logits


def _compare(result: ContenderResult, logits: Tensor, dtype: torch.dtype) -> None:
    """Count the predictions that differ from the reference's `logits` `[steps + 1, batch, vocab]`."""
    expected = logits.argmax(-1).T
    for trial in result.trials:
        for index, step in (trial.predicted != expected).nonzero().tolist():
            result.other_tokens += 1
            wanted, seen = int(expected[index, step]), int(trial.predicted[index, step])
            result.ties += is_tie(logits[step, index].float(), wanted, seen, dtype)


def _named_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
