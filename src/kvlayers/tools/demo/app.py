"""The command `kvlayers demo`, step by step."""

from typing import Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from kvlayers.caches.dynamic import DynamicCache
from kvlayers.errors import KVLayersError
from kvlayers.tools.cli.dtypes import Dtype
from kvlayers.tools.cli.exit_codes import CHECK_FAILED, one_line_errors
from kvlayers.tools.cli.output import print_json, quiet_libraries
from kvlayers.tools.cli.progress import bar_between_runs
from kvlayers.tools.demo import report
from kvlayers.tools.demo.caches import compare, demo_contenders
from kvlayers.tools.demo.generations import Answer, Samples, continue_text, differs, sample, second_turn
from kvlayers.tools.demo.loading import find, load
from kvlayers.tools.demo.model import LoadedModel, find_device
from kvlayers.tools.measuring import text
from kvlayers.tools.measuring.decoding import ContenderResult
from kvlayers.tools.measuring.scoring import ReadingError
from kvlayers.tools.names import KVLAYERS, TRANSFORMERS

LIBRARIES = (TRANSFORMERS, KVLAYERS)
SAMPLES = 8
TOKENS_OF_SAMPLES = 16
PROMPT_OF_SAMPLES = 1024
"""Tokens: transformers reads them once for each sample, which would take minutes at 4k."""

QUESTION = "\n\nWhat is this text about? It is about"
NEXT = (
    "Next: `kvlayers bench` and `kvlayers fidelity` measure your own model, `kvlayers plan` shows how many bytes each "
    "cache will take, and docs/choosing.md helps to choose one."
)


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
    """Run the demo. The arguments are the options of the command."""
    # If stdout has the JSON, people read stderr.
    console = Console(stderr=as_json)
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors("demo"), quiet_libraries():
        target = find_device(device)
        loaded = load(console, find(console, model), dtype.on(target), target)
        ids = text.input_ids(loaded.tokenizer, prompt, context)
        question = loaded.tokenizer(QUESTION, add_special_tokens=False, return_tensors="pt").input_ids
        text.check_length(loaded.model.config, ids.shape[1] + 2 * tokens + question.shape[1])
        _stream(console, loaded, ids, prompt, context, tokens)
        results = _compare(console, loaded, ids, tokens, trials)
        samples = _sample(console, loaded.model, ids[:, -PROMPT_OF_SAMPLES:], min(tokens, TOKENS_OF_SAMPLES))
        answers, is_other = _second_turn(console, loaded.model, ids, question, min(tokens, TOKENS_OF_SAMPLES))
        console.print(report.summary(results, samples, answers), style="bold", highlight=False)
        console.print(NEXT, highlight=False)
    if as_json:
        print_json(
            {
                "model": loaded.name,
                "prompt_tokens": ids.shape[1],
                "tokens": tokens,
                "caches": [report.plain_result(result) for result in results],
                "samples": None
                if samples is None
                else dict(zip(LIBRARIES, map(report.plain_samples, samples), strict=True)),
                "second_turn": None if answers is None else dict(zip(LIBRARIES, answers, strict=True)),
            }
        )
    kvlayers_results = [result for result in results if result.contender.library == KVLAYERS]
    exact = [result for result in kvlayers_results if result.contender.fidelity() == "exact"]
    if is_other or not all(result.failure is None and result.same_tokens for result in exact):
        raise typer.Exit(CHECK_FAILED)


def _stream(console: Console, loaded: LoadedModel, ids: Tensor, prompt: str, context: int, tokens: int) -> None:
    model = loaded.model
    threads = f", torch threads: {torch.get_num_threads()}" if model.device.type == "cpu" else ""
    console.print(
        f"{loaded.name} in {str(model.dtype).removeprefix('torch.')} on {model.device}{threads}. "
        f"Prompt: {ids.shape[1]} tokens{f', {context} of them from the Python documentation' if context else ''}.\n",
        highlight=False,
    )
    shown = prompt or "..." + loaded.tokenizer.decode(ids[0, -40:])
    console.print(shown, end="", style="dim", markup=False, highlight=False, soft_wrap=True)
    streamer = report.ConsoleStreamer(loaded.tokenizer, console)
    continue_text(model, ids, tokens, DynamicCache(config=model.config), streamer)
    console.print()


def _compare(console: Console, loaded: LoadedModel, ids: Tensor, tokens: int, trials: int) -> list[ContenderResult]:
    # The last token is never fed back, so the cache holds one token less.
    contenders = demo_contenders(loaded.model, ids.shape[1] + tokens - 1)
    with report.runs_bar(console, trials * len(contenders)) as on_run:
        results = compare(loaded.model, ids, tokens, trials, contenders, on_run)
    if results[0].failure is not None:
        raise ReadingError(results[0].failure)
    console.print(report.table_of_caches(results))
    console.print(
        f"Prompt: the forward pass over {ids.shape[1]} tokens. Step: the forward pass over one more token, median of "
        f"{tokens - 1}{f', of {trials} trials' if trials > 1 else ''}, and half of the range of the middle ones; the "
        "caches take turns. Held: bytes that the cache keeps alive. KL: mean KL divergence of the predictions from "
        "DynamicCache's, in nats.",
        highlight=False,
    )
    if report.is_noisy(results):
        console.print(
            "The machine is busy: the same step takes very different times, so compare the caches on a quiet one.",
            style="yellow",
        )
    if any(result.ties for result in results if result.same_tokens):
        console.print(
            "Tied: two tokens are equally likely within the precision of the dtype, and attention that sums in another "
            "order picks the other one. --dtype float32 tells them apart.",
            highlight=False,
        )
    return results


def _sample(console: Console, model: Any, ids: Tensor, tokens: int) -> tuple[Samples, Samples] | None:
    with bar_between_runs(console, len(LIBRARIES), f"{SAMPLES} samples of the prompt") as begin:
        found = []
        for library in LIBRARIES:
            begin(f"{SAMPLES} samples of the prompt, {library}")
            found.append(sample(model, ids, tokens, SAMPLES, with_kvlayers=library == KVLAYERS))
    alone, shared = found
    console.print(report.table_of_samples(alone, shared, ids.shape[1]))
    if not torch.equal(alone.sequences, shared.sequences):
        reason = (
            "Both use one seed. Sums in another order can change a draw between two tokens of nearly equal probability."
        )
        console.print(reason, highlight=False)
    return alone, shared


def _second_turn(
    console: Console, model: Any, ids: Tensor, question: Tensor, tokens: int
) -> tuple[tuple[Answer, Answer] | None, bool]:
    """The answers of both libraries, and whether they differ by more than a tie."""
    try:
        with bar_between_runs(console, 1, "A second turn") as begin:
            begin("A second turn")
            chat, alone, stored = second_turn(model, ids, question, tokens)
    except KVLayersError as error:
        console.print(f"No second turn: {error}", markup=False, highlight=False)
        return None, False
    is_other = differs(model, chat, alone.tokens, stored.tokens)
    console.print(report.table_of_answers(alone, stored, is_other))
    return (alone, stored), is_other
