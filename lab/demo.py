"""The demo: a real model continues real text through the caches of kvlayers and of transformers.

make demo                                                        # 4,096 tokens of context
make demo ARGS='"Once upon a time" --tokens 64'
python lab/demo.py --help
"""

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from kvlayers import DynamicCache, PrefixStore, generate, models, plan
from kvlayers.commands.common import CHECK_FAILED, FLAG, NO_OPTIONS, Dtype
from kvlayers.commands.console import print_json
from kvlayers.errors import CapacityError, ConfigError, KVLayersError, OptionError
from kvlayers.options import readable_bytes
from kvlayers_lab.cli.console import bar_between_runs, measuring
from kvlayers_lab.measuring.contenders import Contender, exact_names, is_supported, make_contender
from kvlayers_lab.measuring.decoding import ContenderResult, measure, warm_up
from kvlayers_lab.measuring.nbytes import cache_nbytes
from kvlayers_lab.measuring.scoring import ReadingError, is_tie, newest_logits
from kvlayers_lab.models import LoadedModel, find, load
from kvlayers_lab.names import HUB_NAME, KVLAYERS, TRANSFORMERS

INT4, TRANSFORMERS_STATIC = (KVLAYERS, "int4"), (TRANSFORMERS, "static")

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
    """

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Answer:
    """An answer to a chat.

    Attributes:
        seconds: seconds from the call to the first token.
        tokens: the new tokens.
    """

    seconds: float
    tokens: list[int]


@dataclass(frozen=True)
class Answers:
    """The second answer of one chat, computed in three ways.

    Attributes:
        alone: by transformers, which reads the whole chat again.
        kept: by transformers, with the cache of the first turn.
        stored: by kvlayers, with a prefix store that has the first turn.
    """

    alone: Answer
    kept: Answer
    stored: Answer


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
    # What another order of sums does: the least that a rounded cache could have.
    return f"[green]same tokens[/green], KL {result.kl:.2g}"


def table_of_samples(alone: Samples, shared: Samples, prompt_tokens: int) -> Table:
    """A table of samples of one prompt, by transformers and by kvlayers."""
    table = Table(f"{SAMPLES} samples of a prompt of {prompt_tokens:,} tokens")
    for column in ("Whole call", "Held"):
        table.add_column(column, justify="right")
    for library, each, style in ((TRANSFORMERS, alone, None), (KVLAYERS, shared, "bold")):
        table.add_row(library, f"{each.seconds:.1f} s", readable_bytes(each.nbytes), style=style)
    return table


def table_of_answers(answers: Answers, is_other: bool) -> Table:
    """A table of the second turn of a chat, answered by transformers and with a prefix store."""
    table = Table("Second turn of a chat", "Answer")
    table.add_column("First token after", justify="right")
    table.add_row("transformers, the whole chat again", "reference", f"{answers.alone.seconds:.2f} s")
    table.add_row("transformers, its cache kept", "", f"{answers.kept.seconds:.2f} s")
    is_same = answers.alone.tokens == answers.stored.tokens
    answer = "[red]another[/red]" if is_other else "same" if is_same else "same, except for ties"
    table.add_row("kvlayers.PrefixStore", answer, f"{answers.stored.seconds:.2f} s", style="bold")
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
    results: Sequence[ContenderResult], samples: tuple[Samples, Samples] | None, answers: Answers | None
) -> str:
    """What the demo has shown. A sentence appears only if the figures of this run support it."""
    reference, sentences = results[0], []
    ran = {result.contender.key: result for result in results if not result.failure}
    speeds = {} if is_noisy(results) else {key: reference.step_seconds / each.step_seconds for key, each in ran.items()}
    dynamic, static = (speeds.get(key, 0.0) for key in ((KVLAYERS, "dynamic"), TRANSFORMERS_STATIC))
    if dynamic >= LEAST_GAIN:
        gain = dynamic / static if static else 0.0
        beside = f", and {gain:.1f} times as fast as its StaticCache of this length" if gain >= LEAST_GAIN else ""
        prompt = reference.prefill_seconds / ran[KVLAYERS, "dynamic"].prefill_seconds
        read = f" It reads the prompt {prompt:.1f} times as fast." if prompt >= LEAST_GAIN else ""
        sentences.append(f"dynamic decodes {dynamic:.1f} times as fast as transformers' DynamicCache{beside}.{read}")
    if INT4 in ran and ran[INT4].nbytes < reference.nbytes:
        share, pace = ran[INT4].nbytes / reference.nbytes, ""
        if dynamic:
            pace = f", at {ran[KVLAYERS, 'dynamic'].step_seconds / ran[INT4].step_seconds:.2f} of dynamic's speed"
        sentences.append(f"int4 holds {share:.0%} of the bytes{pace}.")
    if samples is not None and samples[0].seconds / samples[1].seconds >= LEAST_GAIN:
        sentences.append(
            f"{SAMPLES} samples of one prompt come {samples[0].seconds / samples[1].seconds:.1f} times as fast."
        )
    if answers is not None and answers.alone.seconds / answers.stored.seconds >= LEAST_GAIN:
        sentences.append(
            f"The first token of a second turn comes after {answers.stored.seconds:.2f} s: transformers takes "
            f"{answers.alone.seconds:.2f} s to read the chat again, or {answers.kept.seconds:.2f} s with its cache "
            "kept."
        )
    return (
        f"With kvlayers, {' '.join(sentences)}"
        if sentences
        else "At this length kvlayers changes little: try a longer --context."
    )


ROUNDED_OR_EVICTING = ("int8", "int4", "sink")
LIBRARIES = (TRANSFORMERS, KVLAYERS)
SAMPLES = 8
TOKENS_OF_SAMPLES = 16
PROMPT_OF_SAMPLES = 1024
"""Tokens: transformers reads them once for each sample, which would take minutes at 4k."""

LIMITS = ("80%", "60%", "40%")
QUESTION = "\n\nWhat is this text about? It is about"
STORE_BESIDE_A_KEPT_CACHE = (
    "A cache that is kept serves one chat of one process. A store also serves other chats that begin alike, several "
    "continuations of one chat, and from files, other processes and later runs."
)
NEXT = (
    "Next: `kvlayers bench` and `kvlayers fidelity` measure your own model, `kvlayers plan` shows how many bytes each "
    "cache will take, and docs/choosing.md helps to choose one."
)


def demo_contenders(model: Any, length: int) -> list[Contender]:
    """The caches that the demo shows. The first one, transformers' `DynamicCache`, is the reference.

    Args:
        model: a causal language model.
        length: the most tokens that a cache will hold. transformers' `StaticCache` reserves exactly as many.
    """
    names = [*exact_names(model.config), *ROUNDED_OR_EVICTING]
    others = [TRANSFORMERS_STATIC, *((KVLAYERS, name) for name in names)]
    contenders = [make_contender(library, name, model, length) for library, name in others]
    return [make_contender(TRANSFORMERS, "dynamic", model, length), *filter(is_supported, contenders)]


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """Records the time of each token. generate() copies each to the host first, so a GPU has finished computing it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompt, and then with every new token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""


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
    return Samples(seconds, cache_nbytes(models.in_output(output)))


def second_turn(model: Any, first: Tensor, question: Tensor, tokens: int) -> tuple[Tensor, Answers]:
    """Answer the second turn of a chat: again from its start, with transformers' cache of the first turn, from a store.

    Args:
        model: a causal language model.
        first: the prompt of the first turn, int64 `[1, tokens]`.
        question: what the second turn adds, int64 `[1, tokens]`.
        tokens: tokens of each answer.

    Returns:
        The chat up to the second answer, int64 `[1, tokens]`, and the second answers.
    """
    first = first.to(model.device)
    with_kvlayers = functools.partial(generate, model, prefix_store=PrefixStore(max_bytes="4GiB"))
    answered = with_kvlayers(first, **_options(first, tokens), do_sample=False)
    chat = torch.cat([answered, question.to(model.device)], dim=1)
    options = {**_options(chat, tokens), "min_new_tokens": tokens, "do_sample": False}
    kept = make_contender(TRANSFORMERS, "dynamic", model, chat.shape[1] + tokens).make()
    # As a call of generate() leaves it: its newest token was never fed back.
    newest_logits(model, answered[:, :-1], kept, 1)
    from_kept = {**options, models.name_in_generate(model): kept}
    alone = _answer(model.generate, chat, options)
    return chat, Answers(alone, _answer(model.generate, chat, from_kept), _answer(with_kvlayers, chat, options))


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


def _stream(console: Console, loaded: LoadedModel, ids: Tensor, prompt: str, context: int, tokens: int) -> None:
    model = loaded.model
    threads = f", torch threads: {torch.get_num_threads()}" if model.device.type == "cpu" else ""
    console.print(
        f"{loaded.name} in {str(model.dtype).removeprefix('torch.')} on {model.device}{threads}. "
        f"Prompt: {ids.shape[1]} tokens{f', {context} of them from the Python documentation' if context else ''}.\n",
        highlight=False,
    )
    console.print(
        prompt or "..." + loaded.tokenizer.decode(ids[0, -40:]),
        end="",
        style="dim",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = ids.to(model.device)
    cache = {models.name_in_generate(model): DynamicCache(config=model.config)}
    # It prints to stdout, which may be for JSON.
    with redirect_stdout(console.file):
        model.generate(ids, **_options(ids, tokens), do_sample=False, streamer=streamer, **cache)
    console.print()


def _compare(console: Console, loaded: LoadedModel, ids: Tensor, tokens: int, trials: int) -> list[ContenderResult]:
    # The last token is never fed back, so the cache holds one token less.
    contenders = demo_contenders(loaded.model, ids.shape[1] + tokens - 1)
    with bar_between_runs(console, trials * len(contenders), "Every cache on the same prompt") as begin:
        warm_up(loaded.model, ids, contenders)
        results = measure(
            loaded.model,
            ids,
            tokens - 1,
            trials,
            contenders,
            lambda contender, trial: begin(f"{contender.name}, trial {trial + 1}"),
            at_once=len(contenders),
        )
    if results[0].failure is not None:
        raise ReadingError(results[0].failure)
    console.print(table_of_caches(results))
    console.print(
        f"Prompt: the forward pass over {ids.shape[1]} tokens. Step: the forward pass over one more token, median of "
        f"{tokens - 1}{f', of {trials} trials' if trials > 1 else ''}, and half of the range of the middle ones; the "
        "caches take turns. transformers' static cache is given exactly the length that it needs. Held: bytes that the "
        "cache keeps alive. int8 and int4: 8 and 4 bits for each number in the cache; the weights of the model stay in "
        f"{str(loaded.model.dtype).removeprefix('torch.')}. KL: mean KL divergence of the predictions from "
        "DynamicCache's, in nats; that of exact caches is what another order of sums does in this dtype.",
        highlight=False,
    )
    if is_noisy(results):
        console.print(
            "The machine is busy: the same step takes very different times, so compare the caches on a quiet one.",
            style="yellow",
        )
    ties = max(result.ties for result in results if result.same_tokens)
    if ties:
        console.print(
            f"Same tokens, but for ties: at {ties} of {tokens} places two tokens are equally likely within the "
            "precision of the dtype, and attention that sums in another order picks the other one. --dtype float32 "
            "tells them apart.",
            highlight=False,
        )
    return results


def _limit(console: Console, model: Any, tokens: int) -> None:
    """Print what caches with a limit of bytes would hold."""
    table = Table("max_bytes", "what it holds", box=box.SIMPLE_HEAD)
    for limit in LIMITS:
        with contextlib.suppress(CapacityError):
            table.add_row(limit, plan(model, tokens, dtype=model.dtype, names=["dynamic"], max_bytes=limit).within)
    # Few tokens take less than what a limit leaves exact.
    if table.rows:
        console.print(table)


def _sample(console: Console, model: Any, ids: Tensor, tokens: int) -> tuple[Samples, Samples]:
    with bar_between_runs(console, len(LIBRARIES), f"{SAMPLES} samples of the prompt") as begin:
        found = []
        for library, call in zip(LIBRARIES, (model.generate, functools.partial(generate, model)), strict=True):
            begin(f"{SAMPLES} samples of the prompt, {library}")
            found.append(sample(call, ids.to(model.device), tokens, SAMPLES))
    console.print(table_of_samples(found[0], found[1], ids.shape[1]))
    return found[0], found[1]


def _second_turn(
    console: Console, model: Any, ids: Tensor, question: Tensor, tokens: int
) -> tuple[Answers | None, bool]:
    """The answers of both libraries, and whether they differ by more than a tie."""
    try:
        with bar_between_runs(console, 1, "A second turn") as begin:
            begin("A second turn")
            chat, answers = second_turn(model, ids, question, tokens)
    except KVLayersError as error:
        console.print(f"No second turn: {error}", markup=False, highlight=False)
        return None, False
    is_other = differs(model, chat, answers.alone.tokens, answers.stored.tokens)
    console.print(table_of_answers(answers, is_other))
    console.print(STORE_BESIDE_A_KEPT_CACHE, highlight=False)
    return answers, is_other


PROMPT = "Once upon a time, a programmer"
DEFAULT_CONTEXT = 4096


def real_text_ids(tokenizer: Any, tokens: int) -> list[int]:
    """The first `tokens` token ids of Python's documentation, which is repeated if it is too short.

    Raises:
        ConfigError: the tokenizer returns no tokens for English text.
    """
    ids: list[int] = []
    for index, topic in enumerate(itertools.cycle(topics.values())):
        if len(ids) >= tokens:
            break
        if index == len(topics) and not ids:
            raise ConfigError(
                "The tokenizer returns no tokens for English text: use the tokenizer of a model that reads English."
            )
        ids += tokenizer(topic, add_special_tokens=False).input_ids
    return ids[:tokens]


def input_ids(tokenizer: Any, prompt: str, context: int) -> Tensor:
    """Token ids, int64 `[1, tokens]`: the tokenizer's BOS token if any, `context` tokens of real text, and the prompt.

    Raises:
        OptionError: there is neither a prompt nor a context.
        ConfigError: the tokenizer returns no tokens for English text.
    """
    ids = real_text_ids(tokenizer, context)
    if prompt:
        ids += tokenizer(f"\n\n{prompt}" if context else prompt, add_special_tokens=False).input_ids
    if not ids:
        raise OptionError("Pass a prompt, or a `--context` of at least 1 token: got neither.")
    return torch.tensor([models.bos_ids(tokenizer) + ids])


def check_length(config: Any, tokens: int) -> None:
    """Raise `OptionError` if a model has no positions for `tokens` tokens."""
    most = models.most_positions(config)
    if most is not None and tokens > most:
        raise OptionError(
            f"Context, prompt and continuation together must be within the {most} positions of the model, got {tokens} "
            "tokens: pass a smaller `--context` or `--tokens`."
        )


def demo(
    prompt: Annotated[
        str | None,
        typer.Argument(help=f"Text to continue. Default: '{PROMPT}', after {DEFAULT_CONTEXT} tokens of context."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"Model directory, or name on the hub. Default: {HUB_NAME}."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Tokens of Python's documentation before the prompt. "
            f"Default: 0 with a prompt, {DEFAULT_CONTEXT} without.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens to generate.")] = 32,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each cache; the table shows medians.")] = 1,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="CPU threads. Default: torch's choice.")
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16, float16, or auto: bfloat16, but float32 on a CPU without bfloat16 instructions.",
        ),
    ] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: cuda if available, else cpu.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=FLAG, help="Print JSON on stdout, everything else on stderr.")
    ] = False,
) -> None:
    """Continue a text with a language model through every cache, sample continuations, and answer a second turn.

    Exits with 1 if an exact cache of kvlayers gives other tokens than transformers' DynamicCache (ties aside), and with
    2 if the input cannot be used.
    """
    if context is None:
        context = DEFAULT_CONTEXT if prompt is None else 0
    prompt = PROMPT if prompt is None else prompt
    with measuring("demo", NO_OPTIONS, as_json, threads) as console:
        loaded = load(console, find(console, model, device), dtype)
        ids = input_ids(loaded.tokenizer, prompt, context)
        question = loaded.tokenizer(QUESTION, add_special_tokens=False, return_tensors="pt").input_ids
        check_length(loaded.model.config, ids.shape[1] + 2 * tokens + question.shape[1])
        _stream(console, loaded, ids, prompt, context, tokens)
        results = _compare(console, loaded, ids, tokens, trials)
        _limit(console, loaded.model, ids.shape[1] + tokens)
        samples = _sample(console, loaded.model, ids[:, -PROMPT_OF_SAMPLES:], min(tokens, TOKENS_OF_SAMPLES))
        answers, is_other = _second_turn(console, loaded.model, ids, question, min(tokens, TOKENS_OF_SAMPLES))
        console.print(summary(results, samples, answers), style="bold", highlight=False)
        console.print(NEXT, highlight=False)
    if as_json:
        print_json(
            {
                "model": loaded.name,
                "prompt_tokens": ids.shape[1],
                "tokens": tokens,
                "caches": [plain_result(result) for result in results],
                "samples": {
                    library: {"seconds": each.seconds, "nbytes": each.nbytes, "samples": SAMPLES}
                    for library, each in zip(LIBRARIES, samples, strict=True)
                },
                "second_turn": answers,
            }
        )
    exact = [each for each in results if each.contender.library == KVLAYERS and each.contender.fidelity() == "exact"]
    if is_other or not all(result.failure is None and result.same_tokens for result in exact):
        raise typer.Exit(CHECK_FAILED)


if __name__ == "__main__":
    # What is measured must not depend on when a compiler is done.
    os.environ.setdefault("KVLAYERS_COMPILE", "wait")
    typer.run(demo)
