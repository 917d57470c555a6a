"""Compares attention to held tokens with the rate at which a CPU reads memory, and decode steps with transformers'.

    python lab/benchmarks/attention.py                     # 1,024, 4,096 and 16,384 tokens: minutes on two idle cores
    python lab/benchmarks/attention.py --lengths 16384     # the longest alone
    python lab/benchmarks/attention.py --quick             # a small model, to see that it runs

The model is a random llama in bfloat16 with 8 layers, 16 heads and 8 KV heads of 64 channels, and caches hold random
states. `attention` times the attention of one token in all layers, without the model and without the update. In the
same turn torch adds up the states as integers, with as many threads: that is the measured read rate. A share is the
rate at which attention reads the bytes that a cache holds, as a fraction of the read rate. `steps` times whole decode
steps.

Caches take turns, in an order that rotates, and a figure is the median over all turns. The attention of a cache in full
precision must be that of transformers' cache up to rounding, else the exit code is 1. Run it on an idle machine.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, REFERENCE, Maker, fill, packed
from lib.internals import cache_nbytes, quiet_clock
from lib.timing import Trials, Turns, measure_decode, summarise
from lib.workload import RandomModel

READ = "reading the states"


def bits(nbits: int) -> str:
    return f"kvlayers {nbits} bits"


CACHES: dict[str, Maker] = {
    REFERENCE: CONTENDERS[REFERENCE],
    KVLAYERS: CONTENDERS[KVLAYERS],
    **{bits(nbits): packed(nbits) for nbits in (8, 6, 5, 4, 3, 2)},
}

ROUNDINGS = 4
"""Units in the last place of bfloat16 by which attention in full precision may differ from torch's, relative to the
largest state: torch rounds its weights to bfloat16."""


def options() -> report.Options:
    made = report.Options("attention", __doc__, threads=2, quick="a small model and few tokens")
    made.sized("--lengths", [1024, 4096, 16384], [400], "tokens that are held", report.numbers)
    made.sized("--turns", 15, 3, "turns of attention")
    made.sized("--steps", 16, 2, "decode steps in each trial")
    made.sized("--trials", 3, 1, "trials of decode steps")
    return made


def attend(cache: Any, query: Tensor, new: Tensor) -> tuple[float, Tensor]:
    """Attention of a token in all layers: its seconds, and the results, stacked. The update is not timed.

    Args:
        cache: the cache.
        query: `[1, heads, 1, head_dim]`.
        new: keys and values of the token, `[1, kv_heads, 1, head_dim]`.
    """
    seconds, results = 0.0, []
    for index in range(len(cache.layers)):
        keys, values = cache.update(new, new, index)
        begin = time.perf_counter()
        results.append(scaled_dot_product_attention(query, keys, values, enable_gqa=True))
        seconds += time.perf_counter() - begin
    return seconds, torch.stack(results)


def read(states: list[tuple[Tensor, Tensor]]) -> float:
    """Seconds in which torch adds up all states."""
    words = [side.view(torch.int64) for layer in states for side in layer]
    begin = time.perf_counter()
    for each in words:
        each.sum()
    return time.perf_counter() - begin


def measure_attention(run: report.Session, workload: RandomModel, length: int) -> dict[str, dict[str, float]]:
    """For each cache: median seconds, bytes, the share of the read rate, and the difference from transformers'."""
    shape, config, turns = workload.shape, workload.model.config, run.given.turns
    states = shape.states(length, torch.bfloat16)
    caches = {name: make(config, length + turns + 1) for name, make in CACHES.items()}
    for cache in caches.values():
        fill(cache, states, length)
    state_bytes = sum(side.nbytes for layer in states for side in layer)
    # A cache in full precision reserves more than it reads.
    held = {name: cache_nbytes(cache) for name, cache in caches.items()}
    held |= dict.fromkeys((REFERENCE, KVLAYERS), state_bytes)
    order, differences = Turns((*caches, READ)), dict.fromkeys(caches, 0.0)
    generator = torch.Generator().manual_seed(1)
    with quiet_clock():
        for turn in range(turns + 1):
            query, new = (
                torch.randn(1, heads, 1, shape.head_dim, generator=generator).bfloat16()
                for heads in (shape.heads, shape.kv_heads)
            )

            def timed(name: str, query: Tensor = query, new: Tensor = new) -> tuple[float, Tensor | None]:
                return (read(states), None) if name == READ else attend(caches[name], query, new)

            # The first turn warms up.
            found = order.take_timed(timed, turn > 0)
            for name in caches:
                apart = float((found[name] - found[REFERENCE]).abs().max())
                differences[name] = max(differences[name], apart)
    rates = [state_bytes / each for each in order.seconds[READ]]
    measured: dict[str, Any] = {READ: {"median": order.median(READ), "rate": statistics.median(rates)}}
    for name in caches:
        shares = (held[name] / one / rate for one, rate in zip(order.seconds[name], rates, strict=True))
        measured[name] = {
            "median": order.median(name),
            "bytes": held[name],
            "share": statistics.median(shares),
            "of_dense": order.ratio(name, KVLAYERS),
            "difference": differences[name],
        }
    largest = max(float(values.abs().max()) for _, values in states)
    run.expect(
        differences[KVLAYERS] <= ROUNDINGS * torch.finfo(torch.bfloat16).eps * largest,
        f"attention in full precision to {length} tokens differs from transformers' by more than rounding",
    )
    return measured


def attention(run: report.Session) -> dict[int, Any]:
    workload = run.random()
    found = {length: measure_attention(run, workload, length) for length in run.given.lengths}
    columns = {"attention, ms": report.ms("median"), "MB": report.mb("bytes"), "share": report.shown("share")}
    columns |= {"of dense": report.shown("of_dense"), "GB/s": report.shown("rate", ".1f", 1e-9)}
    run.table("Attention of one token", "tokens, cache", found, columns)
    return found


def steps(run: report.Session) -> dict[int, Any]:
    # Quantized caches round by design: other tokens are no failure here, and fidelity.py measures them.
    trials, workload = Trials(run.given.steps, run.given.trials, run.ticking), run.random(chunk=1 << 16)
    found = {length: summarise(measure_decode(workload, CACHES, length, trials)) for length in run.given.lengths}
    columns = {"step, ms": report.ms("median"), "times": report.shown("speed")}
    run.table("Whole steps", "tokens, cache", found, columns)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), {"attention": attention, "steps": steps})


if __name__ == "__main__":
    sys.exit(main())
