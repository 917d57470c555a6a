"""The frame of every benchmark: its options, bars, tables, targets, and the JSON file of what it found."""

import argparse
import contextlib
import datetime
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lib.contenders import FLOOR, REFERENCE, TRANSFORMERS_STATIC
from lib.internals import environment as environment
from lib.timing import Disagreements, Tick, Ticking
from lib.workload import default_model

RESULTS = pathlib.Path(__file__).parents[1] / "results"
RECORDED = pathlib.Path(__file__).parents[1] / "recorded"
SHOWN = 40
MILLI, MICRO = 1e3, 1e6
NO_MODEL = "there is no model: set KVLAYERS_DEMO_MODEL, bring it with `make demo`, or pass --model"


def numbers(text: str) -> list[int]:
    """Numbers that are separated by commas."""
    return [int(number) for number in text.split(",")]


def names(text: str) -> list[str]:
    """Names that are separated by commas."""
    return text.split(",")


def cases(text: str) -> list[tuple[int, int]]:
    """Batches and tokens, such as 1x128,8x1024."""
    return [(int(batch), int(tokens)) for batch, _, tokens in (case.partition("x") for case in text.split(","))]


class Options:
    """The options of a benchmark. All have `--threads`, `--output` and, if a quick run differs, `--quick`.

    Args:
        name: of the benchmark, for the output file.
        doc: its docstring.
        threads: how many threads torch takes if nothing else is asked for.
        quick: what a quick run is; `None` if there is none.
    """

    def __init__(self, name: str, doc: str | None, *, threads: int | None = None, quick: str | None = None) -> None:
        self.parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        self._name, self._of_run = name, dict[str, tuple[Any, Any]]()
        self.add = self.parser.add_argument
        self.add("--threads", type=int, default=threads, help="threads of torch")
        self.add("--output", type=pathlib.Path, help=f"JSON file (benchmarks/results/{name}-<date>.json)")
        if quick is not None:
            self.add("--quick", action="store_true", help=quick)

    def sized(self, flag: str, usual: Any, quick: Any, what: str, kind: Callable[[str], Any] = int) -> None:
        """Add an option whose default is another one in a quick run."""
        shown = ",".join(map(str, usual)) if isinstance(usual, list | tuple) else usual
        self._of_run[flag.removeprefix("--").replace("-", "_")] = usual, quick
        self.add(flag, type=kind, help=f"{what} ({shown})")

    def some_of(self, flag: str, known: Sequence[str], what: str, default: Sequence[str] | None = None) -> None:
        """Add an option for some of the names that are known, separated by commas; all if none is given."""

        def chosen(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in known]:
                raise argparse.ArgumentTypeError(f"takes {', '.join(known)}, got {', '.join(unknown)}")
            return text.split(",")

        self.add(flag, type=chosen, default=list(default or known), help=f"{what} ({','.join(known)})")

    def real_model(self, what: str = "directory or hub name of the model", in_quick: str | None = None) -> None:
        """Add `--model` and `--text`. The usual model is the demo model; `in_quick` is that of a quick run."""
        self.sized("--model", None, in_quick, what, str)
        self._of_run["model"] = default_model(), in_quick
        self.add("--text", type=pathlib.Path, help="what the model reads (the topics of Python's help)")

    def dtype(self, default: str, known: Sequence[str] = ("bfloat16", "float16", "float32")) -> None:
        """Add `--dtype`."""
        self.add("--dtype", choices=known, default=default, help=f"of the model ({default})")

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """The arguments, with their defaults."""
        given = self.parser.parse_args(arguments)
        for name, (usual, quick) in self._of_run.items():
            if getattr(given, name) is None:
                setattr(given, name, quick if getattr(given, "quick", False) else usual)
        given.output = given.output or output_path(self._name)
        return given


def output_path(benchmark: str) -> pathlib.Path:
    """The default output file of a benchmark."""
    return RESULTS / f"{benchmark}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}.json"


def terminal() -> Console:
    """The console for tables. Without a terminal, rich's 80 columns would break them."""
    return Console(width=None if sys.stdout.isatty() else 132)


class Session:
    """One run of a benchmark: what was asked for, the terminal, and the targets that its figures are held against.

    Args:
        given: the arguments.
        progress: where bars are shown.
    """

    def __init__(self, given: argparse.Namespace, progress: Progress) -> None:
        self.given, self.progress, self.console = given, progress, progress.console
        self.environment = environment()
        self.targets: list[dict[str, Any]] = []

    @property
    def ticking(self) -> Ticking:
        """Adds a bar; returns the function that advances it."""

        def ticking(what: str, total: int) -> Tick:
            task = self.progress.add_task(what, total=total)
            return lambda: self.progress.advance(task)

        return ticking

    def target(self, what: str, value: float, at_least: float | None = None, at_most: float | None = None) -> bool:
        """Hold a figure against its bound, and say whether it is met. A quick run shows no targets."""
        made = promised(what, value, at_least, at_most)
        if not getattr(self.given, "quick", False):
            self.targets.append(made)
        return bool(made["met"])

    def finish(self, results: Any, *disagreements: Disagreements, **more: Any) -> int:
        """Show the targets, write the JSON file and print where caches disagreed; return 1 if one did, else 0."""
        console = self.console
        show_targets(console, self.targets)
        found = [entry for each in disagreements for entry in each.found]
        content = {"results": results, "targets": self.targets, "disagreements": found, **more}
        write(console, self.given, self.environment, content)
        for entry in sorted(found, key=lambda entry: entry["tie"])[:SHOWN]:
            gap = f", logits {entry['logit_gap']:.4f} apart" if "logit_gap" in entry else ""
            console.print(
                f"{'tie' if entry['tie'] else '[red]disagreement[/]'}: {entry['cache']} on {entry['model']} at "
                f"{entry['tokens']} tokens, trial {entry['trial']}: expected {entry['expected']}, "
                f"saw {entry['seen']}{gap}"
            )
        for each in disagreements:
            ties, dtype = len(each.found) - each.failures, str(each.dtype).removeprefix("torch.")
            console.print(f"{each.failures} disagreements with transformers' DynamicCache, and {ties} ties in {dtype}")
        return 1 if any(each.failures for each in disagreements) else 0


@contextlib.contextmanager
def session(given: argparse.Namespace) -> Iterator[Session]:
    """A run, with bars in the terminal."""
    if given.threads:
        torch.set_num_threads(given.threads)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=terminal()) as progress:
        yield Session(given, progress)


def summarise(measured: dict[str, Any]) -> None:
    """Add the median, the mean, and ratios to the reference and to the floor to each contender's raw `seconds`.

    A median is the median of the trials' medians. A ratio is the median of the trials' ratios, so that it only compares
    measurements made side by side; `spread` has the smallest and the largest of them.
    """
    for entry in measured.values():
        medians = [statistics.median(trial) for trial in entry["seconds"]]
        entry["median"] = statistics.median(medians)
        entry["median_range"] = [min(medians), max(medians)]
        entry["mean"] = statistics.median(statistics.fmean(trial) for trial in entry["seconds"])
        entry["slowest"] = max(max(trial) for trial in entry["seconds"])
    for entry in measured.values():
        for key, other in (("speed", REFERENCE), ("speed_to_floor", FLOOR), ("speed_to_exact", TRANSFORMERS_STATIC)):
            if other in measured:
                ratios = _trial_ratios(measured[other], entry, statistics.median)
                entry[key], entry[f"{key}_spread"] = statistics.median(ratios), [min(ratios), max(ratios)]
        of_means = _trial_ratios(measured[REFERENCE], entry, statistics.fmean)
        entry["speed_of_means"] = statistics.median(of_means)


def _trial_ratios(slow: Mapping[str, Any], fast: Mapping[str, Any], middle: Callable[[Any], float]) -> list[float]:
    pairs = zip(slow["seconds"], fast["seconds"], strict=True)
    return [middle(baseline) / middle(candidate) for baseline, candidate in pairs]


def times_as_fast(measured: dict[str, Any], candidate: str, baseline: str) -> float:
    """How many times as fast one contender is as another: the median of the trials' ratios."""
    return statistics.median(_trial_ratios(measured[baseline], measured[candidate], statistics.median))


def promised(what: str, value: float, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """A target: its bound, the measurement, and whether it is met."""
    met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    asked = f">= {at_least}" if at_least is not None else f"<= {at_most}"
    return {"what": what, "asked": asked, "value": value, "met": met}


def show_targets(console: Console, promises: list[dict[str, Any]]) -> None:
    """Print the targets and the measurements."""
    for promise in promises:
        verdict = "[green]met[/]" if promise["met"] else "[red]missed[/]"
        console.print(f"{verdict}: {promise['what']}: {promise['value']:.4g}, asked {promise['asked']}")


def new_table(title: str, *columns: str) -> Table:
    """An empty table whose first column names the rows."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table


def span(entry: dict[str, Any], key: str) -> str:
    """A figure with the smallest and the largest of the trials."""
    low, high = entry[f"{key}_spread"]
    return f"{entry[key]:.2f} ({low:.2f}-{high:.2f})"


def write(console: Console, given: argparse.Namespace, environment: dict[str, Any], content: dict[str, Any]) -> None:
    """Write the machine, the arguments and the results of a benchmark to `given.output`, as JSON."""
    plain = {key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(given).items()}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps({**environment, "arguments": plain, **content}, indent=1))
    console.print(f"written to {given.output}")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def records_by_model(kind: str) -> list[dict[str, Any]]:
    """The newest record of each model."""
    newest: dict[str, Any] = {}
    for path in sorted(RECORDED.glob(f"{kind}-*.json")):
        record = json.loads(path.read_text())
        newest[pathlib.Path(record["arguments"]["model"]).name] = record
    return [*newest.values()]
