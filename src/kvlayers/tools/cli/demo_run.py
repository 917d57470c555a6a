"""The demo: a real model continues real text through the caches of kvlayers and of transformers."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvlayers.caches.base import Cache
from kvlayers.caches.dynamic import DynamicCache
from kvlayers.errors import KVLayersError
from kvlayers.generation.install import generate
from kvlayers.prefix import PrefixStore
from kvlayers.tools.cli import demo_view
from kvlayers.tools.cli.common import CHECK_FAILED, Dtype, one_line_errors
from kvlayers.tools.cli.console import bar_between_runs, print_json, quiet_libraries
from kvlayers.tools.cli.demo_view import Answer, Samples
from kvlayers.tools.measuring import text
from kvlayers.tools.measuring.contenders import Contender, exact_names, make_contender
from kvlayers.tools.measuring.decoding import ContenderResult, measure_in_rounds, warm_up
from kvlayers.tools.measuring.nbytes import cache_nbytes
from kvlayers.tools.measuring.predictions import is_tie
from kvlayers.tools.measuring.scoring import ReadingError
from kvlayers.tools.models import LoadedModel, find, find_device, load
from kvlayers.tools.names import KVLAYERS, TRANSFORMERS
from kvlayers.upstream import cache_argument

ROUNDED_OR_EVICTING = ("int8", "int4", "sink")
STORE_BYTES = 4 * 2**30
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


def demo_contenders(model: Any, length: int) -> list[Contender]:
    """The caches that the demo shows. The first one, transformers' `DynamicCache`, is the reference.

    Args:
        model: a causal language model.
        length: the most tokens that a cache will hold.
    """
    names = [*exact_names(model.config), *ROUNDED_OR_EVICTING]
    kvlayers_contenders = [make_contender(KVLAYERS, name, model, length) for name in names]
    return [make_contender(TRANSFORMERS, "dynamic", model, length), *filter(_is_supported, kvlayers_contenders)]


def _is_supported(contender: Contender) -> bool:
    """Whether the model supports the cache. A sink cache, for example, needs rotary position embeddings."""
    try:
        cache = contender.make()
    except KVLayersError:
        return False
    return isinstance(cache, Cache)


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """Records the time of each token. generate() copies each to the host first, so a GPU has finished computing it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompt, and then with every new token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""


def continue_text(model: Any, ids: Tensor, tokens: int, cache: Any, streamer: Any) -> None:
    """Continue a prompt, int64 `[1, tokens]`, greedily by up to `tokens` tokens with `cache`; `streamer` gets them."""
    ids = ids.to(model.device)
    model.generate(
        ids,
        **_options(ids, tokens),
        do_sample=False,
        streamer=streamer,
        **{cache_argument.name_in_generate(model): cache},
    )


def sample(call: Callable[..., Any], ids: Tensor, tokens: int, count: int) -> Samples:
    """Sample continuations of a prompt, always with the same seed.

    Args:
        call: `model.generate`, or `kvlayers.generate` for the model.
        ids: the prompt, int64 `[1, tokens]`, on the model's device.
        tokens: tokens of each sample.
        count: the number of samples.
    """
    options = {**_options(ids, tokens), "min_new_tokens": tokens, "do_sample": True, "num_return_sequences": count}
    torch.manual_seed(0)
    begin = time.perf_counter()
    output = call(ids, **options, return_dict_in_generate=True)
    seconds = time.perf_counter() - begin
    return Samples(seconds, cache_nbytes(cache_argument.in_output(output)), output.sequences.cpu())


def second_turn(model: Any, first: Tensor, question: Tensor, tokens: int) -> tuple[Tensor, Answer, Answer]:
    """Answer the second turn of a chat with transformers, and with a prefix store that has the first turn.

    Args:
        model: a causal language model.
        first: the prompt of the first turn, int64 `[1, tokens]`.
        question: what the second turn adds, int64 `[1, tokens]`.
        tokens: tokens of each answer.

    Returns:
        The chat up to the second answer, int64 `[1, tokens]`, and the second answer of transformers and of kvlayers.
    """
    store = PrefixStore(max_bytes=STORE_BYTES)
    first = first.to(model.device)
    with_kvlayers = functools.partial(generate, model, prefix_store=store)
    answered = with_kvlayers(first, **_options(first, tokens), do_sample=False)
    chat = torch.cat([answered, question.to(model.device)], dim=1)
    options = {**_options(chat, tokens), "min_new_tokens": tokens, "do_sample": False}
    return chat, _answer(model.generate, chat, options), _answer(with_kvlayers, chat, options)


def differs(model: Any, chat: Tensor, expected: list[int], seen: list[int]) -> bool:
    """Whether an answer differs from the expected one, unless their first different token is a tie."""
    pairs = zip(expected, seen, strict=True)
    index = next((index for index, (wanted, token) in enumerate(pairs) if wanted != token), None)
    if index is None:
        return False
    before = torch.cat([chat, torch.tensor([expected[:index]], dtype=chat.dtype)], dim=1).to(model.device)
    with torch.no_grad():
        logits = model(before).logits[0, -1].float()
    return not is_tie(logits, expected[index], seen[index], model.dtype)


def _answer(call: Callable[..., Any], chat: Tensor, options: dict[str, Any]) -> Answer:
    clock = TokenClock()
    begin = time.perf_counter()
    output = call(chat, **options, streamer=clock)
    _, first_token, *_ = clock.times
    return Answer(first_token - begin, output[0, chat.shape[1] :].tolist())


def _options(ids: Tensor, tokens: int) -> dict[str, Any]:
    return {
        "attention_mask": torch.ones_like(ids),
        "num_beams": 1,
        "max_new_tokens": tokens,
        # Otherwise generate() compiles for some caches and not for others.
        "disable_compile": True,
    }


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
        console.print(demo_view.summary(results, samples, answers), style="bold", highlight=False)
        console.print(NEXT, highlight=False)
    if as_json:
        print_json(
            {
                "model": loaded.name,
                "prompt_tokens": ids.shape[1],
                "tokens": tokens,
                "caches": [demo_view.plain_result(result) for result in results],
                "samples": {
                    library: {"seconds": each.seconds, "nbytes": each.nbytes, "samples": each.sequences.shape[0]}
                    for library, each in zip(LIBRARIES, samples, strict=True)
                },
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
    streamer = demo_view.ConsoleStreamer(loaded.tokenizer, console)
    continue_text(model, ids, tokens, DynamicCache(config=model.config), streamer)
    console.print()


def _compare(console: Console, loaded: LoadedModel, ids: Tensor, tokens: int, trials: int) -> list[ContenderResult]:
    # The last token is never fed back, so the cache holds one token less.
    contenders = demo_contenders(loaded.model, ids.shape[1] + tokens - 1)
    with bar_between_runs(console, trials * len(contenders), "Every cache on the same prompt") as begin:
        warm_up(loaded.model, ids, contenders)
        results = measure_in_rounds(
            loaded.model,
            ids,
            tokens - 1,
            trials,
            contenders,
            lambda contender, trial: begin(f"{contender.name}, trial {trial + 1}"),
        )
    if results[0].failure is not None:
        raise ReadingError(results[0].failure)
    console.print(demo_view.table_of_caches(results))
    console.print(
        f"Prompt: the forward pass over {ids.shape[1]} tokens. Step: the forward pass over one more token, median of "
        f"{tokens - 1}{f', of {trials} trials' if trials > 1 else ''}, and half of the range of the middle ones; the "
        "caches take turns. Held: bytes that the cache keeps alive. KL: mean KL divergence of the predictions from "
        "DynamicCache's, in nats.",
        highlight=False,
    )
    if demo_view.is_noisy(results):
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


def _sample(console: Console, model: Any, ids: Tensor, tokens: int) -> tuple[Samples, Samples]:
    with bar_between_runs(console, len(LIBRARIES), f"{SAMPLES} samples of the prompt") as begin:
        found = []
        for library, call in zip(LIBRARIES, (model.generate, functools.partial(generate, model)), strict=True):
            begin(f"{SAMPLES} samples of the prompt, {library}")
            found.append(sample(call, ids.to(model.device), tokens, SAMPLES))
    alone, shared = found
    console.print(demo_view.table_of_samples(alone, shared, ids.shape[1]))
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
    console.print(demo_view.table_of_answers(alone, stored, is_other))
    return (alone, stored), is_other
