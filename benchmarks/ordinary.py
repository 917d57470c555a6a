"""Compares the ordinary case: short contexts, batches, prefill, and `generate()` under `kvlayers.install()`.

    python benchmarks/ordinary.py                              # all of it, twenty minutes on two idle cores
    python benchmarks/ordinary.py --only steps --cases 1x128   # one section, one batch x tokens
    python benchmarks/ordinary.py --quick                      # a small model, to see that it runs

`steps` decodes with quantized caches that still hold nearly all tokens in full precision. `batches` decodes with
dynamic and static caches on a real model. `prefill` reads a prompt into each kind of cache, more often if it is short.
`generate` compares `generate()` of plain transformers with the same call after `kvlayers.install()`, for a model of the
shape of SmolLM2-135M, and for one so small that its time is Python's.

The model of `steps` and `prefill` is a random llama with 8 layers in bfloat16. Caches take turns, in an order that
rotates. A ratio compares a cache with transformers' DynamicCache in the same turn, and the figure is the median over
all turns. Tokens of exact caches are compared with those of transformers' DynamicCache: the exit code is 1 if they
differ by more than rounding explains. Run it on an idle machine.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, KVLAYERS_STATIC, REFERENCE, TRANSFORMERS_STATIC, Maker, packed
from lib.internals import quiet_clock
from lib.timing import Disagreements
from lib.turns import Comparison, Turns
from lib.workload import QUICK_SHAPE, RandomModel, Shape, Workload, real_workload

QUANTIZED: dict[str, Maker] = {f"kvlayers {nbits} bits": packed(nbits) for nbits in (8, 4, 2)}

EXACT: dict[str, Maker] = {
    KVLAYERS: CONTENDERS[KVLAYERS],
    KVLAYERS_STATIC: CONTENDERS[KVLAYERS_STATIC],
    "kvlayers.SinkCache": lambda config, length: kvlayers.SinkCache(
        window_length=length, num_sink_tokens=4, config=config
    ),
}
"""Caches that give a prompt the attention that transformers' DynamicCache gives it."""

IN_BATCHES = (REFERENCE, TRANSFORMERS_STATIC, KVLAYERS, KVLAYERS_STATIC)

CASES = {
    "steps": "1x128,8x128,1x1024,8x1024",
    "batches": "1x128,8x128,32x128,8x1024",
    "prefill": "1x128,8x128,32x128,1x1024,8x1024,1x4096,1x8192",
}
"""Batch x tokens of each section."""

TOKENS_IN_ALL = 16_384
"""Tokens of the prompts that each cache reads at least, in at most `MOST_TURNS`."""

MOST_TURNS = 40

GENERATE_MODELS = {
    "SmolLM2-135M": Shape(layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=49_152),
    "4 layers of 64 channels": Shape(layers=4, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256),
}

ROUNDINGS = 4
"""Roundings of bfloat16 by which a logit may differ: attention adds up in another order in each of 8 layers."""

STEP, EXACT_PREFILL, PACKED_PREFILL, GENERATE = 1.05, 1.03, 1.06, 1.02
"""The time with a cache of kvlayers as a multiple of that with transformers' DynamicCache, at most."""

BATCHES = (
    # Cases, transformers' caches (the fastest one counts), kvlayers' cache, smallest ratio.
    (("1x128", "8x128", "32x128"), (REFERENCE, TRANSFORMERS_STATIC), KVLAYERS, 0.98),
    (("1x128", "8x128", "32x128"), (REFERENCE, TRANSFORMERS_STATIC), KVLAYERS_STATIC, 0.98),
    (("8x128",), (REFERENCE,), KVLAYERS, 1.25),
    (("32x128",), (REFERENCE,), KVLAYERS, 1.7),
    (("8x1024",), (REFERENCE,), KVLAYERS, 1.5),
)
"""How many times as long a step with transformers' cache takes as a step with kvlayers' cache."""


def options() -> report.Options:
    made = report.Options("ordinary", __doc__, quick="a small model, and few tokens")
    made.some_of("--only", [*CASES, "generate"], "sections")
    made.sized("--cases", None, "1x64,2x96", f"batches x tokens; {'; '.join(CASES.values())}", str)
    made.sized("--steps", None, 4, "decode steps in each trial with each cache; 48, in batches 32")
    made.sized("--trials", 3, 1, "trials of batches")
    made.sized("--turns", 5, 3, "fewest turns of prefill, and turns of generate")
    made.sized("--new-tokens", 128, 8, "tokens of each call of generate")
    made.real_model("directory or hub name of the model of batches", "none")
    made.dtype("bfloat16")
    return made


def measure_batch(
    workload: Workload, case: tuple[int, int], steps: int, trials: int, disagreements: Disagreements
) -> Comparison:
    makers = {name: CONTENDERS[name] for name in IN_BATCHES}
    comparison = Comparison(workload, makers, IN_BATCHES, case, disagreements)
    for trial in range(trials):
        comparison.decode(steps, trial)
    return comparison


def measure_generate(shape: Shape, new_tokens: int, turns: int) -> dict[str, Any]:
    """Generate with plain transformers and under `install()` in turn, with a random llama in float32."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(shape.config(2048, eos_token_id=None)).eval()
    ids = torch.arange(16)[None]
    order = Turns(("transformers", "installed"))

    def generated() -> tuple[float, Tensor]:
        begin = time.perf_counter()
        found = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        return (time.perf_counter() - begin) / new_tokens, found

    def run(name: str) -> tuple[float, Tensor]:
        if name == "transformers":
            return generated()
        # Entering and leaving is no part of a call.
        with kvlayers.installed():
            return generated()

    same = True
    with quiet_clock():
        for turn in range(turns + 1):
            found = order.take_timed(run, turn > 0)
            same = same and torch.equal(found["transformers"], found["installed"])
    return {
        "seconds_per_token": {name: order.median(name) for name in order.seconds},
        "ratio": order.ratio("installed", "transformers"),
        "same_tokens": same,
    }


class Sections:
    """The sections of a run, and their bounds."""

    def __init__(self, run: report.Session) -> None:
        self.run, self.given = run, run.given
        self.random = RandomModel(QUICK_SHAPE if run.given.quick else Shape())
        dtype = getattr(torch, run.given.dtype)
        self.disagreements = Disagreements(roundings_of=lambda name: ROUNDINGS), Disagreements(dtype)

    def _by_case(self, section: str, measure: Callable[[tuple[int, int]], Comparison]) -> dict[str, Any]:
        return {
            "{}x{}".format(*case): measure(case).ratios() for case in report.cases(self.given.cases or CASES[section])
        }

    def steps(self) -> dict[str, Any]:

        def measure(case: tuple[int, int]) -> Comparison:
            makers = {REFERENCE: CONTENDERS[REFERENCE], KVLAYERS: EXACT[KVLAYERS], **QUANTIZED}
            comparison = Comparison(self.random, makers, [KVLAYERS], case, self.disagreements[0])
            comparison.decode(self.given.steps or 48)
            return comparison

        found = self._by_case("steps", measure)
        for case, measured in found.items():
            for name in QUANTIZED:
                self.run.target(f"step at {case}, {name}", measured[name]["ratio"], at_most=STEP)
        return found

    def batches(self) -> dict[str, Any]:
        given, dtype = self.given, getattr(torch, self.given.dtype)
        if given.quick:
            workload: Workload | None = RandomModel(QUICK_SHAPE, dtype=dtype)
        else:
            workload = real_workload(given.model, given.text, self.run.console.print, dtype)
        if workload is None:
            return {}

        def measure(case: tuple[int, int]) -> Comparison:
            comparison = measure_batch(workload, case, given.steps or 32, given.trials, self.disagreements[1])
            for cases, baselines, name, least in BATCHES:
                for baseline in baselines if "{}x{}".format(*case) in cases else ():
                    what = "{} x {}: step of {} over that of {}".format(*case, baseline, name)
                    self.run.target(what, comparison.turns.ratio(baseline, name), at_least=least)
            return comparison

        return self._by_case("batches", measure)

    def prefill(self) -> dict[str, Any]:

        def measure(case: tuple[int, int]) -> Comparison:
            makers = {REFERENCE: CONTENDERS[REFERENCE], **EXACT, **QUANTIZED}
            comparison = Comparison(self.random, makers, list(EXACT), case, self.disagreements[0])
            more = 0 if self.given.quick else min(TOKENS_IN_ALL // comparison.prompts.numel(), MOST_TURNS)
            comparison.prefill(max(self.given.turns, more))
            return comparison

        found = self._by_case("prefill", measure)
        for case, measured in found.items():
            for name, entry in measured.items():
                if name != REFERENCE:
                    most = EXACT_PREFILL if name in EXACT else PACKED_PREFILL
                    self.run.target(f"prefill of {case}, {name}", entry["ratio"], at_most=most)
        return found

    def generate(self) -> dict[str, Any]:
        models = list(GENERATE_MODELS)[-1:] if self.given.quick else GENERATE_MODELS
        found = {
            name: measure_generate(GENERATE_MODELS[name], self.given.new_tokens, self.given.turns) for name in models
        }
        for name, measured in found.items():
            what = f"time per token of generate() under install(), {name}"
            self.run.target(what, measured["ratio"], at_most=GENERATE)
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = options().parse(arguments)
    transformers.utils.logging.set_verbosity_error()
    with report.session(given) as run:
        sections = Sections(run)
        results = {name: getattr(sections, name)() if name in given.only else {} for name in (*CASES, "generate")}
    columns = {"ms": report.ms("median"), "ratio": report.shown("ratio", ".3f")}
    for name in filter(results.get, CASES):
        run.table(name, "batch x tokens, cache", results[name], columns)
    failed = run.finish(results, *sections.disagreements)
    return failed or int(not all(measured["same_tokens"] for measured in results["generate"].values()))


if __name__ == "__main__":
    sys.exit(main())
