"""The frame of every benchmark: its options, its sections, tables, targets, and the JSON file of what it found."""

import argparse
import contextlib
import datetime
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import pages
from lib.internals import environment as environment
from lib.timing import Tick
from lib.workload import QUICK_SHAPE, RandomModel, RealModel, Shape, default_model

RESULTS = pathlib.Path(__file__).parents[1] / "results"
NO_MODEL = "there is no model: set KVLAYERS_DEMO_MODEL, bring it with `make demo`, or pass --model"


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


class Options:
    """The options of a benchmark. All have `--threads`, `--output` and, if a quick run differs, `--quick`.

    Args:
        name: of the benchmark, for the output file.
        doc: its docstring.
        threads: how many threads torch takes if nothing else is asked for.
        quick: what a quick run is; `None` if there is none.
        writes: the pages with the records of this benchmark, for `--write`.
        kind: what the name of a record begins with, from the arguments; `None` if the benchmark records by itself.
    """

    def __init__(
        self,
        name: str,
        doc: str | None,
        writes: Callable[[], pages.Pages],
        *,
        threads: int | None = None,
        quick: str | None = None,
        kind: Callable[[argparse.Namespace], str] | None = None,
    ) -> None:
        self.parser = pages.options(doc, writes)
        self._name, self._kind = name, kind
        self._of_run, self._needs_model = dict[str, tuple[Any, Any]](), False
        self.add = self.parser.add_argument
        self.add("--threads", type=int, default=threads, help="threads of torch")
        self.add("--output", type=pathlib.Path, help=f"JSON file (lab/benchmarks/results/{name}-<date>.json)")
        if quick is not None:
            self.add("--quick", action="store_true", help=quick)
        if kind is not None:
            self.add("--record", action="store_true", help="write the results into lab/benchmarks/recorded")

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

        usual = list(known if default is None else default)
        self.add(flag, type=chosen, default=usual, help=f"{what} ({','.join(known)})")

    def real_model(self, is_needed: bool = False) -> None:
        """Add `--model`. The usual model is the demo model, and that of a quick run a random one."""
        self._needs_model = is_needed
        self.add("--model", help="directory or hub name of the model" + ("" if is_needed else "; 'none' for none"))
        self._of_run["model"] = default_model(), "none"

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        given = self.parser.parse_args(arguments)
        for name, (usual, quick) in self._of_run.items():
            if getattr(given, name) is None:
                setattr(given, name, quick if getattr(given, "quick", False) else usual)
        if self._needs_model and given.model is None:
            self.parser.error(NO_MODEL)
        if getattr(given, "record", False) and getattr(given, "quick", False):
            self.parser.error("--record needs the full models, and --quick uses small ones: pass only one of the two")
        if self._kind is not None and given.record:
            if given.output:
                self.parser.error("--record keeps a whole run in a file of its own: leave out --output")
            given.output = pages.RECORDED / f"{self._kind(given)}-{datetime.date.today()}.json"
        given.output = given.output or RESULTS / f"{self._name}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}.json"
        return given


class Session:
    """One run of a benchmark: what was asked for, the terminal, and what was wrong.

    Args:
        given: the arguments.
        progress: where bars are shown.

    Attributes:
        environment: machine, versions and date, for the file.
        targets: figures and the bounds that they are held against. They decide nothing.
        wrong: one line for each result that is not what it must be.
    """

    def __init__(self, given: argparse.Namespace, progress: Progress) -> None:
        self.given, self.progress, self.console = given, progress, progress.console
        self.quick: bool = getattr(given, "quick", False)
        self.environment = environment()
        self.targets: list[dict[str, Any]] = []
        self.wrong: list[str] = []

    def ticking(self, what: str, total: int) -> Tick:
        """Add a bar; return the function that advances it."""
        task = self.progress.add_task(what, total=total)
        return lambda: self.progress.advance(task)

    def random(self, shape: Shape | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> RandomModel:
        """A random model; a small one in a quick run."""
        return RandomModel(QUICK_SHAPE if self.quick else shape or Shape(), dtype=dtype, **options)

    def real(self, dtype: torch.dtype = torch.bfloat16) -> RealModel | None:
        """The model of `--model` with the topics of Python's help; `None` if there is no model."""
        if self.given.model is None:
            self.console.print(NO_MODEL)
        if self.given.model in (None, "none"):
            return None
        return RealModel(self.given.model, dtype)

    def some_model(self, dtype: torch.dtype) -> RealModel | RandomModel:
        """The model of `--model`, or a random one if there is none."""
        return self.real(dtype) or self.random(dtype=dtype)

    def expect(self, is_right: bool, otherwise: str) -> None:
        if not is_right:
            self.wrong.append(otherwise)

    def target(self, what: str, value: float, at_least: float | None = None, at_most: float | None = None) -> None:
        """Hold a figure against its bound."""
        is_met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        asked = f">= {at_least}" if at_least is not None else f"<= {at_most}"
        self.targets.append({"what": what, "asked": asked, "value": value, "met": is_met})

    def say(self, text: str) -> None:
        """Print a text as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def write(self, results: Any, **more: Any) -> None:
        """Write the JSON file of what was found so far."""
        arguments = {
            key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(self.given).items()
        }
        wrong = {"targets": self.targets, "wrong": self.wrong}
        output = self.given.output
        output.parent.mkdir(parents=True, exist_ok=True)
        content = {**self.environment, "arguments": arguments, "results": results, **wrong, **more}
        output.write_text(json.dumps(content, indent=1))

    def finish(self, results: Any, **more: Any) -> int:
        """Show the targets, write the JSON file and print what was wrong; return 1 if something was, else 0."""
        say = self.console.print
        # A small model has other costs.
        for target in [] if self.quick else self.targets:
            verdict = "[green]met[/]" if target["met"] else "[red]missed[/]"
            say(f"{verdict}: {target['what']}: {target['value']:.4g}, asked {target['asked']}")
        self.write(results, **more)
        say(f"written to {self.given.output}")
        for line in self.wrong:
            say(f"[red]wrong[/]: {line}", highlight=False)
        return int(bool(self.wrong))


def fidelity(model: str, *arguments: object) -> dict[str, Any]:
    """What `kvlayers fidelity` prints as JSON. Its exit code is 1 if a cache has failed, which is among the results."""
    command = [sys.executable, "-m", "kvlayers", "fidelity", model, *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


Kind = TypeVar("Kind", bound=Session)


@contextlib.contextmanager
def session(given: argparse.Namespace, kind: type[Kind] = Session) -> Iterator[Kind]:  # type: ignore[assignment]
    """A run, with bars in the terminal."""
    if given.threads:
        torch.set_num_threads(given.threads)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Without a terminal, rich's 80 columns would break the tables.
    console = Console(width=None if sys.stdout.isatty() else 132)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        yield kind(given, progress)


Section = tuple[Callable[[Session], Any], Callable[[Mapping[str, Any], Any], str]]
"""What measures a section, and what its page says of it, from the arguments and of what was found."""


def run(given: argparse.Namespace, sections: Mapping[str, Section]) -> int:
    """Measure the sections that `--only` names, show them as the page does, and write what they found by section.

    Returns:
        The exit code: 1 if something was wrong.
    """
    if given.output.parent == pages.RECORDED:
        kind = given.output.stem.rsplit("-", 3)[0]
        # Pages read the newest record alone. It may have sections that nobody measures any more.
        if left_out := (pages.newest(kind).get("results", {}).keys() & sections) - set(given.only):
            raise SystemExit(f"--record replaces a record that has {', '.join(sorted(left_out))} too: add it to --only")
    results: dict[str, Any] = {}
    with session(given) as running:
        for name in (each for each in sections if each in given.only):
            measure, show = sections[name]
            results[name] = measure(running)
            # Hours of measuring must not be lost for a text.
            running.write(results)
            if results[name]:
                running.say(f"\n{name}: {show(vars(given), results[name])}\n")
    return running.finish(results)
