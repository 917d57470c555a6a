"""What the command `kvlayers demo` does."""

import torch
import typer
from rich.console import Console
from torch import Tensor

from ..cli.dtypes import Dtype
from ..cli.failing import NOT_WELL, one_line_errors
from ..cli.output import print_json
from ..cli.quietly import few_words
from ..dynamic_cache import DynamicCache
from ..measuring.contenders import OURS
from . import report, text
from .loading import load
from .model import LoadedModel, find_device
from .runs import Row, compare, contenders, continue_text


def run_demo(
    prompt: str,
    model: str | None,
    context: int,
    tokens: int,
    trials: int,
    threads: int | None,
    dtype: Dtype,
    device: str | None,
    as_json: bool,
) -> None:
    """Run the demo; the arguments are those of the command."""
    # With JSON on stdout, what is for people goes elsewhere.
    console = Console(stderr=as_json)
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors("demo"), few_words():
        target = find_device(device)
        loaded = load(console, model, dtype.on(target), target)
        ids = text.input_ids(loaded.tokenizer, prompt, context)
        text.check_length(loaded.model.config, ids.shape[1] + tokens)
        _stream(console, loaded, ids, prompt, context, tokens)
        rows = _compare(console, loaded, ids, tokens, trials)
    if as_json:
        print_json(
            {
                "model": loaded.name,
                "prompt_tokens": ids.shape[1],
                "tokens": tokens,
                "caches": [report.plain_row(row) for row in rows],
            }
        )
    if not all(row.same_tokens or row.is_tie for row in rows if row.library == OURS):
        raise typer.Exit(NOT_WELL)


def _stream(console: Console, loaded: LoadedModel, ids: Tensor, prompt: str, context: int, tokens: int) -> None:
    model = loaded.model
    threads = f", torch threads: {torch.get_num_threads()}" if model.device.type == "cpu" else ""
    console.print(
        f"{loaded.name} in {str(model.dtype).removeprefix('torch.')} on {model.device}{threads}. "
        f"Prompt: {ids.shape[1]} tokens{f', {context} of them of the Python documentation' if context else ''}.\n",
        highlight=False,
    )
    shown = prompt or "..." + loaded.tokenizer.decode(ids[0, -40:])
    console.print(shown, end="", style="dim", markup=False, highlight=False, soft_wrap=True)
    cache = DynamicCache(config=model.config)
    streamer = report.ConsoleStreamer(loaded.tokenizer, console)
    continue_text(model, ids, tokens, cache, streamer, to_the_end=False)
    console.print()


def _compare(console: Console, loaded: LoadedModel, ids: Tensor, tokens: int, trials: int) -> list[Row]:
    # The last token is never fed back, as generate() knows when it sizes a cache.
    rivals = contenders(loaded.model, ids.shape[1] + tokens - 1)
    with report.runs_bar(console, trials * len(rivals)) as on_run:
        rows = compare(loaded.model, ids, tokens, trials, rivals, on_run)
    console.print(report.table(rows))
    console.print(
        f"{tokens} tokens each, greedy; speed of decode, median of {trials}. Held: bytes that the cache keeps alive.",
        highlight=False,
    )
    if any(row.is_tie for row in rows):
        console.print(
            "A tie: two tokens are equally likely as far as the dtype can say, and attention that adds in another "
            "order takes the other one. --dtype float32 tells them apart.",
            highlight=False,
        )
    return rows
