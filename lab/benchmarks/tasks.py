"""Gives real models long-context tasks through many caches, and writes the tables of three pages.

    python lab/benchmarks/tasks.py --model DIR --model DIR --record  # measure, record, and write the page
    python lab/benchmarks/tasks.py --write                       # write the records into the pages, and measure nothing
    python lab/benchmarks/tasks.py --model DIR --lengths 256 --samples 1 --tasks needle  # to see that it runs

| caches | what they are | page |
|---|---|---|
| rounding | packed caches, a sink cache, and transformers' packed caches | docs/benchmarks.md |
| eviction | each rule at each part of the tokens, with even heads or not; some with 4 bits | docs/scores/eviction.md |
| recall | parts of the pages. The question is read token by token, as answers are | docs/scores/recall.md |

Each model runs `kvlayers fidelity --tasks`, whose samples are seeded: the same versions give the same answers. Results
are written as they come, so a second start goes on where the first one stopped. The two models of docs/benchmarks.md
took 20 minutes side by side, on a core each.
"""

import argparse
import datetime
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pages
from kvlayers.calls import is_registered, named_cache
from kvlayers.eviction import eviction_rule, eviction_rule_names
from kvlayers.options import tokens
from kvlayers_lab.tasks.summary import TaskOutcome, summarize
from lib import report
from pages import DOCS, RECORDED, markdown, measured_at, model_name, records_by_model

CACHES = ("--bits", "8,fp8,4,2", "--cache", "sink", "--against", "transformers")
"""The caches beside the exact one, of docs/benchmarks.md."""

KEPT_PARTS = (0.75, 0.5, 0.25)
PACKED_RULES = ("snapkv", "expected_attention", "keydiff")
"""The rules that are measured with 4 bits as well."""

PAGE_PARTS = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))
PAGE_TOKENS = 64


@dataclass(frozen=True)
class Run:
    """One run of the command.

    Attributes:
        lengths: tokens of context and question.
        arguments: what names the caches.
        called: for each name that the command gives to a cache, another name for the table, if it has one.
    """

    lengths: Sequence[int]
    arguments: Sequence[str]
    called: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskCaches:
    """Caches that stand in one table.

    Attributes:
        prefix: what the names of files begin with.
        page: the page with the table.
        lengths: usual lengths.
        runs: the runs of the command, from the lengths.
    """

    prefix: str
    page: pathlib.Path
    lengths: str
    runs: Callable[[Sequence[int]], list[Run]]


def as_arguments(names: Iterable[str]) -> list[str]:
    return [part for name in names for part in ("--cache", name)]


def eviction_names() -> list[str]:
    """Each rule at each part of the tokens, with and without budgets per head, and some with 4 bits as well."""
    found = []
    # A rule of another package is no name of a cache.
    for rule in filter(is_registered, eviction_rule_names()):
        for keep in KEPT_PARTS:
            found.append(f"{rule}:keep={keep}")
            # Heads that keep the same tokens keep as many.
            if not eviction_rule(rule).shares_heads:
                found.append(f"{rule}:keep={keep},per_head=false")
            if rule in PACKED_RULES:
                found.append(f"{rule}:keep={keep},quantization.nbits=4")
    return found


def recall_runs(lengths: Sequence[int]) -> list[Run]:
    """A run for each length, since a part of the pages is another number of them at each."""
    runs = []
    for length in lengths:
        called = {
            f"{name}:recall.pages={max(1, int(length * part / PAGE_TOKENS))}": f"{name}:part={part}"
            for name in ("recall", "int4")
            for part in PAGE_PARTS
        }
        runs.append(Run([length], [*as_arguments(called), "--question-chunk", "1"], called))
    return runs


CACHES_OF = {
    "rounding": TaskCaches("tasks", DOCS / "benchmarks.md", "1k,2k", lambda lengths: [Run(lengths, CACHES)]),
    "eviction": TaskCaches(
        "eviction-tasks",
        DOCS / "scores" / "eviction.md",
        "1k,2k,4k",
        lambda lengths: [Run(lengths, as_arguments(eviction_names()))],
    ),
    "recall": TaskCaches("recall-tasks", DOCS / "scores" / "recall.md", "1k,2k,4k", recall_runs),
}

KEPT = (
    "model", "dtype", "device", "date", "hardware", "versions", "text", "tasks", "lengths", "depths", "samples", "seed",
    "chunk", "caches",
)  # fmt: skip
"""What a record keeps of the JSON of the command, beside the summary. Single answers are left out."""

KEPT_OF_SUMMARY = ("reference", "too_weak_below", "too_weak", "overall", "comparable", "by_length")
"""What the tables are made from."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = pages.options(__doc__, written_pages)
    parser.add_argument("--model", action="append", default=[], help="directory or hub name; several times for several")
    parser.add_argument("--caches", choices=CACHES_OF, default="rounding", help="which caches (rounding)")
    parser.add_argument("--tasks", default="all", help="separated by commas (all)")
    parser.add_argument("--lengths", help="tokens of context and question (1k,2k; of eviction and recall also 4k)")
    parser.add_argument("--depths", default="10,50,90", help="percent, separated by commas (10,50,90)")
    parser.add_argument("--samples", type=int, default=2, help="samples for each task, length and depth (2)")
    # The wordings of the tasks were chosen with seeds 0 and 1.
    parser.add_argument("--seed", type=int, default=2, help="seed of all random choices (2)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the models (bfloat16)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--record", action="store_true", help="record the figures, and write them into the page")
    return parser.parse_args(arguments)


def measure(model: str, given: argparse.Namespace) -> dict[str, Any]:
    caches = CACHES_OF[given.caches]
    lengths = sorted({tokens(each, "--lengths") for each in (given.lengths or caches.lengths).split(",")})
    return merged([(run, printed_by(run, model, given)) for run in caches.runs(lengths)], lengths)


def printed_by(run: Run, model: str, given: argparse.Namespace) -> dict[str, Any]:
    report.RESULTS.mkdir(parents=True, exist_ok=True)
    options = {name: getattr(given, name) for name in ("tasks", "depths", "samples", "seed", "dtype", "threads")}
    options["lengths"] = ",".join(map(str, run.lengths))
    options["results"] = report.RESULTS / f"{CACHES_OF[given.caches].prefix}-{pathlib.Path(model).name}.jsonl"
    chosen = [part for name, value in options.items() if value is not None for part in (f"--{name}", value)]
    return report.fidelity(model, *chosen, *run.arguments)


def merged(printed: Sequence[tuple[Run, Mapping[str, Any]]], lengths: Sequence[int]) -> dict[str, Any]:
    """The record of several runs of one model, in which caches have the names of the table."""
    outcomes, caches = [], {}
    for run, found in printed:
        called = {f"kvlayers {asked}": f"kvlayers {name}" for asked, name in run.called.items()}
        for each in found["outcomes"]:
            outcomes.append(TaskOutcome(**{**each, "cache": called.get(each["cache"], each["cache"])}))
        for each in found["caches"]:
            name = called.get(each["name"], each["name"])
            # Of the longest context, which comes last.
            caches[name] = {**each, "name": name}
    first = printed[0][1]
    summary = summarize(outcomes, first["summary"]["reference"])
    kept = {key: first[key] for key in KEPT}
    plain = summary.plain()
    tabled = {key: plain[key] for key in KEPT_OF_SUMMARY}
    return {**kept, "lengths": list(lengths), "caches": list(caches.values()), "results": {"tasks": tabled}}


def record(found: Mapping[str, Any], prefix: str) -> pathlib.Path:
    """Keep the figures of one model, instead of an earlier record of it."""
    name = model_name(found)
    for earlier in RECORDED.glob(f"{prefix}-{name}-*.json"):
        earlier.unlink()
    path = RECORDED / f"{prefix}-{name}-{datetime.date.fromisoformat(str(found['date'])[:10])}.json"
    # An entry is a line: the tables of many caches have hundreds of them.
    lines = re.sub(r"\{[^{}\[\]]*\}", lambda entry: " ".join(entry[0].split()), json.dumps(found, indent=1))
    path.write_text(lines + "\n")
    return path


def table(found: Mapping[str, Any]) -> str:
    """The scores of one model: a row for each cache, and a column for each task with the score at each length."""
    summary, lengths = found["results"]["tasks"], found["lengths"]
    scores = {(each["cache"], each["task"], each["length"]): each["score"] for each in summary["by_length"]}
    weak = {tuple(each) for each in summary["too_weak"]}
    caches = [each["cache"] for each in summary["overall"]]

    def cell(cache: str, task: str) -> str:
        shown = []
        for length in lengths:
            score = scores[cache, task, length]
            figure = "-" if score is None else f"{100 * score:.0f}"
            shown.append(f"({figure})" if (task, length) in weak else figure)
        return " ".join(shown)

    losses = {each["cache"]: each for each in summary["comparable"]}
    overall = {each["cache"]: each for each in summary["overall"]}
    rows = []
    for cache in caches:
        # A model may be too weak for all tasks, and a cache may fail at every sample, or at all but one.
        loss, error = (losses.get(cache, {}).get(name) for name in ("loss", "loss_error"))
        lost = "" if cache == summary["reference"] or loss is None else f"{100 * loss:.1f}"
        lost += f" ± {100 * error:.1f}" if lost and error is not None else ""
        logprob = "-" if overall[cache]["logprob"] is None else f"{overall[cache]['logprob']:.2f}"
        named = label(cache, summary["reference"])
        if overall[cache]["failed"]:
            answered = overall[cache]["samples"]
            named += f", failed at {overall[cache]['failed']} of {answered + overall[cache]['failed']} samples"
        cells = [named, *(cell(cache, task) for task in found["tasks"]), lost, logprob]
        rows.append(cells)
    spoken = ", ".join(f"{length:,}" for length in lengths)
    samples = len(found["depths"]) * found["samples"]
    counted = "1 sample" if samples == 1 else f"{samples} samples"
    how = (
        f"Scores are percentages at {spoken} tokens. The model runs in {found['dtype']}, and each task has {counted} "
        f"of each length, with seed {found['seed']}. {measured_at(found)}."
    )
    head = ["cache", *(f"`{task}`" for task in found["tasks"]), "points lost", "log-probability"]
    return "\n\n".join([f"### {model_name(found)}", how, markdown(head, rows), weakness(found)])


def label(cache: str, reference: str) -> str:
    """The cache as the table calls it."""
    if cache == reference:
        return "exact (`dynamic`)"
    library, _, name = cache.partition(" ")
    if library == "kvlayers":
        return in_words(name)
    backend, _, bits = name.partition(":")
    return f"transformers {backend}, {bits or 4} bits"


def in_words(name: str) -> str:
    """A name of kvlayers with its options in words."""
    named = named_cache(name)
    options = {} if named is None else dict(named.options)
    words: dict[str, Callable[[Any], str]] = {
        "keep": lambda part: f"{part:g} kept",
        "per_head": lambda is_given: "" if is_given else "even heads",
        "quantization": lambda given: f"{given['nbits']} bits",
        "part": lambda part: f"{part} of the pages",
    }
    said = [words[option](value) for option, value in options.items()]
    return ", ".join([f"`{named.name if named is not None else name}`", *filter(None, said)])


def weakness(found: Mapping[str, Any]) -> str:
    """Where the model is too weak for a task, in a sentence."""
    summary = found["results"]["tasks"]
    name = model_name(found)
    limit = 100 * summary["too_weak_below"]
    if not summary["too_weak"]:
        return f"With the exact cache, {name} scores at least {limit:.0f} in every cell, so no cell is left out."
    by_task: dict[str, list[int]] = {}
    for task, length in summary["too_weak"]:
        by_task.setdefault(task, []).append(length)
    places = "; ".join(
        f"`{task}` at {', '.join(f'{length:,}' for length in lengths)} tokens" for task, lengths in by_task.items()
    )
    return (
        f"With the exact cache, {name} scores below {limit:.0f} in {places}. It is too weak for these: the scores in "
        "brackets say nothing about caches, and are not in the points lost."
    )


def written_pages() -> pages.Pages:
    found = {(caches.page, "tasks"): records_by_model(caches.prefix) for caches in CACHES_OF.values()}
    return pages.written("tasks", {place: "\n\n".join(map(table, records)) for place, records in found.items()})


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if not given.model:
        print("tasks.py: pass --model, once for each model, or --write.", file=sys.stderr)
        return 2
    for model in given.model:
        found = measure(model, given)
        print(table(found))
        if given.record:
            print(record(found, CACHES_OF[given.caches].prefix))
    if given.record:
        pages.write_pages(written_pages())
    return 0


if __name__ == "__main__":
    sys.exit(main())
