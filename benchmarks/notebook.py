"""Measures the table from a notebook about KV caches: tokens a second and peak memory, without and with several caches.

    python benchmarks/notebook.py                     # the demo model, or else a random one, on the CPU
    python benchmarks/notebook.py --device cuda       # on a CUDA device
    python benchmarks/notebook.py --model DIR_OR_HUB  # another model; 'none' for the random one
    python benchmarks/notebook.py --quick             # a small model, to see that it runs

All rows are whole greedy calls of `generate()` on one prompt, with kvlayers' and transformers' caches in one run. The
first call of each row compiles, if there is anything to compile; tokens/s are from the median of the later calls, which
take turns. Peak memory is the memory beyond the model's: on CUDA as the allocator reports it; on a CPU the sum over
every tensor in eager code, counted in a separate call. In compiled code on a CPU it cannot be counted.

The exit code is 1 if a token differs from the one with transformers' DynamicCache, except for ties in the model's
dtype.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

import torch

from lib import report
from lib.compiling import INDUCTOR, nothing_in_memory
from lib.contenders import KVLAYERS, KVLAYERS_STATIC, NO_CACHE, REFERENCE, TRANSFORMERS_STATIC, compiled
from lib.generation import GENERATORS, Job, measure_generate
from lib.static_report import calls_table
from lib.timing import Disagreements
from lib.workload import QUICK_SHAPE, RandomModel, Shape, Workload, default_model, real_workload

ROWS = (
    NO_CACHE,
    REFERENCE,
    KVLAYERS,
    compiled(TRANSFORMERS_STATIC),
    compiled(KVLAYERS_STATIC),
    TRANSFORMERS_STATIC,
    KVLAYERS_STATIC,
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="directory or hub name of a real model; 'none' for a random one")
    parser.add_argument("--text", type=pathlib.Path, help="whose beginning is the prompt (the topics of Python's help)")
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda (cpu)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the model")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt (50)")
    parser.add_argument("--new", type=int, help="tokens to generate (200)")
    parser.add_argument("--reserve", type=int, help="tokens that static caches reserve (those of prompt and new)")
    parser.add_argument("--trials", type=int, help="calls of each that are timed after the first (5)")
    parser.add_argument("--backend", help="of torch.compile (inductor; eager with --quick, which compiles no kernels)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/notebook-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens")
    given = parser.parse_args(arguments)
    quick = given.quick
    given.prompt = given.prompt or (20 if quick else 50)
    given.new = given.new or (8 if quick else 200)
    given.reserve = given.reserve or given.prompt + given.new
    if given.reserve < given.prompt + given.new:
        parser.error("--reserve must hold --prompt and --new")
    given.trials = given.trials or (2 if quick else 5)
    given.backend = given.backend or ("eager" if quick else INDUCTOR)
    given.model = given.model or ("none" if quick else default_model())
    given.output = given.output or report.output_path("notebook")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if tokens differ from the reference."""
    given = parse(arguments)
    console = report.terminal()
    if given.threads:
        torch.set_num_threads(given.threads)
    environment = report.environment()
    dtype = getattr(torch, given.dtype)
    workload: Workload | None = real_workload(given.model, given.text, console.print, dtype)
    if workload is None:
        workload = RandomModel(QUICK_SHAPE if given.quick else Shape(), dtype=dtype)
    model, prompt = workload.model.to(given.device), workload.prompt(given.prompt).to(given.device)
    job = Job(workload.name, model, prompt, given.new, given.reserve, given.backend)
    disagreements = Disagreements(dtype)
    with report.progress_bars(console) as progress, nothing_in_memory(given.backend):
        tick = report.ticking_in(progress)(f"{job.name}, {job.new} tokens", len(ROWS) + given.trials)
        contenders = {name: GENERATORS[name] for name in (REFERENCE, *ROWS)}
        measured = measure_generate(job, contenders, given.trials, disagreements, tick, peaks=True)
    calls = {name: measured[name] for name in ROWS}
    report.summarise(calls)
    title = f"{job.name}, {given.dtype} on {given.device}: {job.new} tokens after {job.prompt_tokens}"
    console.print(calls_table(f"{title}, {job.reserve} reserved", calls))
    return report.finish(console, given, environment, {"model": job.name, "calls": calls}, [], disagreements)


if __name__ == "__main__":
    sys.exit(main())
