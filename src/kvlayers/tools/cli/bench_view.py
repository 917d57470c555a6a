"""How `kvlayers bench` shows its measurements: tables on the console, and a report."""

from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlayers.tools.cli.bench_results import BenchResults
from kvlayers.tools.cli.output import USAGE_PREFIX, plain, usage_line
from kvlayers.tools.measuring.decoding import ContenderResult
from kvlayers.tools.names import KVLAYERS, TRANSFORMERS
from kvlayers.tools.reporting.page import Report, ReportPlot, ReportTable
from kvlayers.utils.units import readable_bytes

COLUMNS = ("Cache", "Tokens", "Prefill", "Step", "Speed", "Held")
WITHIN_NOISE = "≈: within noise. The step times of its trials overlap with those of transformers' DynamicCache."
NOTES = (
    "Tokens: whether every prediction is the same as with transformers' DynamicCache, when all caches are fed the same "
    "tokens. A cache that rounds states may predict others: the share of equal predictions is shown. A tie means that "
    "two tokens are equally likely within the precision of the dtype, and sums in another order pick the other one.",
    "Prefill: the forward pass over the prompt. Step: the forward pass over one more token of each sequence, with half "
    "the range of the trials. Speed: the step time of transformers' DynamicCache, divided by this step time.",
    WITHIN_NOISE,
    "Held: bytes that the cache keeps alive at the end, spare room and reservations included.",
)


def show(console: Console, results: BenchResults) -> None:
    """Print a table for each length, and the findings."""
    for length, measured in results.by_length.items():
        table = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
            title=_title(results, length),
            title_justify="left",
        )
        for index, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if index > 1 else "left")
        for result in measured:
            style = None if results.passes(result) else "red"
            table.add_row(*map(escape, _cells(results, result)), style=style)
        console.print(table)
    if any(results.is_within_noise(result) for result in _succeeded(results)):
        console.print(WITHIN_NOISE, style="dim", markup=False, highlight=False)
    for sentence in findings(results):
        # A line to paste must not be wrapped.
        console.print(sentence, markup=False, highlight=False, soft_wrap=sentence.startswith(USAGE_PREFIX))


def _succeeded(results: BenchResults) -> list[ContenderResult]:
    return [result for measured in results.by_length.values() for result in measured if result.failure is None]


def findings(results: BenchResults) -> list[str]:
    """The findings, one sentence each."""
    found = [*_verdict(results), *_winners(results)]
    for measured in results.by_length.values():
        found += [f"{each.contender.name} failed: {each.failure}" for each in measured if each.failure is not None]
    found += [f"Not for this model: {name} ({reason})" for name, reason in results.left_out.items()]
    return list(dict.fromkeys(found))


def _verdict(results: BenchResults) -> list[str]:
    exact = {
        f"{result.contender.name} at {length:,}": results.passes(result)
        for length, measured in results.by_length.items()
        for result in measured
        if result.contender.library == KVLAYERS and result.failure is None and results.is_exact(result)
    }
    wrong = ", ".join(name for name, passes in exact.items() if not passes)
    if wrong:
        return [f"Other tokens than transformers' DynamicCache: {wrong}."]
    return ["Every exact cache of kvlayers gave the same tokens as transformers' DynamicCache."] if exact else []


def _winners(results: BenchResults) -> list[str]:
    """The fastest and the smallest cache of kvlayers at the greatest length, and how to ask for them."""
    measured = {length: each for length, each in results.by_length.items() if each[0].failure is None}
    if not measured:
        return []
    length, (reference, *others) = max(measured.items(), key=lambda item: item[0])
    passing = [
        each for each in others if each.contender.library == KVLAYERS and each.failure is None and results.passes(each)
    ]
    if not passing:
        return []
    fastest = min(passing, key=lambda result: result.step_seconds)
    smallest = min(passing, key=lambda result: result.nbytes)
    as_fast = [each.contender.cache for each in passing if each is not fastest and each.is_as_fast_as(fastest)]
    beside = f" (within noise of {', '.join(as_fast)})" if as_fast else ""
    noise = ", which is within noise" if results.is_within_noise(fastest) else ""
    sentence = (
        f"At {length:,} tokens, kvlayers {fastest.contender.cache} is the fastest cache of kvlayers{beside}, "
        f"{results.speed(fastest):.2f} times as fast as transformers dynamic{noise}; kvlayers "
        f"{smallest.contender.cache} is the smallest, with {smallest.nbytes / reference.nbytes:.2f} of its bytes."
    )
    uses = [each.contender.generate_options for each in (fastest, smallest)]
    return [sentence, *dict.fromkeys(usage_line(use) for use in uses if use is not None)]


def bench_report(results: BenchResults, command: str) -> Report:
    """The report as a page. It needs matplotlib."""
    tables = [
        ReportTable(
            _title(results, length),
            COLUMNS,
            [_cells(results, result) for result in measured],
            [index for index, result in enumerate(measured) if result.contender.library == KVLAYERS],
        )
        for length, measured in results.by_length.items()
    ]
    settings = {
        **results.run.settings,
        "Batch": str(results.batch),
        "Steps": str(results.steps),
        "Trials": f"{results.trials}, interleaved; figures are medians",
    }
    return Report(
        title=f"Caches for {results.run.model}",
        command=command,
        findings=findings(results),
        tables=tables,
        plots=_plots(results),
        notes=NOTES,
        facts={**settings, **results.run.machine},
    )


def _plots(results: BenchResults) -> list[ReportPlot]:
    from kvlayers.tools.reporting.plots import line_plot

    def plot(name: str, title: str, y_label: str, figure: Callable[[ContenderResult], float]) -> ReportPlot:
        series: dict[str, dict[float, float]] = {}
        for length, measured in results.by_length.items():
            for result in (each for each in measured if each.failure is None):
                series.setdefault(result.contender.name, {})[length] = figure(result)
        dashed = tuple(label for label in series if label.startswith(TRANSFORMERS))
        return ReportPlot(title, line_plot(name, title, "tokens of the prompt", y_label, series, dashed))

    return [
        plot("step", "Decode step", "ms", lambda result: result.step_seconds * 1e3),
        plot("prefill", "Prefill", "ms", lambda result: result.prefill_seconds * 1e3),
        plot("held", "Bytes held", "MiB", lambda result: result.nbytes / 2**20),
    ]


def _title(results: BenchResults, length: int) -> str:
    dtype = plain(results.run.dtype)
    return f"{length:,} tokens and {results.steps} steps, batch {results.batch}, {dtype} on {results.run.device}"


def _cells(results: BenchResults, result: ContenderResult) -> list[str]:
    if result.failure is not None:
        return [result.contender.name, "failed", "", "", "", ""]
    return [
        result.contender.name,
        _tokens(results, result),
        milliseconds(result.prefill_seconds),
        f"{milliseconds(result.step_seconds)} ±{result.step_spread:.0%}",
        f"{'≈' if results.is_within_noise(result) else ''}{results.speed(result):.2f}",
        readable_bytes(result.nbytes),
    ]


def _tokens(results: BenchResults, result: ContenderResult) -> str:
    if result is results.reference_of(result):
        return "reference"
    if not result.other_tokens:
        return "same"
    if results.is_exact(result) and result.same_tokens:
        return f"same, ties: {result.ties}"
    return f"{result.agreement:.1%} same" if not results.is_exact(result) else f"others: {result.other_tokens}"


def milliseconds(seconds: float) -> str:
    """A time in milliseconds, with three digits or more.

    Example:
        >>> milliseconds(0.0123456), milliseconds(1.5)
        ('12.3 ms', '1500 ms')
    """
    figure = seconds * 1e3
    return f"{figure:.{2 if figure < 10 else 1 if figure < 100 else 0}f} ms"
