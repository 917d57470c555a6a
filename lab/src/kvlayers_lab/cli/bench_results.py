"""Which caches `kvlayers bench` measures, whether they passed, and what people read of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from kvlayers.commands.common import Dtype
from kvlayers.commands.console import plain
from kvlayers.errors import KVLayersError, OptionError
from kvlayers.models import most_positions
from kvlayers.options import readable_bytes
from kvlayers.stores import Fidelity
from kvlayers_lab.cli.console import bar_between_runs, checked_lengths, measuring, read_text, usage_line
from kvlayers_lab.cli.report import Report, ReportPlot, ReportTable, conclude, line_plot, report_path
from kvlayers_lab.measuring.contenders import (
    Contender,
    Key,
    against_contenders,
    exact_names,
    is_installed,
    make_contender,
)
from kvlayers_lab.measuring.decoding import ContenderResult, measure, warm_up
from kvlayers_lab.measuring.text import check_known, rows
from kvlayers_lab.models import LoadedModel, RunFacts, find, load
from kvlayers_lab.names import BENCH_REPORT, KVLAYERS, TRANSFORMERS, TRANSFORMERS_CACHES

OPTIONS = {"against": "--against"}
"""For arguments that errors name, the options that they come from."""

REFERENCE: Key = (TRANSFORMERS, TRANSFORMERS_CACHES[0])
QUANTIZED = ("int8", "int4")


COLUMNS = ("Cache", "Tokens", "Prefill", "Step", "Speed", "Held")
WITHIN_NOISE = "≈: within noise. The step times of its trials overlap with those of transformers' DynamicCache."
NOTES = (
    "Tokens: whether every prediction is the same as with transformers' DynamicCache, when all caches are fed the same "
    "tokens. A cache that rounds states may predict others: the share of equal predictions is shown. A tie means that "
    "two tokens are equally likely within the precision of the dtype, and sums in another order pick the other one.",
    "Prefill: the forward pass over the prompt. Step: the forward pass over one more token of each sequence, with half "
    "the range of the trials. Speed: the step time of transformers' DynamicCache, divided by this step time.",
    "Held: bytes that the cache keeps alive at the end, spare room and reservations included.",
)


def run(
    *,
    model: str | None,
    lengths: str,
    steps: int,
    trials: int,
    batch: int,
    text: Path | None,
    names: Sequence[str] | None,
    against: Sequence[str] | None,
    dtype: Dtype,
    device: str | None,
    threads: int | None,
    report: Path | None,
    as_json: bool,
) -> bool:
    """Measure and show. The arguments are the options of the command. Returns whether every cache passed."""
    with measuring("bench", OPTIONS, as_json, threads) as console:
        asked_lengths = checked_lengths(lengths)
        path = report_path(console, report, Path(BENCH_REPORT))
        content = read_text(text)
        found = find(console, model, device, "MODEL")
        fitting = fitting_lengths(found.config, asked_lengths, steps)
        prompt = rows(found.tokenizer, content, batch, fitting[-1])
        check_known(found.config, prompt)
        fidelities, left_out = choose_caches(found.config, names, against, fitting[-1] + steps)
        loaded = load(console, found, dtype)
        results = BenchResults(RunFacts.of(loaded), batch, steps, trials, fidelities, left_out)
        results.measure(console, loaded, prompt, fitting)
        return conclude(console, results, path, as_json)


def choose_caches(
    config: Any, names: Sequence[str] | None, against: Sequence[str] | None, length: int
) -> tuple[dict[Key, Fidelity], dict[str, str]]:
    """The caches that a model supports.

    Args:
        config: config of the model.
        names: names of kvlayers' caches, `None` for all default ones that suit the model.
        against: names of transformers' caches beside its dynamic one, `None` for all whose packages are installed.
        length: the most tokens that a cache will hold.

    Returns:
        The fidelity of each cache by library and name, the reference first; and for each name that the model does not
        support, why.

    Raises:
        KVLayersError: a cache in `names` cannot be made, or there is no cache of transformers of a name in `against`.
    """
    usual = [name for name in TRANSFORMERS_CACHES if is_installed(name)]
    rivals = against_contenders(usual if against is None else against, config, length)
    asked = [*exact_names(config), *QUANTIZED] if names is None else names
    own = [make_contender(KVLAYERS, name, config, length) for name in asked]
    fidelities: dict[Key, Fidelity] = {}
    left_out = {}
    for each in (make_contender(*REFERENCE, config, length), *own, *rivals):
        try:
            fidelities[each.key] = each.fidelity()
        except KVLayersError as error:
            if names is not None:
                raise
            left_out[each.cache] = str(error)
    # Exact caches first, so that caches that round stand beside each other.
    ordered = sorted(fidelities.items(), key=lambda item: item[1] != fidelities[REFERENCE])
    return dict(ordered), left_out


def fitting_lengths(config: Any, asked: Sequence[int], steps: int) -> list[int]:
    """The prompt lengths, sorted, each cut so that the model has positions for the steps as well.

    Raises:
        OptionError: the model has no positions for the steps.
    """
    most = most_positions(config)
    if most is None:
        return list(asked)
    if most <= steps:
        raise OptionError(f"`--steps` must be fewer than the {most} positions of the model, got {steps}.")
    return sorted({min(length, most - steps) for length in asked})


@dataclass(frozen=True)
class BenchResults:
    """All measurements.

    Attributes:
        run: the model and the machine.
        batch: sequences in the batch.
        steps: decode steps after each prompt.
        trials: runs of each cache.
        fidelities: fidelity of each cache by library and name, the reference first.
        left_out: for each name that the model does not support, why.
        by_length: results of the caches by the tokens of the prompt, the reference first. If the reference failed, it
            is the only one.
    """

    run: RunFacts
    batch: int
    steps: int
    trials: int
    fidelities: Mapping[Key, Fidelity]
    left_out: Mapping[str, str]
    by_length: dict[int, list[ContenderResult]] = field(default_factory=dict)

    def measure(self, console: Console, loaded: LoadedModel, prompt: Tensor, lengths: Sequence[int]) -> None:
        """Measure every cache at each length of the prompt."""

        def contenders(length: int) -> list[Contender]:
            return [make_contender(*key, loaded.model, length + self.steps) for key in self.fidelities]

        runs = len(lengths) * self.trials * len(self.fidelities)
        with bar_between_runs(console, runs, "Every cache at every length") as begin:
            warm_up(loaded.model, prompt, contenders(prompt.shape[1]))
            for length in lengths:
                self.by_length[length] = measure(
                    loaded.model,
                    prompt[:, :length],
                    self.steps,
                    self.trials,
                    contenders(length),
                    lambda contender, trial, length=length: begin(  # type: ignore[misc]
                        f"{length} tokens, {contender.name}, trial {trial + 1}"
                    ),
                )

    def is_exact(self, result: ContenderResult) -> bool:
        """Whether the cache keeps the states that the model attends to as they came."""
        return self.fidelities[result.contender.key] == "exact"

    def passes(self, result: ContenderResult) -> bool:
        """Whether a cache did what it must. Of transformers' caches, only the reference must not fail."""
        if result.contender.library != KVLAYERS:
            return result is not self.reference_of(result) or result.failure is None
        return result.failure is None and (not self.is_exact(result) or result.same_tokens)

    @property
    def passed(self) -> bool:
        """Whether every cache passes at every length."""
        return all(self.passes(result) for results in self.by_length.values() for result in results)

    def speed(self, result: ContenderResult) -> float:
        """How many times as fast a step is as with the reference."""
        return self.reference_of(result).step_seconds / result.step_seconds

    def is_within_noise(self, result: ContenderResult) -> bool:
        """Whether the step times of the cache and of the reference overlap."""
        reference = self.reference_of(result)
        return result is not reference and result.is_as_fast_as(reference)

    def reference_of(self, result: ContenderResult) -> ContenderResult:
        """The reference's result at the same length."""
        return next(results[0] for results in self.by_length.values() if any(each is result for each in results))

    def plain(self) -> dict[str, Any]:
        """All measurements as JSON types."""
        return {
            **self.run.plain(),
            "batch": self.batch,
            "steps": self.steps,
            "trials": self.trials,
            "left_out": self.left_out,
            "results": [
                {"length": length, "caches": [self._plain_result(result) for result in results]}
                for length, results in self.by_length.items()
            ],
            "passed": self.passed,
        }

    def _plain_result(self, result: ContenderResult) -> dict[str, Any]:
        library, cache = result.contender.key
        named = {
            "library": library,
            "cache": cache,
            "fidelity": self.fidelities[library, cache],
            "passed": self.passes(result),
        }
        if result.failure is not None:
            return {**named, "failure": result.failure}
        return {
            **named,
            "prefill_seconds": result.prefill_seconds,
            "step_seconds": result.step_seconds,
            "step_seconds_range": result.step_range,
            "times_as_fast": self.speed(result),
            "within_noise": self.is_within_noise(result),
            "nbytes": result.nbytes,
            "agreement": result.agreement,
            "same_tokens": result.same_tokens,
            "ties": result.ties,
        }

    @property
    def findings(self) -> list[str]:
        """The findings, one sentence each."""
        results = [result for measured in self.by_length.values() for result in measured]
        is_noisy = any(result.failure is None and self.is_within_noise(result) for result in results)
        found = [*([WITHIN_NOISE] if is_noisy else []), *self._verdict(), *self._winners()]
        found += [f"{each.contender.name} failed: {each.failure}" for each in results if each.failure is not None]
        found += [f"Not for this model: {name} ({reason})" for name, reason in self.left_out.items()]
        return list(dict.fromkeys(found))

    def _verdict(self) -> list[str]:
        exact = {
            f"{result.contender.name} at {length:,}": self.passes(result)
            for length, measured in self.by_length.items()
            for result in measured
            if result.contender.library == KVLAYERS and result.failure is None and self.is_exact(result)
        }
        wrong = ", ".join(name for name, passes in exact.items() if not passes)
        if wrong:
            return [f"Other tokens than transformers' DynamicCache: {wrong}."]
        return ["Every exact cache of kvlayers gave the same tokens as transformers' DynamicCache."] if exact else []

    def _winners(self) -> list[str]:
        """The fastest and the smallest cache of kvlayers at the greatest length, and how to ask for them."""
        lengths = [length for length, each in self.by_length.items() if each[0].failure is None]
        if not lengths:
            return []
        reference, *others = self.by_length[max(lengths)]
        passing = [
            each for each in others if each.contender.library == KVLAYERS and each.failure is None and self.passes(each)
        ]
        if not passing:
            return []
        fastest = min(passing, key=lambda result: result.step_seconds)
        smallest = min(passing, key=lambda result: result.nbytes)
        as_fast = [each.contender.cache for each in passing if each is not fastest and each.is_as_fast_as(fastest)]
        beside = f" (within noise of {', '.join(as_fast)})" if as_fast else ""
        noise = ", which is within noise" if self.is_within_noise(fastest) else ""
        sentence = (
            f"At {max(lengths):,} tokens, kvlayers {fastest.contender.cache} is the fastest cache of kvlayers{beside}, "
            f"{self.speed(fastest):.2f} times as fast as transformers dynamic{noise}; kvlayers "
            f"{smallest.contender.cache} is the smallest, with {smallest.nbytes / reference.nbytes:.2f} of its bytes."
        )
        uses = [each.contender.generate_options for each in (fastest, smallest)]
        return [sentence, *dict.fromkeys(usage_line(use) for use in uses if use is not None)]

    def report(self) -> Report:
        """What people read."""
        tables = [
            ReportTable(
                self._title(length),
                COLUMNS,
                [self._cells(result) for result in measured],
                bold=[index for index, result in enumerate(measured) if result.contender.library == KVLAYERS],
                failed=[index for index, result in enumerate(measured) if not self.passes(result)],
                texts=(0, 1),
            )
            for length, measured in self.by_length.items()
        ]
        settings = {
            **self.run.settings,
            "Batch": str(self.batch),
            "Steps": str(self.steps),
            "Trials": f"{self.trials}, interleaved; figures are medians",
        }
        return Report(
            title=f"Caches for {self.run.model}",
            tables=tables,
            findings=self.findings,
            plots=[
                self._plot("step", "Decode step", "ms", lambda result: result.step_seconds * 1e3),
                self._plot("prefill", "Prefill", "ms", lambda result: result.prefill_seconds * 1e3),
                self._plot("held", "Bytes held", "MiB", lambda result: result.nbytes / 2**20),
            ],
            notes=NOTES,
            facts={**settings, **self.run.machine},
        )

    def _plot(self, name: str, title: str, y_label: str, figure: Callable[[ContenderResult], float]) -> ReportPlot:
        series: dict[str, dict[float, float]] = {}
        for length, measured in self.by_length.items():
            for result in (each for each in measured if each.failure is None):
                series.setdefault(result.contender.name, {})[length] = figure(result)
        dashed = tuple(label for label in series if label.startswith(TRANSFORMERS))
        return ReportPlot(title, lambda: line_plot(name, title, "tokens of the prompt", y_label, series, dashed))

    def _title(self, length: int) -> str:
        dtype = plain(self.run.dtype)
        return f"{length:,} tokens and {self.steps} steps, batch {self.batch}, {dtype} on {self.run.device}"

    def _cells(self, result: ContenderResult) -> list[str]:
        if result.failure is not None:
            return [result.contender.name, "failed", "", "", "", ""]
        return [
            result.contender.name,
            self._tokens(result),
            milliseconds(result.prefill_seconds),
            f"{milliseconds(result.step_seconds)} ±{result.step_spread:.0%}",
            f"{'≈' if self.is_within_noise(result) else ''}{self.speed(result):.2f}",
            readable_bytes(result.nbytes),
        ]

    def _tokens(self, result: ContenderResult) -> str:
        if result is self.reference_of(result):
            return "reference"
        if not result.other_tokens:
            return "same"
        if self.is_exact(result) and result.same_tokens:
            return f"same, ties: {result.ties}"
        return f"{result.agreement:.1%} same" if not self.is_exact(result) else f"others: {result.other_tokens}"


def milliseconds(seconds: float) -> str:
    """A time in milliseconds, with three digits or more.

    Example:
        >>> milliseconds(0.0123456), milliseconds(1.5)
        ('12.3 ms', '1500 ms')
    """
    figure = seconds * 1e3
    return f"{figure:.{2 if figure < 10 else 1 if figure < 100 else 0}f} ms"
