"""Compares the ordinary case: short contexts, batches, prefill, and `generate()` under `kvlayers.install()`.

    python lab/benchmarks/ordinary.py                              # all of it, twenty minutes on two idle cores
    python lab/benchmarks/ordinary.py --only steps --cases 1x128   # one section, one batch x tokens
    python lab/benchmarks/ordinary.py --quick                      # a small model, to see that it runs

`steps` decodes with quantized caches that still hold nearly all tokens in full precision. `batches` decodes with
dynamic and static caches on a real model. `prefill` reads a prompt into each kind of cache, more often if it is short.
`generate` compares `generate()` of plain transformers with the same call after `kvlayers.install()`, for a model of the
shape of SmolLM2-135M, and for one so small that its time is Python's.

The model of `steps` and `prefill` is a random llama with 8 layers in bfloat16. Caches take turns, in an order that
rotates. Tokens of exact caches are compared with those of transformers' DynamicCache: the exit code is 1 if they differ
by more than rounding explains. Run it on an idle machine.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, KVLAYERS_STATIC, REFERENCE, TRANSFORMERS_STATIC, Maker, packed
from lib.internals import quiet_clock
from lib.timing import Measured, Trials, Turns, measure_decode, measure_prefill, summarise
from lib.workload import Shape

QUANTIZED: dict[str, Maker] = {f"kvlayers {nbits} bits": packed(nbits) for nbits in (8, 4, 2)}

EXACT: dict[str, Maker] = {
    REFERENCE: CONTENDERS[REFERENCE],
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


def options() -> report.Options:
    made = report.Options("ordinary", __doc__, quick="a small model, and few tokens")
    made.some_of("--only", [*CASES, "generate"], "sections")
    made.sized("--cases", None, "1x64,2x96", f"batches x tokens; {'; '.join(CASES.values())}", str)
    made.sized("--steps", None, 4, "decode steps in each trial with each cache; 48, in batches 32")
    made.sized("--trials", 3, 1, "trials of batches")
    made.sized("--turns", 5, 3, "fewest turns of prefill, and turns of generate")
    made.sized("--new-tokens", 128, 8, "tokens of each call of generate")
    made.real_model()
    made.dtype("bfloat16")
    return made


def by_case(run: report.Session, section: str, measure: Callable[[int, int], Measured]) -> dict[str, Measured]:
    """What is measured for each batch x tokens, and its table."""
    cases = (case.split("x") for case in (run.given.cases or CASES[section]).split(","))
    found = {"x".join(case): summarise(measure(*map(int, case))) for case in cases}
    columns = {"ms": report.ms("median"), "of transformers'": lambda entry: f"{1 / entry['speed']:.3f}"}
    run.table(section, "batch x tokens, cache", found, columns)
    return found


def steps(run: report.Session) -> dict[str, Any]:
    workload, exact = run.random(), run.disagreements(roundings_of=lambda name: ROUNDINGS)
    makers = {REFERENCE: EXACT[REFERENCE], KVLAYERS: EXACT[KVLAYERS], **QUANTIZED}

    def measure(batch: int, tokens: int) -> Measured:
        trials = Trials(run.given.steps or 48, 1, run.ticking, block=1)
        measured = measure_decode(workload, makers, tokens, trials, batch=batch)
        # Quantized caches round by design.
        exact.found += [entry for entry in trials.disagreements.found if entry["cache"] == KVLAYERS]
        return measured

    return by_case(run, "steps", measure)


def measure_batch(workload: Any, batch: int, tokens: int, trials: Trials) -> Measured:
    return measure_decode(workload, {name: CONTENDERS[name] for name in IN_BATCHES}, tokens, trials, batch=batch)


def batches(run: report.Session) -> dict[str, Any]:
    dtype = getattr(torch, run.given.dtype)
    workload = run.random(dtype=dtype) if run.quick else run.real(dtype)
    if workload is None:
        return {}
    trials = Trials(run.given.steps or 32, run.given.trials, run.ticking, 1, run.disagreements(dtype))
    return by_case(run, "batches", lambda batch, tokens: measure_batch(workload, batch, tokens, trials))


def prefill(run: report.Session) -> dict[str, Any]:
    workload, disagreements = run.random(), run.disagreements(roundings_of=lambda name: ROUNDINGS)

    def measure(batch: int, tokens: int) -> Measured:
        prompts = workload.prompt(batch * tokens).view(batch, tokens)
        more = 0 if run.quick else min(TOKENS_IN_ALL // prompts.numel(), MOST_TURNS)
        turns = max(run.given.turns, more)

        def check(name: str, expected: Tensor, seen: Tensor) -> None:
            if name in EXACT:
                where = {"model": workload.name, "cache": name, "tokens": tokens, "batch": batch, "trial": 0}
                disagreements.compare_step(where, expected, seen)

        tick = run.ticking(f"prefill of {batch} x {tokens}", turns + 1)
        return measure_prefill(workload.model, prompts, {**EXACT, **QUANTIZED}, turns, check, tick)

    return by_case(run, "prefill", measure)


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
    sections = {"steps": steps, "batches": batches, "prefill": prefill, "generate": generate}
    return report.run(options().parse(arguments), sections)


if __name__ == "__main__":
    sys.exit(main())
