"""Compares decode steps of batches with kvlayers' and transformers' dynamic and static caches.

    python benchmarks/batches.py                       # batches of 1, 8 and 32 at 128 tokens, 8 at 1,024: some minutes
    python benchmarks/batches.py --cases 1x64,4x256    # other batches x tokens

All caches hold the same prompts and take turns step by step, in an order that rotates. A ratio compares two steps of
the same turn, and the figure is the median over all turns. Every step's tokens are compared with those from
transformers' DynamicCache: the exit code is 1 if a token differs by more than rounding explains. Run it on an idle
machine.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.tools.measuring.interleave import interleaved, quiet_clock
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, KVLAYERS_STATIC, REFERENCE, TRANSFORMERS_STATIC
from lib.timing import Disagreements
from lib.workload import Workload, default_model, real_workload

NAMES = (REFERENCE, TRANSFORMERS_STATIC, KVLAYERS, KVLAYERS_STATIC)

PROMISES = (
    # Cases, transformers' caches (the fastest one counts), kvlayers' cache, smallest ratio.
    (((1, 128), (8, 128), (32, 128)), (REFERENCE, TRANSFORMERS_STATIC), KVLAYERS, 0.98),
    (((1, 128), (8, 128), (32, 128)), (REFERENCE, TRANSFORMERS_STATIC), KVLAYERS_STATIC, 0.98),
    (((8, 128),), (REFERENCE,), KVLAYERS, 1.25),
    (((32, 128),), (REFERENCE,), KVLAYERS, 1.7),
    (((8, 1024),), (REFERENCE,), KVLAYERS, 1.5),
)
"""How many times as long a step with transformers' cache takes as a step with kvlayers' cache."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=_cases, default=_cases("1x128,8x128,32x128,8x1024"), help="batches x tokens")
    parser.add_argument("--model", default=default_model(), help="directory or hub name of the model")
    parser.add_argument("--text", type=pathlib.Path, help="what the model reads (the topics of Python's help)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--steps", type=int, default=32, help="decode steps in each trial (32)")
    parser.add_argument("--trials", type=int, default=3, help="trials (3)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/batches-<date>.json)")
    given = parser.parse_args(arguments)
    if given.model is None:
        parser.error("there is no model: set KVLAYERS_DEMO_MODEL, bring it with `make demo`, or pass --model")
    given.output = given.output or report.output_path("batches")
    return given


def _cases(text: str) -> list[tuple[int, int]]:
    return [(int(batch), int(tokens)) for batch, _, tokens in (case.partition("x") for case in text.split(","))]


def step(model: Any, cache: Any, tokens: Tensor) -> tuple[float, Tensor]:
    """One forward pass of a token of each sequence `[batch]`: its seconds, and its logits `[batch, vocab]`."""
    begin = time.perf_counter()
    logits: Tensor = model(input_ids=tokens[:, None], past_key_values=cache, use_cache=True).logits
    return time.perf_counter() - begin, logits[:, -1].float()


def measure(
    workload: Workload, batch: int, length: int, steps: int, trials: int, disagreements: Disagreements, tick: Any
) -> dict[str, list[float]]:
    """Seconds of each step by cache, in the order of turns."""
    model, config = workload.model, workload.model.config
    prompts = workload.prompt(batch * length).reshape(batch, length)
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for trial in range(trials):
        caches = {name: CONTENDERS[name](config, length + steps + 1) for name in NAMES}
        with quiet_clock():
            for cache in caches.values():
                logits = model(input_ids=prompts, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1].argmax(-1)
            for index in range(steps):
                seen = {}
                for name in interleaved(NAMES, trial + index):
                    took, seen[name] = step(model, caches[name], tokens)
                    # The first step of a case finds cold memory.
                    if index:
                        seconds[name].append(took)
                for name in NAMES:
                    where = {
                        "model": workload.name,
                        "cache": name,
                        "tokens": length + index,
                        "batch": batch,
                        "trial": trial,
                    }
                    for expected, row in zip(seen[REFERENCE], seen[name], strict=True):
                        disagreements.compare_step({**where, "trial": trial}, expected, row)
                tokens = seen[REFERENCE].argmax(-1)
        del caches
        tick()
    return seconds


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times as long a step with one cache takes as a step with another in the same turn: the median."""
    return statistics.median(one / other for one, other in zip(seconds[slow], seconds[fast], strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    given = parse(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    console = report.terminal()
    environment = report.environment()
    workload = real_workload(given.model, given.text, console.print, getattr(torch, given.dtype))
    if workload is None:
        return 1
    disagreements = Disagreements(getattr(torch, given.dtype))
    results: dict[str, Any] = {}
    with report.progress_bars(console) as progress:
        ticking = report.ticking_in(progress)
        for batch, length in given.cases:
            tick = ticking(f"batch {batch}, {length} tokens", given.trials)
            results[f"{batch}x{length}"] = measure(
                workload, batch, length, given.steps, given.trials, disagreements, tick
            )
    table = report.new_table(
        f"Decode steps of {workload.name} in {given.dtype}, ms", "batch x tokens, cache", "step", "times"
    )
    for case, seconds in results.items():
        for name in NAMES:
            median = f"{statistics.median(seconds[name]) * report.MILLI:.2f}"
            table.add_row(f"{case:>7} {name}", median, f"{ratio(seconds, REFERENCE, name):.2f}")
        table.add_section()
    console.print(table)
    promises = []
    for cases, baselines, name, least in PROMISES:
        for case in set(cases) & set(given.cases):
            seconds = results["{}x{}".format(*case)]
            for baseline in baselines:
                what = "{} x {}: step of {} over that of {}".format(*case, baseline, name)
                promises.append(report.promised(what, ratio(seconds, baseline, name), at_least=least))
    report.show_targets(console, promises)
    return report.finish(console, given, environment, results, promises, disagreements)


if __name__ == "__main__":
    sys.exit(main())
