"""What the demo shows: progress, text as it comes, and the table."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import TextStreamer

from kvlayers.tools.cli.progress import bar_between_runs
from kvlayers.tools.demo.generations import Samples, Turn
from kvlayers.tools.demo.model import Report
from kvlayers.tools.measuring.contenders import Contender, states_in
from kvlayers.tools.measuring.decoding import Row
from kvlayers.tools.names import KVLAYERS
from kvlayers.utils.units import readable_bytes

LEAST_GAIN = 1.1
"""Times as fast from which a gain is worth a sentence: less may be noise."""


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


def table_of_caches(rows: Sequence[Row]) -> Table:
    """A table with a row for each cache."""
    drawn = Table("Library", "Cache", "Predictions")
    for column in ("Prompt", "Step", "Held"):
        drawn.add_column(column, justify="right")
    for row in rows:
        figures = (
            ("", "", "")
            if row.failure
            else (
                f"{row.prefill_seconds:.2f} s",
                f"{row.step_seconds * 1000:.1f} ms",
                readable_bytes(row.nbytes),
            )
        )
        style = "bold" if row.contender.library == KVLAYERS else None
        drawn.add_row(row.contender.library, row.contender.cache, verdict(row, row is rows[0]), *figures, style=style)
    return drawn


def verdict(row: Row, is_reference: bool) -> str:
    """What a cache did to predictions, in a few words."""
    if row.failure:
        return f"[red]{escape(row.failure)}[/red]"
    if is_reference:
        return "reference"
    fidelity = states_in(row.contender)
    if fidelity != "exact":
        return f"{fidelity}, KL {row.kl:.2g}"
    if not row.same_tokens:
        return f"[red]{row.other_tokens - row.ties} other tokens[/red]"
    return f"[green]same tokens[/green]{f', {row.ties} tied' if row.ties else ''}"


def table_of_samples(alone: Samples, shared: Samples) -> Table:
    """A table of samples of one prompt, drawn by transformers alone and with kvlayers."""
    count = alone.sequences.shape[0]
    same = int((alone.sequences == shared.sequences).all(1).sum())
    drawn = Table(f"{count} samples of the prompt", "Same samples")
    for column in ("Whole call", "Held"):
        drawn.add_column(column, justify="right")
    drawn.add_row("transformers", "reference", f"{alone.seconds:.1f} s", readable_bytes(alone.nbytes))
    figures = f"{shared.seconds:.1f} s", readable_bytes(shared.nbytes)
    drawn.add_row("kvlayers", f"{same} of {count}", *figures, style="bold")
    return drawn


def table_of_turns(alone: Turn, stored: Turn, is_other: bool) -> Table:
    """A table of the second turn of a chat."""
    drawn = Table("Second turn of a chat", "Answer")
    drawn.add_column("First token after", justify="right")
    drawn.add_row("transformers, the whole chat again", "reference", f"{alone.seconds:.2f} s")
    answer = "[red]another[/red]" if is_other else "same" if alone.tokens == stored.tokens else "same but for ties"
    drawn.add_row("kvlayers.PrefixStore", answer, f"{stored.seconds:.2f} s", style="bold")
    return drawn


def plain_row(row: Row) -> dict[str, Any]:
    """A row in words of JSON."""
    named = {"library": row.contender.library, "cache": row.contender.cache, "failure": row.failure}
    if row.failure:
        return named
    return {
        **named,
        "fidelity": states_in(row.contender),
        "same_tokens": row.same_tokens,
        "other_tokens": row.other_tokens,
        "ties": row.ties,
        "kl": row.kl,
        "prefill_seconds": row.prefill_seconds,
        "step_seconds": row.step_seconds,
        "nbytes": row.nbytes,
    }


def plain_samples(samples: Samples) -> dict[str, Any]:
    """Samples in words of JSON."""
    return {"seconds": samples.seconds, "nbytes": samples.nbytes, "samples": samples.sequences.shape[0]}


def sentence(rows: Sequence[Row], samples: tuple[Samples, Samples] | None, turns: tuple[Turn, Turn] | None) -> str:
    """What the demo has shown: each part only if the figures of this run say so."""
    parts = []
    reference = rows[0]
    int4 = next((row for row in rows if row.contender.cache == "int4" and not row.failure), None)
    if int4 is not None and int4.nbytes < reference.nbytes:
        speed = reference.step_seconds / int4.step_seconds
        faster = f" and decodes {speed:.1f} times as fast" if speed >= LEAST_GAIN else ""
        parts.append(f"int4 holds {int4.nbytes / reference.nbytes:.0%} of the bytes of DynamicCache{faster}")
    if samples is not None and samples[0].seconds / samples[1].seconds >= LEAST_GAIN:
        count, gain = samples[0].sequences.shape[0], samples[0].seconds / samples[1].seconds
        parts.append(f"{count} samples of one prompt come {gain:.1f} times as fast")
    if turns is not None and turns[0].seconds / turns[1].seconds >= LEAST_GAIN:
        parts.append(f"a second turn begins {turns[0].seconds / turns[1].seconds:.0f} times as soon")
    if not parts:
        return "At this length kvlayers changes little: try a longer --context."
    *most, last = parts
    return f"With kvlayers, {', '.join(most) + ' and ' if most else ''}{last}."
