"""What the demo shows: progress, text as it comes, and the table."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import TextStreamer

from ..cli.progress import bar_between_runs
from ..measuring.contenders import OURS, Contender
from .model import Report
from .runs import Row


class ConsoleStreamer(TextStreamer):  # type: ignore[misc]
    """Writes a continuation to a console, word by word as it is generated.

    Args:
        tokenizer: tokenizer of the model.
        console: where to write.
    """

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with every piece of text that later tokens cannot change."""
        self._console.print(text, end="\n" if stream_end else "", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def loading_bars(console: Console) -> Iterator[Report]:
    """A `Report` that draws a bar for each thing that it is told of."""
    tasks: dict[str, TaskID] = {}
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=None)
            # One step says nothing of how far it is: until it is done, the bar only shows that something goes on.
            progress.update(tasks[what], completed=done, total=total if total > 1 or done else None)

        yield report


@contextmanager
def runs_bar(console: Console, runs: int) -> Iterator[Callable[[Contender, int], None]]:
    """A bar over `runs` runs, told of each before it begins."""
    with bar_between_runs(console, runs, "Every cache on the same prompt") as begin:
        yield lambda contender, trial: begin(f"{contender.library} {contender.cache}, trial {trial + 1}")


def table(rows: Sequence[Row]) -> Table:
    """A table with a row for each cache."""
    drawn = Table("Library", "Cache", "Same tokens")
    drawn.add_column("Tokens/s", justify="right")
    drawn.add_column("Held", justify="right")
    for row in rows:
        drawn.add_row(
            row.library,
            row.cache,
            _verdict(row),
            f"{row.tokens_per_second:.1f}",
            filesize.decimal(row.nbytes),
            style="bold" if row.library == OURS else None,
        )
    return drawn


def plain_row(row: Row) -> dict[str, Any]:
    """A row in words of JSON."""
    return {
        "library": row.library,
        "cache": row.cache,
        "is_reference": row.is_reference,
        "same_tokens": row.same_tokens,
        "is_tie": row.is_tie,
        "first_difference": row.first_difference,
        "tokens_per_second": row.tokens_per_second,
        "nbytes": row.nbytes,
    }


def _verdict(row: Row) -> str:
    if row.is_tie:
        return f"a tie at token {(row.first_difference or 0) + 1}"
    if not row.same_tokens:
        return f"[red]no, from token {(row.first_difference or 0) + 1}[/red]"
    return "reference" if row.is_reference else "[green]yes[/green]"
