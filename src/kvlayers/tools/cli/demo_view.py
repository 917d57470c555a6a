"""Output of the demo: progress, streamed text, and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import TextStreamer

from kvlayers.tools.measuring.decoding import ContenderResult
from kvlayers.tools.names import KVLAYERS
from kvlayers.utils.units import readable_bytes

LEAST_GAIN = 1.1
"""The least speedup that the summary mentions, since a smaller one may be noise."""

NOISY_SPREAD = 0.25
"""Half of the range of the middle steps, as a fraction of the median, from which times cannot be told apart."""


@dataclass(frozen=True)
class Samples:
    """Several continuations of one prompt.

    Attributes:
        seconds: seconds of the whole call.
        nbytes: bytes that the cache held at the end.
        sequences: int64 `[samples, prompt + new]`.
    """

    seconds: float
    nbytes: int
    sequences: Tensor


@dataclass(frozen=True)
class Answer:
    """An answer to a chat.

    Attributes:
        seconds: seconds from the call to the first token.
        tokens: the new tokens.
    """

    seconds: float
    tokens: list[int]


class ConsoleStreamer(TextStreamer):  # type: ignore[misc]
    """Writes a continuation to a console word by word, while it is generated.

    Args:
        tokenizer: tokenizer of the model.
        console: where to write.
    """

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with each piece of text that later tokens cannot change."""
        self._console.print(text, end="\n" if stream_end else "", markup=False, highlight=False, soft_wrap=True)


def table_of_caches(results: Sequence[ContenderResult]) -> Table:
    """A table with a row for each cache."""
    # Without borders, so that no cell is folded on a console of 80 columns.
    table = Table("Library", "Cache", "Predictions", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("Prompt", "Step", "Held"):
        table.add_column(column, justify="right")
    for result in results:
        figures = (
            ("", "", "")
            if result.failure
            else (
                f"{result.prefill_seconds:.2f} s",
                f"{result.step_seconds * 1000:.1f} ms ±{result.step_spread:.0%}",
                readable_bytes(result.nbytes),
            )
        )
        style = "bold" if result.contender.library == KVLAYERS else None
        table.add_row(*result.contender.key, verdict(result, result is results[0]), *figures, style=style)
    return table


def is_noisy(results: Sequence[ContenderResult]) -> bool:
    """Whether the steps of a cache took so different times that a comparison says nothing."""
    return any(result.failure is None and result.step_spread > NOISY_SPREAD for result in results)


def verdict(result: ContenderResult, is_reference: bool) -> str:
    """How the predictions with a cache differ from the reference's, in a few words."""
    if result.failure:
        return f"[red]{escape(result.failure)}[/red]"
    if is_reference:
        return "reference"
    fidelity = result.contender.fidelity()
    if fidelity != "exact":
        return f"{fidelity}, KL {result.kl:.2g}"
    if not result.same_tokens:
        return f"[red]{result.other_tokens - result.ties} other tokens[/red]"
    return f"[green]same tokens[/green]{f', {result.ties} tied' if result.ties else ''}"


def table_of_samples(alone: Samples, shared: Samples, prompt_tokens: int) -> Table:
    """A table of samples of one prompt, by transformers and by kvlayers."""
    count = alone.sequences.shape[0]
    same = int((alone.sequences == shared.sequences).all(1).sum())
    table = Table(f"{count} samples of {prompt_tokens:,} tokens", "Same samples")
    for column in ("Whole call", "Held"):
        table.add_column(column, justify="right")
    table.add_row("transformers", "reference", f"{alone.seconds:.1f} s", readable_bytes(alone.nbytes))
    figures = f"{shared.seconds:.1f} s", readable_bytes(shared.nbytes)
    table.add_row("kvlayers", f"{same} of {count}", *figures, style="bold")
    return table


def table_of_answers(alone: Answer, stored: Answer, is_other: bool) -> Table:
    """A table of the second turn of a chat, answered by transformers and with a prefix store."""
    table = Table("Second turn of a chat", "Answer")
    table.add_column("First token after", justify="right")
    table.add_row("transformers, the whole chat again", "reference", f"{alone.seconds:.2f} s")
    answer = "[red]another[/red]" if is_other else "same" if alone.tokens == stored.tokens else "same, except for ties"
    table.add_row("kvlayers.PrefixStore", answer, f"{stored.seconds:.2f} s", style="bold")
    return table


def plain_result(result: ContenderResult) -> dict[str, Any]:
    """A result as JSON types."""
    library, cache = result.contender.key
    named = {"library": library, "cache": cache, "failure": result.failure}
    if result.failure:
        return named
    return {
        **named,
        "fidelity": result.contender.fidelity(),
        "same_tokens": result.same_tokens,
        "other_tokens": result.other_tokens,
        "ties": result.ties,
        "kl": result.kl,
        "prefill_seconds": result.prefill_seconds,
        "step_seconds": result.step_seconds,
        "nbytes": result.nbytes,
    }


def summary(
    results: Sequence[ContenderResult],
    samples: tuple[Samples, Samples] | None,
    answers: tuple[Answer, Answer] | None,
) -> str:
    """What the demo has shown, in a sentence. A part appears only if the figures of this run support it."""
    parts = []
    reference = results[0]
    int4 = next((result for result in results if result.contender.cache == "int4" and not result.failure), None)
    if int4 is not None and int4.nbytes < reference.nbytes:
        speed = reference.step_seconds / int4.step_seconds
        faster = f" and decodes {speed:.1f} times as fast" if speed >= LEAST_GAIN and not is_noisy(results) else ""
        parts.append(f"int4 holds {int4.nbytes / reference.nbytes:.0%} of the bytes of DynamicCache{faster}")
    if samples is not None and samples[0].seconds / samples[1].seconds >= LEAST_GAIN:
        count, gain = samples[0].sequences.shape[0], samples[0].seconds / samples[1].seconds
        parts.append(f"{count} samples of one prompt come {gain:.1f} times as fast")
    if answers is not None and answers[0].seconds / answers[1].seconds >= LEAST_GAIN:
        parts.append(
            f"the first token of a second turn comes {answers[0].seconds / answers[1].seconds:.0f} times as fast"
        )
    if not parts:
        return "At this length kvlayers changes little: try a longer --context."
    *most, last = parts
    return f"With kvlayers, {', '.join(most) + ' and ' if most else ''}{last}."
