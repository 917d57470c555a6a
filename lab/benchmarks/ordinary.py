"""Compares the ordinary case: decode steps of short contexts, and `generate()` under `kvlayers.install()`.

    python lab/benchmarks/ordinary.py                              # all of it, ten minutes on two idle cores
    python lab/benchmarks/ordinary.py --only steps --cases 1x128   # one section, one batch x tokens
    python lab/benchmarks/ordinary.py --quick                      # a small model, to see that it runs

`steps` decodes with quantized caches that still hold nearly all tokens in full precision. `generate` compares
`generate()` of plain transformers with the same call after `kvlayers.install()`, for a model of the shape of
SmolLM2-135M, and for one so small that its time is Python's. `claims.py` has batches, and `prompts.py` prompts.

The model of `steps` is a random llama with 8 layers in bfloat16. Caches take turns, in an order that rotates. Tokens of
exact caches are compared with those of transformers' DynamicCache: the exit code is 1 if they differ
by more than rounding explains. Run it on an idle machine.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, REFERENCE, Maker, packed
from lib.internals import quiet_clock
from lib.timing import Trials, Turns, measure_decode, summarise
from lib.workload import Shape

QUANTIZED: dict[str, Maker] = {f"kvlayers {nbits} bits": packed(nbits) for nbits in (8, 4, 2)}

EXACT: dict[str, Maker] = {name: CONTENDERS[name] for name in (REFERENCE, KVLAYERS)}

CASES = "1x128,8x128,1x1024,8x1024"
"""Batch x tokens of the steps."""

GENERATE_MODELS = {
    "SmolLM2-135M": Shape(layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=49_152),
    "4 layers of 64 channels": Shape(layers=4, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256),
}

ROUNDINGS = 4
"""Roundings of bfloat16 by which a logit may differ: attention adds up in another order in each of 8 layers."""


def options() -> report.Options:
    made = report.Options("ordinary", __doc__, quick="a small model, and few tokens")
    made.some_of("--only", ["steps", "generate"], "sections")
    made.sized("--cases", CASES, "1x64,2x96", "batches x tokens", str)
    made.sized("--steps", 48, 4, "decode steps with each cache")
    made.sized("--turns", 5, 3, "turns of generate")
    made.sized("--new-tokens", 128, 8, "tokens of each call of generate")
    return made


def steps(run: report.Session) -> dict[str, Any]:
    """Steps for each batch x tokens."""
    workload, exact = run.random(), run.disagreements(roundings_of=lambda name: ROUNDINGS)
    found = {}
    for case in run.given.cases.split(","):
        batch, tokens = map(int, case.split("x"))
        trials = Trials(run.given.steps, 1, run.ticking, block=1)
        found[case] = summarise(measure_decode(workload, {**EXACT, **QUANTIZED}, tokens, trials, batch=batch))
        # Quantized caches round by design.
        exact.found += [entry for entry in trials.disagreements.found if entry["cache"] == KVLAYERS]
    columns = {"ms": report.ms("median"), "of transformers'": lambda entry: f"{1 / entry['speed']:.3f}"}
    run.table("steps", "batch x tokens, cache", found, columns)
    return found


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

    def call(name: str) -> tuple[float, Tensor]:
        if name == "transformers":
            return generated()
        # Entering and leaving is no part of a call.
        with kvlayers.installed():
            return generated()

    same = True
    with quiet_clock():
        for turn in range(turns + 1):
            found = order.take_timed(call, turn > 0)
            same = same and torch.equal(found["transformers"], found["installed"])
    return {
        "seconds_per_token": {name: order.median(name) for name in order.seconds},
        "ratio": order.ratio("installed", "transformers"),
        "same_tokens": same,
    }


def generate(run: report.Session) -> dict[str, Any]:
    models: Mapping[str, Shape] = dict(list(GENERATE_MODELS.items())[-1 if run.quick else 0 :])
    found = {name: measure_generate(shape, run.given.new_tokens, run.given.turns) for name, shape in models.items()}
    columns: dict[str, report.Cell] = {
        f"{name}, ms": lambda entry, name=name: f"{entry['seconds_per_token'][name] * report.MILLI:.3f}"
        for name in ("transformers", "installed")
    }
    run.table("A token of generate()", "model", {"": found}, {**columns, "ratio": report.shown("ratio", ".3f")})
    for name, measured in found.items():
        run.expect(measured["same_tokens"], f"{name}: other tokens under install()")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    transformers.utils.logging.set_verbosity_error()
    return report.run(options().parse(arguments), {"steps": steps, "generate": generate})


if __name__ == "__main__":
    sys.exit(main())
