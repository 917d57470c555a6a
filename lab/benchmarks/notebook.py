"""Measures the table from a notebook about KV caches: tokens a second and peak memory, without and with several caches.

    python lab/benchmarks/notebook.py                     # the demo model, or else a random one
    python lab/benchmarks/notebook.py --quick             # a small model, to see that it runs

All rows are whole greedy calls of `generate()` on one prompt, with kvlayers' and transformers' caches in one run. The
first call of each row compiles, if there is anything to compile; tokens/s are from the median of the later calls, which
take turns. Peak memory is the sum over every tensor beyond the model's, counted in a separate call. In compiled code it
cannot be counted.

The exit code is 1 if a token differs from the one with transformers' DynamicCache, except for ties in the model's
dtype.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from lib import report
from lib.compiled import GENERATORS, INDUCTOR, Job, measure_generate, nothing_in_memory, show_calls
from lib.contenders import KVLAYERS, KVLAYERS_STATIC, NO_CACHE, REFERENCE, TRANSFORMERS_STATIC, compiled
from lib.timing import summarise

STATIC = (TRANSFORMERS_STATIC, KVLAYERS_STATIC)
ROWS = (NO_CACHE, REFERENCE, KVLAYERS, *map(compiled, STATIC), *STATIC)


def options() -> report.Options:
    made = report.Options("notebook", __doc__, quick="a small model and few tokens")
    made.real_model()
    made.dtype("bfloat16")
    made.sized("--prompt", 50, 20, "tokens of the prompt")
    made.sized("--new", 200, 8, "tokens to generate")
    made.add("--reserve", type=int, help="tokens that static caches reserve (those of prompt and new)")
    made.sized("--trials", 5, 2, "calls of each that are timed after the first")
    made.sized("--backend", INDUCTOR, "eager", "of torch.compile", str)
    return made


def measure(run: report.Session) -> dict[str, Any]:
    given, dtype = run.given, getattr(torch, run.given.dtype)
    workload = run.real(dtype) or run.random(dtype=dtype)
    prompt = workload.prompt(given.prompt)
    job = Job(workload.name, workload.model, prompt, given.new, given.reserve, given.backend)
    tick = run.ticking(f"{job.name}, {job.new} tokens", len(ROWS) + given.trials)
    contenders = {name: GENERATORS[name] for name in (REFERENCE, *ROWS)}
    with nothing_in_memory(given.backend):
        found = summarise(measure_generate(job, contenders, given.trials, run.disagreements(dtype), tick, peaks=True))
    calls = {name: found[name] for name in ROWS}
    title = f"{job.name}, {given.dtype}: {job.new} tokens after {job.prompt_tokens}"
    show_calls(run, f"{title}, {job.reserve} reserved", calls)
    return calls


def main(arguments: Sequence[str] | None = None) -> int:
    made = options()
    given = made.parse(arguments)
    given.reserve = given.reserve or given.prompt + given.new
    if given.reserve < given.prompt + given.new:
        made.parser.error("--reserve must hold --prompt and --new")
    return report.run(given, {"calls": measure})


if __name__ == "__main__":
    sys.exit(main())
