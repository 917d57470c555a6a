"""Continues one prompt many times: the cost of a fork and the memory of 40 continuations, beside transformers' caches.

    python benchmarks/forks.py            # a fork of 8,192 tokens, 40 continuations of 1,024
    python benchmarks/forks.py --quick    # fewer tokens, to see that it runs

Both are measured on a random llama-like model in bfloat16. A fork is compared with `copy.deepcopy` of transformers'
DynamicCache with the same states, continuations with its `batch_repeat_interleave`. Contenders take turns; figures are
medians over the trials.

The exit code is 1 if a token differs from the one with transformers' cache, except for ties in bfloat16.
"""

import argparse
import copy
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from kvlayers.tools.measuring.interleave import quiet_clock
from lib import report
from lib.contenders import fill, random_states
from lib.workload import FILL_CHUNK, QUICK_SHAPE, RandomModel, Shape

KVLAYERS, TRANSFORMERS = "kvlayers", "transformers"
TIMES_AS_FAST = 100
MOST_OF_EXPANDED = 0.1
TIE = 0.05
"""The difference of two logits within which bfloat16 may choose either: it has 8 bits, and logits are of order 1."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, help="tokens of the cache that is forked (8192)")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt that is continued (1024)")
    parser.add_argument("--continuations", type=int, default=40, help="sequences that go on from it (40)")
    parser.add_argument("--new", type=int, help="tokens of each (48)")
    parser.add_argument("--trials", type=int, help="forks that are timed (15)")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/forks-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens")
    given = parser.parse_args(arguments)
    given.tokens = given.tokens or (512 if given.quick else 8192)
    given.prompt = given.prompt or (1024 if not given.quick else 512)
    given.new = given.new or (8 if given.quick else 48)
    given.trials = given.trials or (3 if given.quick else 15)
    given.output = given.output or report.output_path("forks")
    return given


def storages(cache: Any) -> dict[int, int]:
    """Bytes of each storage that a cache's keys and values are in."""
    tensors = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    return {states.untyped_storage().data_ptr(): states.untyped_storage().nbytes() for states in tensors}


def measure_forks(model: Any, tokens: int, trials: int) -> dict[str, Any]:
    """Seconds of a fork and of a deepcopy, in turns, and the bytes that a fork adds before it is written to."""
    caches = {
        KVLAYERS: kvlayers.DynamicCache(config=model.config),
        TRANSFORMERS: transformers.DynamicCache(config=model.config),
    }
    config = model.config
    sizes = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    states = random_states(*sizes, tokens, torch.bfloat16)
    for cache in caches.values():
        fill(cache, states, FILL_CHUNK)
    makers: dict[str, Callable[[], Any]] = {
        KVLAYERS: caches[KVLAYERS].fork,
        TRANSFORMERS: lambda: copy.deepcopy(caches[TRANSFORMERS]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    with quiet_clock():
        for _ in range(trials):
            for name, make in makers.items():
                begin = time.perf_counter()
                kept = make()
                seconds[name].append(time.perf_counter() - begin)
                del kept
    fork = caches[KVLAYERS].fork()
    added = sum((storages(fork) | storages(caches[KVLAYERS])).values()) - sum(storages(caches[KVLAYERS]).values())
    return {"seconds": seconds, "bytes_added": added, "held": caches[KVLAYERS].nbytes}


def continue_all(model: Any, cache: Any, first: Tensor, new: int) -> tuple[Tensor, Tensor, int, float]:
    """Greedy tokens of all sequences, the gap between each one's two most likely logits, peak bytes, seconds a step."""
    ids, found, gaps, most, seconds = first, [], [], 0, []
    with torch.no_grad(), quiet_clock():
        for _ in range(new):
            begin = time.perf_counter()
            logits = model(input_ids=ids, past_key_values=cache).logits[:, -1]
            seconds.append(time.perf_counter() - begin)
            best = logits.float().topk(2)
            ids = best.indices[:, :1]
            found.append(ids)
            gaps.append(best.values[:, 0] - best.values[:, 1])
            held = cache.nbytes if isinstance(cache, kvlayers.Cache) else sum(storages(cache).values())
            most = max(most, held)
    return torch.cat(found, 1), torch.stack(gaps, 1), most, statistics.median(seconds)


def measure_continuations(model: Any, prompt: Tensor, count: int, new: int) -> dict[str, Any]:
    """Bytes, step times and tokens of `count` continuations of one prompt."""
    first = torch.randint(3, model.config.vocab_size, (count, 1), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    tokens, gaps = {}, {}
    for name, cache in (
        (TRANSFORMERS, transformers.DynamicCache(config=model.config)),
        (KVLAYERS, kvlayers.DynamicCache(config=model.config)),
    ):
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        if isinstance(cache, kvlayers.Cache):
            cache.expand(count)
        else:
            cache.batch_repeat_interleave(count)
        tokens[name], gaps[name], most, step = continue_all(model, cache, first, new)
        found[name] = {"most_bytes": most, "step": step}
        gc.collect()
    others = tokens[KVLAYERS] != tokens[TRANSFORMERS]
    # After a sequence's first different token, its text differs.
    first_other = others.int().argmax(1)
    ties = gaps[TRANSFORMERS].gather(1, first_other[:, None])[:, 0] <= TIE
    found["other_tokens"] = int((others.any(1) & ~ties).sum())
    found["ties"] = int((others.any(1) & ties).sum())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if tokens differ from those with transformers' cache."""
    given = parse(arguments)
    console = report.terminal()
    workload = RandomModel(QUICK_SHAPE if given.quick else Shape())
    model = workload.model
    forks = measure_forks(model, given.tokens, given.trials)
    medians = {name: statistics.median(times) for name, times in forks["seconds"].items()}
    table = report.new_table(f"Another continuation of {given.tokens} tokens, {workload.name}", "", "ms", "MB added")
    table.add_row("kvlayers, fork()", f"{medians[KVLAYERS] * 1e3:.3f}", f"{forks['bytes_added'] / 1e6:.1f}")
    table.add_row("transformers, deepcopy", f"{medians[TRANSFORMERS] * 1e3:.3f}", f"{forks['held'] / 1e6:.1f}")
    console.print(table)
    many = measure_continuations(model, workload.prompt(given.prompt), given.continuations, given.new)
    table = report.new_table(
        f"{given.continuations} continuations of {given.prompt} tokens, {given.new} each",
        "",
        "most MB held",
        "ms a step",
    )
    for name in (KVLAYERS, TRANSFORMERS):
        table.add_row(name, f"{many[name]['most_bytes'] / 1e6:.1f}", f"{many[name]['step'] * 1e3:.1f}")
    console.print(table)
    share = many[KVLAYERS]["most_bytes"] / many[TRANSFORMERS]["most_bytes"]
    kept = [
        report.promised(
            "fork, times as fast as deepcopy", medians[TRANSFORMERS] / medians[KVLAYERS], at_least=TIMES_AS_FAST
        ),
        report.promised("bytes that a fork adds", forks["bytes_added"], at_most=0),
        report.promised("bytes of continuations, relative to expanded", share, at_most=MOST_OF_EXPANDED),
    ]
    for promise in kept:
        met = "met" if promise["met"] else "missed"
        console.print(f"{met}: {promise['what']}: {promise['value']:.3g}, asked {promise['asked']}")
    console.print(f"{many['other_tokens']} sequences with other tokens, {many['ties']} with a tie")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": report.environment(), "forks": forks, "continuations": many, "targets": kept}
    given.output.write_text(json.dumps(result, indent=1))
    return 1 if many["other_tokens"] else 0


if __name__ == "__main__":
    sys.exit(main())
