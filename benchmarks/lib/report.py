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
SHOWN = 40
MILLI, MICRO = 1e3, 1e6


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def names(text: str) -> list[str]:
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
        self._name, self._of_run, self._needs_model = name, dict[str, tuple[Any, Any]](), False
        self.add = self.parser.add_argument
        self.add("--threads", type=int, default=threads, help="threads of torch")
        self.add("--output", type=pathlib.Path, help=f"JSON file (benchmarks/results/{name}-<date>.json)")
        if quick is not None:
            self.add("--quick", action="store_true", help=quick)

    def sized(self, flag: str, usual: Any, quick: Any, what: str, kind: Callable[[str], Any] = int) -> None:
        """Add an option whose default is another one in a quick run."""
        shown = ",".join(map(str, usual)) if isinstance(usual, list | tuple) else usual
        self._of_run[flag.removeprefix("--").replace("-", "_")] = usual, quick
        self.add(flag, type=kind, help=what if usual is None else f"{what} ({shown})")

    def some_of(self, flag: str, known: Sequence[str], what: str, default: Sequence[str] | None = None) -> None:
        """Add an option for some of the names that are known, separated by commas; all if none is given."""

        def chosen(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in known]:
                raise argparse.ArgumentTypeError(f"takes {', '.join(known)}, got {', '.join(unknown)}")
            return text.split(",")

        self.add(flag, type=chosen, default=list(default or known), help=f"{what} ({','.join(known)})")

    def real_model(
        self, what: str = "directory or hub name of the model", in_quick: str | None = None, is_needed: bool = False
    ) -> None:
        """Add `--model` and `--text`. The usual model is the demo model; `in_quick` is that of a quick run."""
        self._needs_model = is_needed
        self.sized("--model", None, in_quick, what, str)
        self._of_run["model"] = default_model(), in_quick
        self.add("--text", type=pathlib.Path, help="what the model reads (the topics of Python's help)")

    def dtype(self, default: str, known: Sequence[str] = ("bfloat16", "float16", "float32")) -> None:
        self.add("--dtype", choices=known, default=default, help=f"of the model ({default})")

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        given = self.parser.parse_args(arguments)
        for name, (usual, quick) in self._of_run.items():
            if getattr(given, name) is None:
                setattr(given, name, quick if getattr(given, "quick", False) else usual)
        if self._needs_model and given.model is None and not getattr(given, "write", False):
            self.parser.error("there is no model: set KVLAYERS_DEMO_MODEL, bring it with `make demo`, or pass --model")
        given.output = given.output or RESULTS / f"{self._name}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}.json"
        return given


Cell = Callable[[Mapping[str, Any]], str]
"""What a table shows of an entry."""


def shown(key: str, form: str = ".2f", scale: float = 1) -> Cell:
    """A figure of an entry; empty if the entry lacks it."""
    return lambda entry: "" if entry.get(key) is None else f"{entry[key] if scale == 1 else entry[key] * scale:{form}}"


def ms(key: str, form: str = ".2f") -> Cell:
    return shown(key, form, MILLI)


def us(key: str, form: str = ".1f") -> Cell:
    return shown(key, form, MICRO)


def mb(key: str, form: str = ".1f") -> Cell:
    return shown(key, form, 1e-6)


def span(key: str) -> Cell:
    """A figure with the smallest and the largest of the trials."""

    def cell(entry: Mapping[str, Any]) -> str:
        low, high = entry[f"{key}_spread"]
        return f"{entry[key]:.2f} ({low:.2f}-{high:.2f})"

    return cell


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
        """Hold a figure against its bound; return whether it is met."""
        is_met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        asked = f">= {at_least}" if at_least is not None else f"<= {at_most}"
        self.targets.append({"what": what, "asked": asked, "value": value, "met": is_met})
        return is_met

    def table(
        self, title: str, first: str, groups: Mapping[Any, Mapping[str, Any]], columns: Mapping[str, Cell]
    ) -> None:
        """Print a table: a section for each group, a row for each of its entries, and a column for each cell.

        Args:
            title: of the table.
            first: the heading of the names, which consist of the group's and the entry's.
            groups: entries by group and name; the only group of a table without groups is called "".
            columns: cells by heading.
        """
        table = new_table(title, first, *columns)
        for group, entries in groups.items():
            for name, entry in entries.items():
                table.add_row(f"{group:>7} {name}".strip(), *(cell(entry) for cell in columns.values()))
            table.add_section()
        self.console.print(table)

    def finish(self, results: Any, *disagreements: Disagreements, **more: Any) -> int:
        """Show the targets, write the JSON file and print where caches disagreed; return 1 if one did, else 0."""
        say = self.console.print
        # A small model has other costs.
        for target in [] if getattr(self.given, "quick", False) else self.targets:
            verdict = "[green]met[/]" if target["met"] else "[red]missed[/]"
            say(f"{verdict}: {target['what']}: {target['value']:.4g}, asked {target['asked']}")
        found = [entry for each in disagreements for entry in each.found]
        output = self.given.output
        arguments = {
            key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(self.given).items()
        }
        content = {"results": results, "targets": self.targets, "disagreements": found, **more}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({**self.environment, "arguments": arguments, **content}, indent=1))
        say(f"written to {output}")
        for entry in sorted(found, key=lambda entry: entry["tie"])[:SHOWN]:
            gap = f", logits {entry['logit_gap']:.4f} apart" if "logit_gap" in entry else ""
            say(
                f"{'tie' if entry['tie'] else '[red]disagreement[/]'}: {entry['cache']} on {entry['model']} at "
                f"{entry['tokens']} tokens, trial {entry['trial']}: expected {entry['expected']}, "
                f"saw {entry['seen']}{gap}"
            )
        for each in disagreements:
            ties, dtype = len(each.found) - each.failures, str(each.dtype).removeprefix("torch.")
            say(f"{each.failures} disagreements with transformers' DynamicCache, and {ties} ties in {dtype}")
        return 1 if any(each.failures for each in disagreements) else 0


@contextlib.contextmanager
def session(given: argparse.Namespace) -> Iterator[Session]:
    """A run, with bars in the terminal."""
    if given.threads:
        torch.set_num_threads(given.threads)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Without a terminal, rich's 80 columns would break the tables.
    console = Console(width=None if sys.stdout.isatty() else 132)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
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


def new_table(title: str, *columns: str) -> Table:
    """An empty table whose first column names the rows."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table
