"""A progress bar that does not disturb what is measured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar_between_runs(console: Console, runs: int, when_done: str) -> Iterator[Callable[[str], None]]:
    """Draw a bar over `runs` runs. Yields a function to call before each run, with the run's description.

    The bar shows the time that remains, and when it is full, the time that all runs took.

    Args:
        console: where the bar is drawn.
        runs: the number of runs.
        when_done: description beside the full bar.
    """
    remaining = TimeRemainingColumn(elapsed_when_finished=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), remaining)
    # Drawn between the runs only: a thread that redraws ten times a second would slow down the timed runs.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=runs)
        begun = 0

        def begin(run: str) -> None:
            nonlocal begun
            progress.update(task, completed=begun, description=run)
            progress.refresh()
            begun += 1

        yield begin
        progress.update(task, completed=begun, description=when_done)
        progress.refresh()
