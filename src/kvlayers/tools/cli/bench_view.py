"""How `kvlayers bench` shows what it has measured: tables on the console, and a report."""

from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlayers.tools.cli.bench_results import BenchResults
from kvlayers.tools.cli.output import PASTE, pasted, plain
from kvlayers.tools.cli.reports import facts
from kvlayers.tools.measuring.decoding import Row
from kvlayers.tools.names import KVLAYERS, TRANSFORMERS
from kvlayers.tools.reporting.page import Report, ReportPlot, ReportTable
from kvlayers.utils.units import readable_bytes

COLUMNS = ("Cache", "Tokens", "Prefill", "Step", "Speed", "Held")
WITHIN_NOISE = "≈: within noise. The steps of its trials, and those of transformers' DynamicCache, overlap."
NOTES = (
    "Tokens: whether every prediction was that of transformers' DynamicCache, when all are fed its tokens. Caches that "
    "round states may choose others: shown is the part that is the same. A tie: two tokens are equally likely as far "
    "as the dtype can say, and sums in another order take the other one.",
    "Prefill: the forward pass over the prompt. Step: that of one token more for each sequence, and by how much the "
    "trials differ. Speed: how many steps it makes in the time of one with transformers' DynamicCache.",
    WITHIN_NOISE,
    "Held: bytes that the cache keeps alive in the end, spare room and reservations included.",
)


def show(console: Console, results: BenchResults) -> None:
    """Print a table for each length, and what came out."""
    for length, rows in results.lengths.items():
        drawn = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
            title=_title(results, length),
            title_justify="left",
        )
        for index, column in enumerate(COLUMNS):
            drawn.add_column(column, justify="right" if index > 1 else "left")
        for row in rows:
            style = None if results.is_well(row) else "red"
            drawn.add_row(*map(escape, _cells(results, row)), style=style)
        console.print(drawn)
    if any(results.is_within_noise(row) for row in _measured(results)):
        console.print(WITHIN_NOISE, style="dim", markup=False, highlight=False)
    for sentence in findings(results):
        # What is to be pasted stays in one piece.
        console.print(sentence, markup=False, highlight=False, soft_wrap=sentence.startswith(PASTE))


def _measured(results: BenchResults) -> list[Row]:
    return [row for rows in results.lengths.values() for row in rows if row.failure is None]


def findings(results: BenchResults) -> list[str]:
    """What came out, a sentence each."""
    found = _verdict(results)
    measured = {length: rows for length, rows in results.lengths.items() if rows[0].failure is None}
    if measured:
        length, rows = max(measured.items())
        ours = [
            row for row in rows if row.contender.library == KVLAYERS and row.failure is None and results.is_well(row)
        ]
        fastest = min(ours, key=lambda row: row.step_seconds, default=None)
        smallest = min(ours, key=lambda row: row.nbytes, default=None)
        if fastest is not None and smallest is not None:
            as_fast = [row.contender.cache for row in ours if row is not fastest and row.is_as_fast_as(fastest)]
            beside = f" (within noise of {', '.join(as_fast)})" if as_fast else ""
            noise = ", which is within noise" if results.is_within_noise(fastest) else ""
            found.append(
                f"At {length:,} tokens kvlayers {fastest.contender.cache} is the fastest of kvlayers{beside}, "
                f"{results.speed(fastest):.2f} times as fast as transformers dynamic{noise}; kvlayers "
                f"{smallest.contender.cache} is the smallest, with {smallest.nbytes / rows[0].nbytes:.2f} of its bytes."
            )
            named = dict.fromkeys((fastest.contender.cache, smallest.contender.cache))
            found += [pasted({"cache_implementation": name}) for name in named]
    for rows in results.lengths.values():
        found += [f"{_name(row)} failed: {row.failure}" for row in rows if row.failure is not None]
    found += [f"Not for this model: {name} ({reason})" for name, reason in results.left_out.items()]
    return list(dict.fromkeys(found))


def bench_report(results: BenchResults, command: str) -> Report:
    """The page. Needs matplotlib."""
    tables = [
        ReportTable(
            _title(results, length),
            COLUMNS,
            [_cells(results, row) for row in rows],
            [index for index, row in enumerate(rows) if row.contender.library == KVLAYERS],
        )
        for length, rows in results.lengths.items()
    ]
    settings = {
        "Model": results.model,
        "Dtype": str(plain(results.dtype)),
        "Device": str(results.device),
        "Batch": str(results.batch),
        "Steps": str(results.steps),
        "Trials": f"{results.trials}, in turns, of which medians are shown",
    }
    return Report(
        title=f"Caches for {results.model}",
        command=command,
        findings=findings(results),
        tables=tables,
        plots=_plots(results),
        notes=NOTES,
        facts={**settings, **facts(results.environment)},
    )


def _plots(results: BenchResults) -> list[ReportPlot]:
    from kvlayers.tools.reporting.plots import lines

    def drawn(name: str, title: str, up: str, figure: Callable[[Row], float]) -> ReportPlot:
        series: dict[str, dict[float, float]] = {}
        for length, rows in results.lengths.items():
            for row in (row for row in rows if row.failure is None):
                series.setdefault(_name(row), {})[length] = figure(row)
        dashed = tuple(label for label in series if label.startswith(TRANSFORMERS))
        return ReportPlot(title, lines(name, title, "tokens of the prompt", up, series, dashed))

    return [
        drawn("step", "A decode step", "ms", lambda row: row.step_seconds * 1e3),
        drawn("prefill", "The prefill", "ms", lambda row: row.prefill_seconds * 1e3),
        drawn("held", "Bytes held", "MiB", lambda row: row.nbytes / 2**20),
    ]


def _title(results: BenchResults, length: int) -> str:
    dtype = plain(results.dtype)
    return f"{length:,} tokens and {results.steps} steps, batch {results.batch}, {dtype} on {results.device}"


def _name(row: Row) -> str:
    return f"{row.contender.library} {row.contender.cache}"


def _cells(results: BenchResults, row: Row) -> list[str]:
    if row.failure is not None:
        return [_name(row), "failed", "", "", "", ""]
    return [
        _name(row),
        _tokens(results, row),
        milliseconds(row.prefill_seconds),
        f"{milliseconds(row.step_seconds)} ±{row.step_spread:.0%}",
        f"{'≈' if results.is_within_noise(row) else ''}{results.speed(row):.2f}",
        readable_bytes(row.nbytes),
    ]


def _tokens(results: BenchResults, row: Row) -> str:
    if row is results.lengths_of(row)[0]:
        return "reference"
    if not row.other_tokens:
        return "same"
    if results.is_exact(row) and row.same_tokens:
        return f"same, ties: {row.ties}"
    return f"{row.agreement:.1%} same" if not results.is_exact(row) else f"others: {row.other_tokens}"


def _verdict(results: BenchResults) -> list[str]:
    exact = {
        f"{_name(row)} at {length:,}": results.is_well(row)
        for length, rows in results.lengths.items()
        for row in rows
        if row.contender.library == KVLAYERS and row.failure is None and results.is_exact(row)
    }
    wrong = ", ".join(name for name, is_well in exact.items() if not is_well)
    if wrong:
        return [f"Other tokens than transformers' DynamicCache: {wrong}."]
    return ["Every exact cache of kvlayers gave the tokens of transformers' DynamicCache."] if exact else []


def milliseconds(seconds: float) -> str:
    """A time in milliseconds, in three digits or more.

    Example:
        >>> milliseconds(0.0123456), milliseconds(1.5)
        ('12.3 ms', '1500 ms')
    """
    figure = seconds * 1e3
    return f"{figure:.{2 if figure < 10 else 1 if figure < 100 else 0}f} ms"
