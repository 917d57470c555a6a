"""Bars that do not disturb what is measured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def bar_between_runs(console: Console, runs: int, in_the_end: str) -> Iterator[Callable[[str], None]]:
    """A bar over `runs` runs; what it yields is called before each, with what the run is of.

    Args:
        console: where it is drawn.
        runs: how many there will be.
        in_the_end: what stands beside the full bar.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between the runs only: a thread that draws at ten hertz would take its time from those that are measured.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=runs)
        begun = 0

        def begin(run: str) -> None:
            nonlocal begun
            progress.update(task, completed=begun, description=run)
            progress.refresh()
            begun += 1

        yield begin
        progress.update(task, completed=begun, description=in_the_end)
        progress.refresh()
