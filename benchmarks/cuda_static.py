"""Compiled decoding with static caches on a CUDA device: tokens and tokens/s beside transformers' StaticCache.

    python benchmarks/cuda_static.py --output results
    python benchmarks/cuda_static.py --output results --quick --device cpu   # a small model, to see that it runs

A random llama-like model of 1.1 billion parameters in bfloat16, one sequence, 1,024 tokens in the cache and 32,768
reserved. Decoding is timed in `generate()`, as the difference between calls for all new tokens and for one, and in a
loop around `torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)`. Contenders take turns; every graph
is compiled before the clock starts. It needs only kvlayers, its dependencies and triton.

The exit code is 1 if a token differs from the one with transformers' DynamicCache, except for ties in bfloat16.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import kvlayers
from kvlayers.tools.measuring.interleave import quiet_clock
from lib.compiling import INDUCTOR, Compiled, nothing_in_memory, options_of
from lib.contenders import COMPILED, CONTENDERS, KVLAYERS, KVLAYERS_STATIC, TRANSFORMERS_STATIC, compiled, is_compiled
from lib.generation import GENERATORS, SERVING, Job, measure_calls, measure_generate
from lib.timing import Disagreements, Forward, Tick
from lib.workload import QUICK_SHAPE, RandomModel, Shape

SHAPE = Shape(layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=32768)
TARGETS = {compiled(TRANSFORMERS_STATIC): 1.5, KVLAYERS: 4}
"""How many times as fast as each of these kvlayers' compiled static cache should be, at least."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for cuda_static.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--present", type=int, help="tokens of the prompt (1024)")
    parser.add_argument("--reserve", type=int, help="tokens that static caches reserve (32768)")
    parser.add_argument("--new", type=int, help="tokens to decode (256)")
    parser.add_argument("--trials", type=int, help="timed calls and loops of each contender (5)")
    parser.add_argument("--backend", help="of torch.compile (inductor; eager with --quick, which compiles no kernels)")
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens")
    given = parser.parse_args(arguments)
    quick = given.quick
    given.present = given.present or (32 if quick else 1024)
    given.reserve = given.reserve or (1024 if quick else 32768)
    given.new = given.new or (8 if quick else 256)
    given.trials = given.trials or (2 if quick else 5)
    given.backend = given.backend or ("eager" if quick else INDUCTOR)
    if given.new < 2 or given.present + given.new > given.reserve:
        parser.error("--new is at least 2, and --reserve holds --present and --new")
    if torch.device(given.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("this needs a CUDA device; --quick --device cpu shows on a CPU that it runs")
    return given


class Loop:
    """A greedy decode loop, with one cache for all calls. The steps after the prefill are timed."""

    def __init__(self, name: str, job: Job) -> None:
        self._job = job
        self._cache = CONTENDERS[name.removesuffix(COMPILED)](job.model.config, job.reserve)
        options = options_of(job.backend, "reduce-overhead")
        self._forward: Forward = Compiled(job.model, options) if is_compiled(name) else job.model

    @property
    def graphs(self) -> int:
        """The number of graphs compiled so far."""
        return self._forward.graphs if isinstance(self._forward, Compiled) else 0

    def __call__(self) -> tuple[float, list[int]]:
        """See `generation.Call`."""
        cache = self._cache
        cache.reset()
        with quiet_clock():
            output = self._job.model(input_ids=self._job.prompt, past_key_values=cache, logits_to_keep=1)
            tokens = [output.logits[:, -1:].argmax(-1)]
            # This waits for the work before the clock starts.
            tokens[0].item()
            begin = time.perf_counter()
            for _ in range(self._job.new - 1):
                torch.compiler.cudagraph_mark_step_begin()
                output = self._forward(input_ids=tokens[-1], past_key_values=cache, use_cache=True)
                tokens.append(output.logits[:, -1:].argmax(-1))
            found = torch.cat(tokens, dim=1)[0].tolist()
            seconds = time.perf_counter() - begin
        return seconds, found


def measure(job: Job, trials: int, disagreements: Disagreements) -> dict[str, Any]:
    """Time decoding in `generate()`, with the prefill subtracted, and in loops.

    Returns:
        `generate` and `loop`, each with the figures from `measure_calls` and `rates`, the tokens decoded per second in
        each trial. `generate` also has `prefill`, its seconds.
    """
    contenders = {name: GENERATORS[name] for name in SERVING}
    one_token = dataclasses.replace(job, new=1)
    prefills = measure_generate(one_token, contenders, trials, disagreements, ticking("prefill"))
    calls = measure_generate(job, contenders, trials, disagreements, ticking("generate"))
    loops = measure_calls(job, {name: Loop(name, job) for name in SERVING}, trials, disagreements, ticking("loop"))
    for name in SERVING:
        prefill = statistics.median(seconds for (seconds,) in prefills[name]["seconds"])
        calls[name]["prefill"] = prefill
        # The prefill gives the first token.
        calls[name]["rates"] = [(job.new - 1) / (seconds - prefill) for (seconds,) in calls[name]["seconds"]]
        loops[name]["rates"] = [(job.new - 1) / seconds for (seconds,) in loops[name]["seconds"]]
    return {"generate": calls, "loop": loops}


def ticking(what: str) -> Tick:
    """Print a line for each contender's first call, and for each trial."""
    count = itertools.count(1)
    return lambda: print(f"{what}: {next(count)}", flush=True)


def targets(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets for kvlayers' compiled static cache, and the medians of the trials' ratios."""
    found = []
    for where, calls in measured.items():
        for other, least in TARGETS.items():
            pairs = zip(calls[compiled(KVLAYERS_STATIC)]["rates"], calls[other]["rates"], strict=True)
            value = statistics.median(candidate / baseline for candidate, baseline in pairs)
            what = f"{where}, times as fast as {other}"
            found.append({"what": what, "asked": f">= {least}", "value": value, "met": value >= least})
    return found


def show(measured: dict[str, Any], promises: list[dict[str, Any]]) -> None:
    for where, calls in measured.items():
        columns = f"{'tokens/s':>9} {'range':>15} {'prefill ms':>10} {'graphs':>6} {'first s':>8} {'later graphs':>12}"
        print(f"{where:36} {columns}")
        for name, entry in calls.items():
            rates = entry["rates"]
            prefill = f"{entry['prefill'] * 1000:.1f}" if "prefill" in entry else ""
            print(
                f"{name:36} {statistics.median(rates):9.1f} {min(rates):7.1f}-{max(rates):7.1f} {prefill:>10} "
                f"{entry['graphs']:6} {entry['first']:8.2f} {entry['recompiles']:12}"
            )
    for promise in promises:
        verdict = "met" if promise["met"] else "missed"
        print(f"{verdict}: {promise['what']}: {promise['value']:.2f}, asked {promise['asked']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if tokens differ from the reference."""
    given = parse(arguments)
    workload = RandomModel(QUICK_SHAPE if given.quick else SHAPE)
    model, prompt = workload.model.to(given.device), workload.prompt(given.present).to(given.device)
    job = Job(workload.name, model, prompt, given.new, given.reserve, given.backend)
    disagreements = Disagreements()
    with nothing_in_memory(given.backend):
        measured = measure(job, given.trials, disagreements)
    # The targets are for the full model: a small model has other costs.
    promises = [] if given.quick else targets(measured)
    show(measured, promises)
    for entry in disagreements.found:
        print("tie" if entry["tie"] else "DISAGREEMENT", entry)
    result = {
        "device": torch.cuda.get_device_name() if prompt.is_cuda else given.device,
        "versions": {package.__name__: package.__version__ for package in (torch, transformers, kvlayers)},
        "arguments": {**vars(given), "output": str(given.output)},
        "parameters": model.num_parameters(),
        "buckets": job.buckets_reached(),
        "results": measured,
        "targets": promises,
        "disagreements": disagreements.found,
    }
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "cuda_static.json").write_text(json.dumps(result, indent=1))
    return 1 if disagreements.failures else 0


if __name__ == "__main__":
    sys.exit(main())
