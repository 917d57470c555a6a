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

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

import kvlayers
from kvlayers.evaluation.engine import score_tokens
from kvlayers.evaluation.requests import ScoringRequest
from lib import report
from lib.internals import default_text, passages, quiet_clock
from lib.timing import Tick
from lib.turns import Turns
from lib.workload import QUICK_SHAPE, RandomModel, Workload, real_workload

TRANSFORMERS, KVLAYERS = "transformers, each pair alone", "kvlayers"
SECTIONS = ("choices", "questions")
MOST_APART = 1e-4
TARGETS = {"choices": 3.0, "questions": 5.0}

Run = list[ScoringRequest]


def options() -> report.Options:
    made = report.Options("scoring", __doc__, quick="a small random model, and short contexts")
    made.real_model()
    made.some_of("--only", SECTIONS, "sections")
    made.sized("--contexts", 50, 4, "contexts of `choices`")
    made.sized("--context", 1024, 48, "tokens of each of them")
    made.sized("--choices", 4, 4, "continuations of each of them")
    made.sized("--runs", 10, 2, "runs of `choices`")
    made.sized("--document", 3072, 96, "tokens of the document of `questions`")
    made.sized("--questions", 10, 10, "questions about it")
    made.sized("--trials", 3, 1, "runs of `questions`")
    made.sized("--batch", 16, 16, "continuations in one forward pass")
    return made


def pieces(workload: Workload, given: Any, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Token ids of `count` pieces of the text."""
    if given.quick:
        found = list(workload.prompt(count * tokens).split(tokens, dim=1))
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
        found = passages(tokenizer, given.text.read_text() if given.text else default_text(), count, tokens)
    return [tuple(ids[0].tolist()) for ids in found]


def choices(workload: Workload, given: Any) -> list[Run]:
    lengths = [8 + number % 4 for number in range(given.choices)]
    texts = pieces(workload, given, given.contexts, given.context + sum(lengths))
    runs: list[Run] = [[] for _ in range(min(given.runs, given.contexts))]
    for index, text in enumerate(texts):
        end = given.context
        for length in lengths:
            runs[index % len(runs)].append(ScoringRequest(text[: given.context], text[end : end + length]))
            end += length
    return runs


def questions(workload: Workload, given: Any) -> list[Run]:
    """Questions of 16 to 25 tokens behind one document, each with an answer of 8 tokens, as often as asked."""
    [text] = pieces(workload, given, 1, given.document + 33 * given.questions)
    found = []
    for number in range(given.questions):
        begin, length = given.document + 33 * number, 16 + number % 10
        question = text[begin : begin + length]
        found.append(ScoringRequest(text[: given.document] + question, text[begin + length : begin + length + 8]))
    return [found] * given.trials


def alone(model: Any, requests: Run, batch_size: int) -> list[float]:
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
    turns = Turns(WAYS)
    worst = {"apart": -1.0}
    for number, run in enumerate(runs):
        with quiet_clock():
            scores = turns.take(lambda name, run=run: WAYS[name](model, run, batch_size))
        tick()
        for request, (one, other) in enumerate(zip(scores[TRANSFORMERS], scores[KVLAYERS], strict=True)):
            if (apart := abs(one - other)) > worst["apart"]:
                worst = {"apart": apart, "run": number, "request": request, TRANSFORMERS: one, KVLAYERS: other}
    ratios = [one / other for one, other in zip(turns.seconds[TRANSFORMERS], turns.seconds[KVLAYERS], strict=True)]
    return {
        "requests": sum(map(len, runs)),
        "seconds": turns.seconds,
        "items_per_second": {
            name: statistics.median(len(run) / each for run, each in zip(runs, turns.seconds[name], strict=True))
            for name in WAYS
        },
        "times_as_fast": turns.ratio(TRANSFORMERS, KVLAYERS),
        "times_as_fast_spread": [min(ratios), max(ratios)],
        "most_apart": worst["apart"],
        "furthest_apart": worst,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    given = options().parse(arguments)
    results: dict[str, Any] = {}
    is_near = True
    with report.session(given) as run:
        workload: Workload | None = (
            RandomModel(QUICK_SHAPE, dtype=torch.float32)
            if given.quick
            else real_workload(given.model, given.text, run.console.print, torch.float32)
        )
        if workload is None:
            return 1
        for name, runs in {"choices": choices, "questions": questions}.items():
            if name in given.only:
                asked = runs(workload, given)
                found = results[name] = measure(workload.model, asked, given.batch, run.ticking(name, len(asked)))
                rows = {way: {"items": items} for way, items in found["items_per_second"].items()}
                columns = {"items per second": report.shown("items")}
                run.table(f"{name}: {found['requests']} continuations", "", {"": rows}, columns)
                run.console.print(f"times as fast: {report.span('times_as_fast')(found)}")
                run.target(f"{name}: times as fast", found["times_as_fast"], at_least=TARGETS[name])
                is_near = run.target(f"{name}: scores apart", found["most_apart"], at_most=MOST_APART) and is_near
    run.finish(results)
    return int(not is_near)


if __name__ == "__main__":
    sys.exit(main())
