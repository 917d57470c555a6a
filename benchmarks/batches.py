"""Compares decode steps of batches with kvlayers' and transformers' dynamic and static caches.

    python benchmarks/batches.py                       # batches of 1, 8 and 32 at 128 tokens, 8 at 1,024: some minutes
    python benchmarks/batches.py --cases 1x64,4x256    # other batches x tokens

All caches hold the same prompts and take turns step by step, in an order that rotates. A ratio compares two steps of
the same turn, and the figure is the median over all turns. Every step's tokens are compared with those from
transformers' DynamicCache: the exit code is 1 if a token differs by more than rounding explains. Run it on an idle
machine.
"""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, KVLAYERS_STATIC, REFERENCE, TRANSFORMERS_STATIC
from lib.timing import Disagreements
from lib.turns import Comparison, ratio
from lib.workload import Workload, real_workload

NAMES = (REFERENCE, TRANSFORMERS_STATIC, KVLAYERS, KVLAYERS_STATIC)


def options() -> report.Options:
    made = report.Options("batches", __doc__)
    made.sized("--cases", "1x128,8x128,32x128,8x1024", None, "batches x tokens", str)
    made.real_model()
    made.dtype("bfloat16")
    made.sized("--steps", 32, None, "decode steps in each trial")
    made.sized("--trials", 3, None, "trials")
    return made


def measure(
    workload: Workload, batch: int, length: int, steps: int, trials: int, disagreements: Disagreements, tick: Any
) -> dict[str, list[float]]:
    """Seconds of each step by cache, in the order of turns."""
    makers = {name: CONTENDERS[name] for name in NAMES}
    comparison = Comparison(workload, makers, NAMES, (batch, length), disagreements)
    for trial in range(trials):
        comparison.decode(steps, trial)
        tick()
    return comparison.turns.seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    given = options().parse(arguments)
    dtype = getattr(torch, given.dtype)
    results: dict[str, Any] = {}
    with report.session(given) as run:
        workload = real_workload(given.model, given.text, run.console.print, dtype)
        if workload is None:
            return 1
        disagreements = Disagreements(dtype)
        for batch, length in report.cases(given.cases):
            tick = run.ticking(f"batch {batch}, {length} tokens", given.trials)
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
    run.console.print(table)
    return run.finish(results, disagreements)


if __name__ == "__main__":
    sys.exit(main())
