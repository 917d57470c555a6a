"""Compares the ordinary case: short contexts, prefill, and `generate()` under `kvlayers.install()`.

    python benchmarks/ordinary.py                              # all of it, a quarter of an hour on two idle cores
    python benchmarks/ordinary.py --only steps --cases 1x128   # one section, one batch x tokens
    python benchmarks/ordinary.py --quick                      # a small model, to see that it runs

`steps` decodes with quantized caches that still hold nearly all tokens in full precision. `prefill` reads a prompt into
each kind of cache, more often if it is short. `generate` compares `generate()` of plain transformers with the same call
after `kvlayers.install()`, for a model of the shape of SmolLM2-135M, and for one so small that its time is Python's.

The model of the first two is a random llama with 8 layers in bfloat16. Caches take turns, in an order that rotates. A
ratio compares a cache with transformers' DynamicCache in the same turn, and the figure is the median over all turns.
Tokens of exact caches are compared with those of transformers' DynamicCache: the exit code is 1 if they differ by more
than rounding explains. Run it on an idle machine.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, KVLAYERS_STATIC, REFERENCE, Maker
from lib.internals import quiet_clock
from lib.timing import Disagreements
from lib.turns import Comparison, Turns
from lib.workload import QUICK_SHAPE, RandomModel, Shape

SECTIONS = ("steps", "prefill", "generate")

QUANTIZED: dict[str, Maker] = {
    f"kvlayers {nbits} bits": lambda config, length, nbits=nbits: kvlayers.QuantizedCache(config=config, nbits=nbits)
    for nbits in (8, 4, 2)
}

EXACT: dict[str, Maker] = {
    KVLAYERS: CONTENDERS[KVLAYERS],
    KVLAYERS_STATIC: CONTENDERS[KVLAYERS_STATIC],
    "kvlayers.SinkCache": lambda config, length: kvlayers.SinkCache(
        window_length=length, num_sink_tokens=4, config=config
    ),
}
"""Caches that give a prompt the attention that transformers' DynamicCache gives it."""

STEP_CASES = "1x128,8x128,1x1024,8x1024"
PREFILL_CASES = "1x128,8x128,32x128,1x1024,8x1024,1x4096,1x8192"

TOKENS_IN_ALL = 16_384
"""Tokens of the prompts that each cache reads at least, in at most `MOST_TURNS`."""

MOST_TURNS = 40

GENERATE_MODELS: dict[str, dict[str, int]] = {
    "SmolLM2-135M": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
    },
    "4 layers of 64 channels": {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}

ROUNDINGS = 4
"""Roundings of bfloat16 by which a logit may differ: attention adds up in another order in each of 8 layers."""

STEP, EXACT_PREFILL, PACKED_PREFILL, GENERATE = 1.05, 1.03, 1.06, 1.02
"""The time with a cache of kvlayers as a multiple of that with transformers' DynamicCache, at most."""


def options() -> report.Options:
    made = report.Options("ordinary", __doc__, quick="a small model, and few tokens")
    made.some_of("--only", SECTIONS, "sections")
    made.sized("--cases", None, "1x64,2x96", f"batches x tokens; {STEP_CASES}, of prefill {PREFILL_CASES}", str)
    made.sized("--steps", 48, 4, "decode steps with each cache")
    made.sized("--turns", 5, 3, "fewest turns of prefill, and turns of generate")
    made.sized("--new-tokens", 128, 8, "tokens of each call of generate")
    return made


def measure_generate(shape: dict[str, int], new_tokens: int, turns: int) -> dict[str, Any]:
    """Generate with plain transformers and under `install()` in turn, with a random llama in float32."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, eos_token_id=None)).eval()
    ids = torch.arange(16)[None]
    # Entering and leaving `installed` is no part of a call: the time of a turn is not used.
    order = Turns(("transformers", "installed"))
    timed: dict[str, list[float]] = {name: [] for name in order.seconds}

    def generated() -> tuple[float, Tensor]:
        begin = time.perf_counter()
        found = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        return (time.perf_counter() - begin) / new_tokens, found

    def run(name: str) -> tuple[float, Tensor]:
        if name == "transformers":
            return generated()
        with kvlayers.installed():
            return generated()

    same = True
    with quiet_clock():
        for turn in range(turns + 1):
            found = order.take(run)
            for name, (took, _) in found.items():
                timed[name] += [took] if turn else []
            same = same and torch.equal(found["transformers"][1], found["installed"][1])
    order.seconds = timed
    return {
        "seconds_per_token": {name: order.median(name) for name in timed},
        "ratio": order.ratio("installed", "transformers"),
        "same_tokens": same,
    }


def hold_to_targets(run: report.Session, results: dict[str, Any]) -> None:
    for case, measured in results["steps"].items():
        for name in QUANTIZED:
            run.target(f"step at {case}, {name}", measured[name]["ratio"], at_most=STEP)
    for case, measured in results["prefill"].items():
        for name, entry in measured.items():
            if name != REFERENCE:
                most = EXACT_PREFILL if name in EXACT else PACKED_PREFILL
                run.target(f"prefill of {case}, {name}", entry["ratio"], at_most=most)
    for name, measured in results["generate"].items():
        what = f"time per token of generate() under install(), {name}"
        run.target(what, measured["ratio"], at_most=GENERATE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    given = options().parse(arguments)
    transformers.utils.logging.set_verbosity_error()
    disagreements = Disagreements(roundings_of=lambda name: ROUNDINGS)
    reference = {REFERENCE: CONTENDERS[REFERENCE]}
    results: dict[str, Any] = {section: {} for section in SECTIONS}
    with report.session(given) as run:
        workload = RandomModel(QUICK_SHAPE if given.quick else Shape())
        if "steps" in given.only:
            makers = {**reference, KVLAYERS: EXACT[KVLAYERS], **QUANTIZED}
            for case in report.cases(given.cases or STEP_CASES):
                comparison = Comparison(workload, makers, [KVLAYERS], case, disagreements)
                comparison.decode(given.steps)
                results["steps"]["{}x{}".format(*case)] = comparison.ratios()
        if "prefill" in given.only:
            makers = {**reference, **EXACT, **QUANTIZED}
            for case in report.cases(given.cases or PREFILL_CASES):
                comparison = Comparison(workload, makers, list(EXACT), case, disagreements)
                more = 0 if given.quick else min(TOKENS_IN_ALL // comparison.prompts.numel(), MOST_TURNS)
                comparison.prefill(max(given.turns, more))
                results["prefill"]["{}x{}".format(*case)] = comparison.ratios()
        if "generate" in given.only:
            for name in list(GENERATE_MODELS)[-1:] if given.quick else GENERATE_MODELS:
                results["generate"][name] = measure_generate(GENERATE_MODELS[name], given.new_tokens, given.turns)
    for section in ("steps", "prefill"):
        table = report.new_table(f"{section}, {workload.name}", "batch x tokens, cache", "ms", "ratio")
        for case, measured in results[section].items():
            for name, entry in measured.items():
                table.add_row(f"{case:>7} {name}", f"{entry['median'] * report.MILLI:.2f}", f"{entry['ratio']:.3f}")
            table.add_section()
        run.console.print(table)
    hold_to_targets(run, results)
    failed = run.finish(results, disagreements)
    return failed or int(not all(measured["same_tokens"] for measured in results["generate"].values()))


if __name__ == "__main__":
    sys.exit(main())
