"""Compares attention to held tokens with the rate at which a CPU reads memory, and decode steps with transformers'.

    python benchmarks/attention.py                     # 1,024, 4,096 and 16,384 tokens: some minutes on two idle cores
    python benchmarks/attention.py --lengths 16384     # the longest alone
    python benchmarks/attention.py --quick             # a small model, to see that it runs

The model is a random llama in bfloat16 with 8 layers, 16 heads and 8 KV heads of 64 channels, and caches hold random
states. `attention` times the attention of one token in all layers, without the model and without the update. In the
same turn torch adds up the states as integers, with as many threads: that is the measured read rate. A share is the
rate at which attention reads the bytes that a cache holds, as a fraction of the read rate. `steps` times whole decode
steps.

Caches take turns, in an order that rotates, and a figure is the median over all turns. The attention of a cache in full
precision must be that of transformers' cache up to rounding, else the exit code is 1. Run it on an idle machine.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from kvlayers.tools.measuring.interleave import interleaved, quiet_clock
from kvlayers.tools.measuring.nbytes import cache_nbytes
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, REFERENCE, Maker, fill, random_states
from lib.timing import Disagreements, measure_decode
from lib.workload import QUICK_SHAPE, RandomModel, Shape

WIDTHS = (8, 6, 5, 4, 3, 2)
READ = "reading the states"


def bits(nbits: int) -> str:
    """The name of a quantized cache."""
    return f"kvlayers {nbits} bits"


CACHES: dict[str, Maker] = {
    REFERENCE: CONTENDERS[REFERENCE],
    KVLAYERS: CONTENDERS[KVLAYERS],
    **{
        bits(nbits): lambda config, length, nbits=nbits: kvlayers.QuantizedCache(config=config, nbits=nbits)
        for nbits in WIDTHS
    },
}

STEP_SPEED, DENSE_SHARE, INT8_SHARE, INT4_OF_DENSE, INT3_OF_INT4 = 6.5, 0.7, 0.5, 0.6, 1.1
"""Targets at 16,384 tokens: steps with transformers' cache over steps with kvlayers', shares of the read rate,
attention at 4 bits over attention in full precision, and a step at 3 bits over one at 4."""

ROUNDINGS = 4
"""Units in the last place of bfloat16 by which attention in full precision may differ from torch's, relative to the
largest state: torch rounds its weights to bfloat16."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=_lengths, help="tokens that are held (1024,4096,16384)")
    parser.add_argument("--turns", type=int, help="turns of attention (15)")
    parser.add_argument("--steps", type=int, help="decode steps in each trial (16)")
    parser.add_argument("--trials", type=int, help="trials of decode steps (3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/attention-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens")
    given = parser.parse_args(arguments)
    given.lengths = given.lengths or ([400] if given.quick else [1024, 4096, 16384])
    given.turns = given.turns or (3 if given.quick else 15)
    given.steps = given.steps or (2 if given.quick else 16)
    given.trials = given.trials or (1 if given.quick else 3)
    given.output = given.output or report.output_path("attention")
    return given


def _lengths(text: str) -> list[int]:
    return [int(length) for length in text.split(",")]


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


def measure_attention(workload: RandomModel, length: int, turns: int) -> dict[str, dict[str, float]]:
    """For each cache: median seconds, bytes, the share of the read rate, and the difference from transformers'."""
    shape, config = workload.shape, workload.model.config
    states = random_states(shape.layers, shape.kv_heads, shape.head_dim, length, torch.bfloat16)
    caches = {name: make(config, length + turns + 1) for name, make in CACHES.items()}
    for cache in caches.values():
        fill(cache, states, length)
    state_bytes = sum(side.nbytes for layer in states for side in layer)
    # A cache in full precision reserves more than it reads.
    held = {name: cache_nbytes(cache) for name, cache in caches.items()}
    held |= dict.fromkeys((REFERENCE, KVLAYERS), state_bytes)
    seconds: dict[str, list[float]] = {name: [] for name in (*caches, READ)}
    differences = dict.fromkeys(caches, 0.0)
    generator = torch.Generator().manual_seed(1)
    with quiet_clock():
        for turn in range(turns + 1):
            query, new = (
                torch.randn(1, heads, 1, shape.head_dim, generator=generator).bfloat16()
                for heads in (shape.heads, shape.kv_heads)
            )
            seen, took = {}, {}
            for name in interleaved([*caches, READ], turn):
                if name == READ:
                    took[name] = read(states)
                else:
                    took[name], seen[name] = attend(caches[name], query, new)
            for name, result in seen.items():
                differences[name] = max(differences[name], float((result - seen[REFERENCE]).abs().max()))
            # The first turn warms up.
            if turn:
                for name, each in took.items():
                    seconds[name].append(each)
    rates = [state_bytes / each for each in seconds[READ]]
    found = {
        name: {
            "median": statistics.median(each),
            "bytes": held[name],
            "share": statistics.median(held[name] / one / rate for one, rate in zip(each, rates, strict=True)),
            "of_dense": statistics.median(one / other for one, other in zip(each, seconds[KVLAYERS], strict=True)),
            "difference": differences[name],
        }
        for name, each in seconds.items()
        if name != READ
    }
    largest = max(float(values.abs().max()) for _, values in states)
    return {
        **found,
        READ: {"median": statistics.median(seconds[READ]), "rate": statistics.median(rates), "largest": largest},
    }


def agrees(measured: dict[str, dict[str, float]]) -> bool:
    """Whether attention in full precision is torch's, up to rounding."""
    allowed = ROUNDINGS * torch.finfo(torch.bfloat16).eps * measured[READ]["largest"]
    return measured[KVLAYERS]["difference"] <= allowed


def promises(attention: dict[int, Any], steps: dict[int, Any]) -> list[dict[str, Any]]:
    """The targets for these figures."""
    found = []
    if 16384 in attention:
        measured = attention[16384]
        found += [
            report.promised("dense, share of the read rate", measured[KVLAYERS]["share"], at_least=DENSE_SHARE),
            report.promised("8 bits, share of the read rate", measured[bits(8)]["share"], at_least=INT8_SHARE),
            report.promised("attention at 4 bits over dense", measured[bits(4)]["of_dense"], at_most=INT4_OF_DENSE),
        ]
    for length, measured in steps.items():
        of_dense = 1 / report.times_as_fast(measured, bits(4), KVLAYERS)
        found.append(report.promised(f"step at 4 bits over dense at {length}", of_dense, at_most=1.0))
        if length == 16384:
            speed = report.times_as_fast(measured, KVLAYERS, REFERENCE)
            of_four = 1 / report.times_as_fast(measured, bits(3), bits(4))
            found.append(report.promised("step, transformers' over kvlayers'", speed, at_least=STEP_SPEED))
            found.append(report.promised("step at 3 bits over 4 bits", of_four, at_most=INT3_OF_INT4))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    given = parse(arguments)
    torch.set_num_threads(given.threads)
    console, environment = report.terminal(), report.environment()
    workload = RandomModel(QUICK_SHAPE if given.quick else Shape(), chunk=1 << 16)
    attention: dict[int, Any] = {}
    steps: dict[int, Any] = {}
    # Quantized caches round by design: other tokens are no failure here, and benchmarks/fidelity.py measures them.
    rounded = Disagreements()
    with report.progress_bars(console) as progress:
        ticking = report.ticking_in(progress)
        tick = ticking("attention", len(given.lengths))
        for length in given.lengths:
            attention[length] = measure_attention(workload, length, given.turns)
            tick()
        for length in given.lengths:
            tick = ticking(f"steps at {length}", given.trials)
            steps[length] = measure_decode(workload, CACHES, length, given.steps, given.trials, 4, rounded, tick)
            report.summarise(steps[length])
    table = report.new_table(
        "Attention of one token, and whole steps", "tokens, cache", "attention, ms", "MB", "share", "step, ms", "times"
    )
    for length, measured in attention.items():
        for name in CACHES:
            entry, step = measured[name], steps[length][name]
            table.add_row(
                f"{length:>6} {name}",
                f"{entry['median'] * report.MILLI:.2f}",
                f"{entry['bytes'] / 1e6:.1f}",
                f"{entry['share']:.2f}",
                f"{step['median'] * report.MILLI:.2f}",
                f"{step['speed']:.2f}",
            )
        rate = measured[READ]["rate"] / 1e9
        table.add_row(f"{length:>6} {READ}", f"{measured[READ]['median'] * report.MILLI:.2f}", f"{rate:.1f} GB/s")
        table.add_section()
    console.print(table)
    asked = [] if given.quick else promises(attention, steps)
    report.show_targets(console, asked)
    results = {"attention": attention, "steps": steps}
    report.finish(console, given, environment, results, asked)
    same = all(agrees(measured) for measured in attention.values())
    if not same:
        console.print("[red]attention in full precision differs from transformers' by more than rounding[/]")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
