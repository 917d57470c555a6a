"""Gives real models long-context tasks through many caches, and writes the tables of docs/choosing.md.

    python benchmarks/tasks.py --model DIR --model DIR --record  # measure, record, and write the page
    python benchmarks/tasks.py --write                           # write the record into the page, and measure nothing
    python benchmarks/tasks.py --model DIR --lengths 256 --samples 1 --tasks needle  # to see that it runs

Each model runs `kvlayers fidelity --tasks`, whose samples are seeded: the same versions give the same answers. Results
are written as they come, so a second start goes on where the first one stopped. The two models of docs/choosing.md took
20 minutes side by side, on a core each.
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
RESULTS, RECORDED = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "recorded"
CHOOSING = ROOT / "docs" / "choosing.md"
BEGIN, END = "<!-- tasks: written by benchmarks/tasks.py -->", "<!-- end of tasks -->"

CACHES = ("--bits", "8,fp8,4,2", "--name", "sink", "--against", "transformers")
"""The caches beside the exact one."""

KEPT = (
    "model", "dtype", "device", "date", "hardware", "versions", "text", "tasks", "lengths", "depths", "samples", "seed",
    "chunk", "caches",
)  # fmt: skip
"""What a record keeps of the JSON of the command, beside the summary. Single answers are left out."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="directory or hub name; several times for several")
    parser.add_argument("--tasks", default="all", help="separated by commas (all)")
    parser.add_argument("--lengths", default="1k,2k", help="tokens of context and question (1k,2k)")
    parser.add_argument("--depths", default="10,50,90", help="percent, separated by commas (10,50,90)")
    parser.add_argument("--samples", type=int, default=2, help="samples for each task, length and depth (2)")
    # The wordings of the tasks were chosen with seeds 0 and 1.
    parser.add_argument("--seed", type=int, default=2, help="seed of all random choices (2)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the models (bfloat16)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--record", action="store_true", help="record the figures, and write them into the page")
    parser.add_argument("--write", action="store_true", help="write the recorded figures into the page")
    return parser.parse_args(arguments)


def measure(model: str, given: argparse.Namespace) -> dict[str, Any]:
    """The record of one model."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    options = {
        "--tasks": given.tasks,
        "--lengths": given.lengths,
        "--depths": given.depths,
        "--samples": given.samples,
        "--seed": given.seed,
        "--dtype": given.dtype,
        "--threads": given.threads,
        "--results": RESULTS / f"tasks-{name_of(model)}.jsonl",
    }
    chosen = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
    command = [sys.executable, "-m", "kvlayers", "fidelity", model, *chosen, *CACHES, "--json"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE)
    # The exit code is 1 if a cache has failed, which the table shows.
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    found = json.loads(done.stdout)
    return {**{key: found[key] for key in KEPT}, "results": {"tasks": found["summary"]}}


def name_of(model: str) -> str:
    """The last part of a directory or hub name."""
    return pathlib.Path(model).name


def record(found: Mapping[str, Any]) -> pathlib.Path:
    """Keep the figures of one model, instead of an earlier record of it."""
    name = name_of(str(found["model"]))
    for earlier in RECORDED.glob(f"tasks-{name}-*.json"):
        earlier.unlink()
    path = RECORDED / f"tasks-{name}-{datetime.date.fromisoformat(str(found['date'])[:10])}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def recorded() -> list[dict[str, Any]]:
    """The records of all models, by name."""
    return [json.loads(path.read_text()) for path in sorted(RECORDED.glob("tasks-*.json"), key=lambda path: path.name)]


def tables(records: Sequence[Mapping[str, Any]]) -> str:
    """The tables of all models."""
    return "\n\n".join(table(each) for each in records)


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
        rows.append(f"| {' | '.join(cells)} |")
    hardware, versions = found["hardware"], found["versions"]
    spoken = ", ".join(f"{length:,}" for length in lengths)
    heading = [
        f"### {name_of(str(found['model']))}",
        "",
        f"Scores in percent at {spoken} tokens, {found['dtype']}, "
        f"{len(found['depths']) * found['samples']} samples for each task and length, seed {found['seed']}. "
        f"{hardware['cpu']}, torch {versions['torch']}, transformers {versions['transformers']}, {found['date'][:10]}.",
        "",
        f"| cache | {' | '.join(f'`{task}`' for task in found['tasks'])} | points lost | log-probability |",
        f"|---|{'---|' * (len(found['tasks']) + 2)}",
    ]
    return "\n".join([*heading, *rows, "", weakness(found)])


def label(cache: str, reference: str) -> str:
    """The cache as the table calls it."""
    if cache == reference:
        return "exact (`dynamic`)"
    library, _, name = cache.partition(" ")
    if library == "kvlayers":
        return f"`{name}`"
    backend, _, bits = name.partition(":")
    return f"transformers {backend}, {bits or 4} bits"


def weakness(found: Mapping[str, Any]) -> str:
    """Where the model is too weak for a task, in a sentence."""
    summary = found["results"]["tasks"]
    name = name_of(str(found["model"]))
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


def with_tables(page: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The page with the recorded tables between the two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(records)}\n\n{END}{rest.partition(END)[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, record and write what was asked for."""
    given = parse(arguments)
    if not given.model and not given.write:
        print("tasks.py: pass --model, once for each model, or --write.", file=sys.stderr)
        return 2
    for model in given.model:
        found = measure(model, given)
        print(table(found))
        if given.record:
            print(record(found))
    if given.record or given.write:
        CHOOSING.write_text(with_tables(CHOOSING.read_text(), recorded()))
        print(CHOOSING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
