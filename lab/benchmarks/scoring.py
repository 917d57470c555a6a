"""Compares the scores of continuations that share contexts with those of each pair alone: time, and differences.

    python lab/benchmarks/scoring.py                           # both sections: seven minutes on two idle cores
    python lab/benchmarks/scoring.py --only choices --contexts 10
    python lab/benchmarks/scoring.py --quick                   # a small random model: seconds, to see that it runs

choices: 4 continuations of each of 50 contexts of 1,024 tokens, as in a multiple-choice task.
questions: ten questions about one document of 3,072 tokens, each with one answer.

kvlayers computes what requests share once. transformers gets each pair alone, in one forward pass without a cache that
keeps the logits of the continuation only. Both take turns: a run of `choices` is `--contexts` divided by `--runs`
contexts, a run of `questions` is the whole section. The figures are medians over the runs. Float32, real text.

The exit code is 1 if scores differ by more than 1e-4.
"""

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

import kvlayers
from kvlayers_lab.evaluation.engine import score_tokens
from kvlayers_lab.evaluation.requests import ScoringRequest
from lib import report
from lib.internals import default_text, passages, quiet_clock
from lib.timing import Turns

TRANSFORMERS, KVLAYERS = "transformers, each pair alone", "kvlayers"
SECTIONS = ("choices", "questions")
MOST_APART = 1e-4

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


def pieces(workload: Any, given: Any, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Token ids of `count` pieces of the text."""
    if given.quick:
        found = list(workload.prompt(count * tokens).split(tokens, dim=1))
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
        found = passages(tokenizer, given.text.read_text() if given.text else default_text(), count, tokens)
    return [tuple(ids[0].tolist()) for ids in found]


def choices(workload: Any, given: Any) -> list[Run]:
    lengths = [8 + number % 4 for number in range(given.choices)]
    texts = pieces(workload, given, given.contexts, given.context + sum(lengths))
    runs: list[Run] = [[] for _ in range(min(given.runs, given.contexts))]
    for index, text in enumerate(texts):
        end = given.context
        for length in lengths:
            runs[index % len(runs)].append(ScoringRequest(text[: given.context], text[end : end + length]))
            end += length
    return runs


def questions(workload: Any, given: Any) -> list[Run]:
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


def measure(run: report.Session, name: str, runs_of: Callable[[Any, Any], list[Run]]) -> dict[str, Any]:
    """Seconds of each run and way, items per second, and how far scores are apart."""
    workload = run.random(dtype=torch.float32) if run.quick else run.real(torch.float32)
    if workload is None:
        raise SystemExit(report.NO_MODEL)
    runs, turns, apart = runs_of(workload, run.given), Turns(WAYS), 0.0
    tick = run.ticking(name, len(runs))
    for requests in runs:
        with quiet_clock():
            scores = turns.take(lambda way, requests=requests: WAYS[way](workload.model, requests, run.given.batch))
        tick()
        apart = max(apart, *(abs(one - other) for one, other in zip(*scores.values(), strict=True)))
    ratios = [one / other for one, other in zip(turns.seconds[TRANSFORMERS], turns.seconds[KVLAYERS], strict=True)]
    rows = {
        way: {"items": statistics.median(len(each) / took for each, took in zip(runs, turns.seconds[way], strict=True))}
        for way in WAYS
    }
    rows[KVLAYERS] |= {"times": statistics.median(ratios), "times_spread": [min(ratios), max(ratios)]}
    requests = sum(map(len, runs))
    times = report.span("times")
    columns: dict[str, report.Cell] = {"items per second": report.shown("items")}
    columns["times as fast"] = lambda row: times(row) if "times" in row else ""
    run.table(f"{name}: {requests} continuations, at most {apart:.1e} apart", "", {"": rows}, columns)
    run.expect(apart <= MOST_APART, f"{name}: scores are {apart:.1e} apart")
    return {"requests": requests, "seconds": turns.seconds, "rows": rows, "most_apart": apart}


def main(arguments: Sequence[str] | None = None) -> int:
    sections = {"choices": choices, "questions": questions}
    measures = {name: functools.partial(measure, name=name, runs_of=made) for name, made in sections.items()}
    return report.run(options().parse(arguments), measures)


if __name__ == "__main__":
    sys.exit(main())
