"""Compares the scores of continuations that share contexts with those of each pair alone: time, and differences.

    python benchmarks/scoring.py                           # both sections: seven minutes on two idle cores
    python benchmarks/scoring.py --only choices --contexts 10
    python benchmarks/scoring.py --quick                   # a small random model: seconds, to see that it runs

choices: 4 continuations of each of 50 contexts of 1,024 tokens, as in a multiple-choice task.
questions: ten questions about one document of 3,072 tokens, each with one answer.

kvlayers computes what requests share once. transformers gets each pair alone, in one forward pass without a cache that
keeps the logits of the continuation only. Both take turns: a run of `choices` is `--contexts` divided by `--runs`
contexts, a run of `questions` is the whole section. The figures are medians over the runs. Float32, real text.

The exit code is 1 if scores differ by more than 1e-4.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from rich.console import Console

import kvlayers
from kvlayers.evaluation.engine import score_tokens
from kvlayers.evaluation.requests import ScoringRequest
from kvlayers.tools.measuring.interleave import interleaved, quiet_clock
from kvlayers.tools.measuring.text import default_text, passages
from lib import report
from lib.timing import Tick
from lib.workload import QUICK_SHAPE, RandomModel, Workload, default_model, real_workload
from record import without_single_times

TRANSFORMERS, KVLAYERS = "transformers, each pair alone", "kvlayers"
SECTIONS = ("choices", "questions")
MOST_APART = 1e-4
TARGETS = {"choices": 3.0, "questions": 5.0}
RECORDED = pathlib.Path(__file__).parent / "recorded"

Run = list[ScoringRequest]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=default_model(), help="directory or hub name")
    parser.add_argument("--text", type=pathlib.Path, help="what the model reads (the topics of Python's help)")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections ({','.join(SECTIONS)})")
    parser.add_argument("--contexts", type=int, help="contexts of `choices` (50)")
    parser.add_argument("--context", type=int, help="tokens of each of them (1024)")
    parser.add_argument("--choices", type=int, default=4, help="continuations of each of them (4)")
    parser.add_argument("--runs", type=int, help="runs of `choices` (10)")
    parser.add_argument("--document", type=int, help="tokens of the document of `questions` (3072)")
    parser.add_argument("--questions", type=int, default=10, help="questions about it (10)")
    parser.add_argument("--trials", type=int, help="runs of `questions` (3)")
    parser.add_argument("--batch", type=int, default=16, help="continuations in one forward pass (16)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/scoring-<date>.json)")
    parser.add_argument("--record", action="store_true", help="record the results in benchmarks/recorded")
    parser.add_argument("--quick", action="store_true", help="a small random model, and short contexts")
    given = parser.parse_args(arguments)
    given.only = given.only.split(",")
    if not set(given.only) <= set(SECTIONS):
        parser.error(f"`--only` takes {', '.join(SECTIONS)}, got {','.join(given.only)!r}.")
    if given.record and given.quick:
        parser.error("--record keeps what a full run measures: use it without --quick")
    given.contexts = given.contexts or (4 if given.quick else 50)
    given.context = given.context or (48 if given.quick else 1024)
    given.runs = given.runs or (2 if given.quick else 10)
    given.document = given.document or (96 if given.quick else 3072)
    given.trials = given.trials or (1 if given.quick else 3)
    given.output = given.output or report.output_path("scoring")
    return given


def pieces(workload: Workload, given: argparse.Namespace, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Token ids of `count` pieces of the text."""
    if given.quick:
        found = list(workload.prompt(count * tokens).split(tokens, dim=1))
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
        found = passages(tokenizer, given.text.read_text() if given.text else default_text(), count, tokens)
    return [tuple(ids[0].tolist()) for ids in found]


def choices(workload: Workload, given: argparse.Namespace) -> list[Run]:
    """Runs of contexts with several continuations of 8 to 11 tokens."""
    lengths = [8 + number % 4 for number in range(given.choices)]
    texts = pieces(workload, given, given.contexts, given.context + sum(lengths))
    runs: list[Run] = [[] for _ in range(min(given.runs, given.contexts))]
    for index, text in enumerate(texts):
        end = given.context
        for length in lengths:
            runs[index % len(runs)].append(ScoringRequest(text[: given.context], text[end : end + length]))
            end += length
    return runs


def questions(workload: Workload, given: argparse.Namespace) -> list[Run]:
    """Questions of 16 to 25 tokens behind one document, each with an answer of 8 tokens, as often as asked."""
    [text] = pieces(workload, given, 1, given.document + 33 * given.questions)
    found = []
    for number in range(given.questions):
        begin, length = given.document + 33 * number, 16 + number % 10
        question = text[begin : begin + length]
        found.append(ScoringRequest(text[: given.document] + question, text[begin + length : begin + length + 8]))
    return [found] * given.trials


def alone(model: Any, requests: Run, batch_size: int) -> list[float]:
    """Scores of each pair in a forward pass of its own."""
    found = []
    for context, continuation in requests:
        ids = torch.tensor([context + continuation])
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(continuation) + 1).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1)
        found.append(float(logprobs.gather(1, torch.tensor(continuation)[:, None]).sum()))
    return found


def together(model: Any, requests: Run, batch_size: int) -> list[float]:
    """The same scores, with what requests share computed once."""
    scores = score_tokens(model, requests, lambda: kvlayers.make_cache("dynamic", model), batch_size=batch_size)
    return [score.logprob for score in scores]


WAYS: dict[str, Callable[[Any, Run, int], list[float]]] = {TRANSFORMERS: alone, KVLAYERS: together}


def measure(model: Any, runs: Sequence[Run], batch_size: int, tick: Tick) -> dict[str, Any]:
    """Seconds of each run and way, medians, items per second, and the two scores that are furthest apart."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    worst = {"apart": -1.0}
    for turn, run in enumerate(runs):
        scores = {}
        for name in interleaved(list(WAYS), turn):
            with quiet_clock():
                begin = time.perf_counter()
                scores[name] = WAYS[name](model, run, batch_size)
                seconds[name].append(time.perf_counter() - begin)
            tick()
        for request, (one, other) in enumerate(zip(scores[TRANSFORMERS], scores[KVLAYERS], strict=True)):
            if (apart := abs(one - other)) > worst["apart"]:
                worst = {"apart": apart, "run": turn, "request": request, TRANSFORMERS: one, KVLAYERS: other}
    ratios = [one / other for one, other in zip(seconds[TRANSFORMERS], seconds[KVLAYERS], strict=True)]
    items = {
        name: statistics.median(len(run) / each for run, each in zip(runs, seconds[name], strict=True)) for name in WAYS
    }
    return {
        "requests": sum(map(len, runs)),
        "seconds": seconds,
        "items_per_second": items,
        "times_as_fast": statistics.median(ratios),
        "times_as_fast_spread": [min(ratios), max(ratios)],
        "most_apart": worst["apart"],
        "furthest_apart": worst,
    }


def show(console: Console, name: str, found: dict[str, Any]) -> None:
    table = report.new_table(f"{name}: {found['requests']} continuations", "", "items per second", "times as fast")
    for way, items in found["items_per_second"].items():
        times = report.span(found, "times_as_fast") if way == KVLAYERS else ""
        table.add_row(way, f"{items:.2f}", times)
    console.print(table)
    console.print(f"scores differ by {found['most_apart']:.2g} at most")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; the exit code is 1 if scores differ."""
    given = parse(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    console = report.terminal()
    environment = report.environment()
    workload: Workload | None = (
        RandomModel(QUICK_SHAPE, dtype=torch.float32)
        if given.quick
        else real_workload(given.model, given.text, console.print, torch.float32)
    )
    if workload is None:
        return 1
    results: dict[str, Any] = {}
    promises = []
    with report.progress_bars(console) as progress:
        for name, runs in {"choices": choices, "questions": questions}.items():
            if name not in given.only:
                continue
            asked = runs(workload, given)
            tick = report.ticking_in(progress)(name, len(asked) * len(WAYS))
            found = results[name] = measure(workload.model, asked, given.batch, tick)
            show(console, name, found)
            promises.append(report.promised(f"{name}: scores apart", found["most_apart"], at_most=MOST_APART))
            if not given.quick:
                speed = report.promised(f"{name}: times as fast", found["times_as_fast"], at_least=TARGETS[name])
                promises.append(speed)
    report.show_targets(console, promises)
    code = report.finish(console, given, environment, results, promises)
    if any(found["most_apart"] > MOST_APART for found in results.values()):
        return 1
    if given.record and not code:
        path = RECORDED / f"scoring-{datetime.date.today()}.json"
        path.write_text(json.dumps(without_single_times(json.loads(given.output.read_text())), indent=1) + "\n")
        console.print(f"recorded in {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
