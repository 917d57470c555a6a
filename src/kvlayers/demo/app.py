"""The command `kvlayers demo`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from torch import Tensor
from transformers.utils import logging as transformers_logging

from ..dynamic_cache import DynamicCache
from ..errors import KVLayersError
from . import report, text
from .model import HUB_NAME, LoadedModel, find_device, find_model, load_model
from .runs import OURS, compare, contenders, continue_text

PROMPT = "Once upon a time, a programmer"
CONTEXT_OF_PROMPT = 2048


class Dtype(str, Enum):
    """What the weights and the states are kept in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    def on(self, device: torch.device) -> torch.dtype:
        """The dtype; `auto` is bfloat16, but float32 on a CPU that has no instructions for less."""
        if self is Dtype.auto:
            slow = device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
            return torch.float32 if slow else torch.bfloat16
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


def demo(
    prompt: Annotated[
        str | None,
        typer.Argument(help=f"Text to continue. Default: '{PROMPT}', after {CONTEXT_OF_PROMPT} tokens of context."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"Model directory, or name on the hub. Default: {HUB_NAME}, wherever it is found."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of real text (Python's documentation) before the prompt. "
            f"Default: 0 with a prompt, {CONTEXT_OF_PROMPT} without.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 48,
    trials: Annotated[int, typer.Option(min=1, help="Runs of each cache; the table shows medians.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: as torch chooses.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16, or float32 on a CPU slow at it.")] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
) -> None:
    """A language model continues a text through kvlayers, then through every cache, to compare.

    Exits with 1 where a cache of kvlayers gives other tokens than transformers' DynamicCache, ties aside.
    """
    console = Console()
    if context is None:
        context = CONTEXT_OF_PROMPT if prompt is None else 0
    prompt = PROMPT if prompt is None else prompt
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with _few_words():
            loaded = _load(console, model, dtype, device)
            ids = text.input_ids(loaded.tokenizer, prompt, context)
            text.check_length(loaded.model.config, ids.shape[1] + tokens)
            _stream(console, loaded, ids, prompt, context, tokens)
            all_equal = _compare(console, loaded, ids, tokens, trials)
    except KVLayersError as error:
        Console(stderr=True).print(
            f"kvlayers demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from None
    if not all_equal:
        raise typer.Exit(1)


@contextmanager
def _few_words() -> Iterator[None]:
    """Keep transformers' advice, and the hub's account of its attempts, out of what the demo shows."""
    before = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before[0])
        hub_logging.set_verbosity(before[1])


def _load(console: Console, model: str | None, dtype: Dtype, device: str | None) -> LoadedModel:
    target = find_device(device)
    with report.loading_bars(console) as bars:
        name = find_model(model, bars)
        if Path(name).is_dir():
            return load_model(name, dtype.on(target), target, bars)
    # Downloads draw bars of their own, which would write over ours.
    console.print(f"Asking the hub for {name}", highlight=False, markup=False)
    return load_model(name, dtype.on(target), target)


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


def _compare(console: Console, loaded: LoadedModel, ids: Tensor, tokens: int, trials: int) -> bool:
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
    return all(row.same_tokens or row.is_tie for row in rows if row.library == OURS)
