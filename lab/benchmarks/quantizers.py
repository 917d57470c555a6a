"""Compares all quantizers at about equal bytes: what a model loses, with outliers too, and how long a step takes.

    python lab/benchmarks/quantizers.py            # the demo model, some ten minutes on two cores
    python lab/benchmarks/quantizers.py --quick    # a small random model, to see that it runs

Each row is a cache of kvlayers with one of its backends, or a cache of transformers, near 8, 4 or 2 bits a number,
scales included. Group sizes are chosen so that kvlayers' caches of a band hold nearly the same bytes, which are counted
and shown. They keep at least 128 recent tokens and 16 sinks in full precision, transformers' 0 to 127 recent tokens.

The KL divergence is from the same model with transformers' DynamicCache, in nats a token, of a text that is read in
chunks; with outliers, two key channels of each KV head have a bias of 30. A step decodes one token behind `--context`
tokens, alternately with every cache; its time is a ratio to that of transformers' DynamicCache. `tasks.py`
measures the answers to tasks.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import fidelity
from lib import report
from lib.internals import CacheMaker
from lib.quantized import FULL, RANDOM, REFERENCE, Contender, load, own, upstream
from lib.report import shown
from lib.timing import Tick, Turns

OUTLIER = 30.0

MAKERS: dict[Contender, CacheMaker] = {
    Contender("kvlayers", "native", 8): own("native", nbits=8),
    Contender("kvlayers", "fp8", 8): own("fp8"),
    **upstream("fp8", 8),
    Contender("kvlayers", "native", 4): own("native", nbits=4),
    Contender("kvlayers", "kivi", 4): own("kivi", nbits=4, q_group_size=64),
    Contender("kvlayers", "turboquant", 4): own("turboquant", nbits=4),
    Contender("kvlayers", "nf4", 4): own("nf4", q_group_size=32),
    Contender("kvlayers", "quanto", 4): own("quanto", nbits=4),
    Contender("kvlayers", "hqq", 4): own("hqq", nbits=4),
    **upstream("quanto", 4),
    **upstream("hqq", 4),
    Contender("kvlayers", "native", 2): own("native", nbits=2),
    Contender("kvlayers", "kivi", 2): own("kivi", nbits=2, q_group_size=64),
    Contender("kvlayers", "turboquant", 2): own("turboquant", nbits=2),
    Contender("kvlayers", "quanto", 2): own("quanto", nbits=2),
    Contender("kvlayers", "hqq", 2): own("hqq", nbits=2),
    **upstream("quanto", 2),
    **upstream("hqq", 2),
}


def options() -> report.Options:
    made = report.Options("quantizers", __doc__, quick="a small random model and a short text")
    made.real_model(RANDOM, is_needed=True)
    made.sized("--context", 1024, 448, "tokens read before scoring begins, and behind a step")
    made.sized("--scored", 512, 64, "tokens that are scored")
    made.sized("--steps", 15, 2, "timed steps with each cache")
    return made


@torch.no_grad()
def step_ratios(
    model: Any, ids: Tensor, makers: dict[Contender, CacheMaker], steps: int, tick: Tick
) -> dict[str, float]:
    """For each cache, the median of the times of a step over those of the reference beside it."""
    caches = {key.name: make(model.config) for key, make in makers.items()}
    for cache in caches.values():
        model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        tick()
    turns = Turns(caches)
    for step in range(steps + 2):
        # The first steps allocate and choose kernels.
        turns.take(lambda name: model(ids[:, -1:], past_key_values=caches[name]).logits, is_counted=step > 1)
        tick()
    return {name: turns.ratio(name, REFERENCE.name) for name in caches}


def measure(run: report.Session, makers: dict[Contender, CacheMaker]) -> list[dict[str, Any]]:
    """A row for each cache, the reference first; those that failed come last."""
    given, every = run.given, {REFERENCE: FULL[REFERENCE], **makers}
    bits = {key.bits for key in makers}
    # hqq takes seconds for each chunk.
    asked = {"passages": 1, "dtype": "float32", "chunk": 64 if given.quick else 256}
    settings = argparse.Namespace(**{**vars(given), **asked}, outlier=OUTLIER, outlier_bits=bits)
    found = fidelity.measure(run, given.model, every, settings)
    plain, outliers, held = found["plain"], found["outliers"], found["bytes"]
    failures = {
        key: failure
        for key in every
        if (failure := plain[key.name].get("failure") or outliers.get(key.name, {}).get("failure"))
    }
    working = {key: make for key, make in every.items() if key not in failures}
    model, texts = load(given.model, given.text, "float32", 1, given.context + given.scored + 1)
    tick = run.ticking("steps", len(working) + given.steps + 2)
    ratios = step_ratios(model, texts[0][:, : given.context + 1], working, given.steps, tick)
    rows = [
        {
            **key._asdict(),
            "bytes": held[key.name]["bytes"],
            "kl": plain[key.name]["kl"],
            "agreement": plain[key.name]["agreement"],
            "kl_outliers": outliers[key.name]["kl"],
            "step_ratio": ratios[key.name],
        }
        for key in working
    ]
    rows += [{**key._asdict(), "failure": failure} for key, failure in failures.items()]
    for key, failure in failures.items():
        run.expect(key.library != "kvlayers", f"{key.name} failed: {failure}")
    columns = {
        "bytes a token": shown("bytes", ",.0f"),
        "KL": shown("kl", ".2g"),
        "agreement": shown("agreement", ".2%"),
    }
    columns |= {"KL, outliers": shown("kl_outliers", ".2g"), "step": shown("step_ratio"), "": shown("failure", "")}
    of_names = {Contender(row["library"], row["backend"], row["bits"]).name: row for row in rows}
    run.table("quantizers at about equal bytes", "cache", {"": of_names}, columns)
    return rows


def main(arguments: Sequence[str] | None = None, makers: dict[Contender, CacheMaker] = MAKERS) -> int:
    transformers.utils.logging.set_verbosity_error()
    return report.run(options().parse(arguments), {"quantizers": lambda run: measure(run, makers)})


if __name__ == "__main__":
    sys.exit(main())
