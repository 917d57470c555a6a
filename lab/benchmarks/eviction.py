"""What caches that evict, and caches that recall, cost: decode steps and prefill.

    python lab/benchmarks/eviction.py                         # everything, on two cores
    python lab/benchmarks/eviction.py --quick                 # small shapes, to see that it runs
    python lab/benchmarks/eviction.py --only decode,recall    # parts: decode, recall, prefill
    python lab/benchmarks/record.py RESULTS.json lab/benchmarks/recorded/eviction-<date>.json

| part | what it measures |
|---|---|
| decode | the attention of a decode step at 16,384 tokens, update and selection included, of caches that evict |
| recall | the same for recall of 64 pages at 8,192, 16,384 and 32,768 tokens |
| prefill | a forward pass over 4,096 tokens with each rule, relative to `kvlayers.DynamicCache` |

Attention is that of 32 heads and 8 KV heads of 128 in bfloat16, through the function of transformers that models call,
without the rest of a model. Prefill runs two layers of the shape of Llama 3.2 1B with random weights in float32.
Contenders take turns in an order that rotates; a ratio is the median of the trials' ratios.

The exit code is 1 if an output is wrong.
"""

import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvlayers
from kvlayers.eviction import eviction_rule_names
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, REFERENCE, Maker, fill
from lib.internals import PackedStates, cache_nbytes, interleaved, quiet_clock, slabs
from lib.report import mb, ms, shown
from lib.timing import Measured, measure_prefill, summarise, times_as_fast
from lib.workload import Shape

EVEN, PER_HEAD, BUDGET = "keep 0.25", "keep 0.25, per head", "budget of a quarter"
RECALL = "recall"
RULE = "keydiff"
"""The rule of caches whose decode steps are timed: it looks at keys, so that caches can be filled without queries."""

ATTENTION = Shape(layers=2, heads=32, kv_heads=8, head_dim=128)
QUICK_ATTENTION = Shape(layers=1, heads=4, kv_heads=2, head_dim=32)
PREFILL_SHAPE = Shape(layers=2, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=1024)

MOST_APART = 0.02
"""The largest difference between attention in bfloat16 and its reference, relative to the largest output."""

BLOCK = 16
"""Steps that a contender takes before the next one has its turn."""

DENSE: dict[str, Maker] = {
    REFERENCE: CONTENDERS[REFERENCE],
    KVLAYERS: lambda config, length: kvlayers.DynamicCache(config=config, length_hint=length),
}


def evicting(**options: Any) -> Maker:
    return lambda config, length: kvlayers.EvictingCache(config=config, **{"rule": RULE, **options})


def recalling(pages: int) -> Maker:
    recall = kvlayers.layers.Recall(pages=pages)
    return lambda config, length: kvlayers.DynamicCache(config=config, length_hint=length, recall=recall)


def decode_makers(length: int) -> dict[str, Maker]:
    return {
        **DENSE,
        EVEN: evicting(keep=0.25, per_head=False),
        PER_HEAD: evicting(keep=0.25, per_head=True),
        BUDGET: evicting(budget=length // 4, per_head=False),
    }


def options() -> report.Options:
    made = report.Options("eviction", __doc__, threads=2, quick="small shapes and few tokens")
    made.some_of("--only", list(PARTS), "parts, separated by commas")
    made.some_of("--rules", eviction_rule_names(), "rules of the prefill, separated by commas")
    made.sized("--trials", None, 1, "trials (5; of prefill 3)")
    made.sized("--steps", 192, 32, "decode steps of a trial; 192 are three evictions of a budget")
    return made


def states_of(shape: Shape, tokens: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Random states of each layer in bfloat16. Heads differ in their norms, so that budgets that go by norms differ."""
    factors = torch.linspace(0.9, 1.1, shape.kv_heads)[:, None, None].to(torch.bfloat16)
    return [(keys * factors, values) for keys, values in shape.states(tokens, torch.bfloat16, seed)]


def attention_step(
    cache: Any, shape: Shape, states: Sequence[tuple[Tensor, Tensor]], query: Tensor
) -> tuple[Tensor, tuple[Any, Any]]:
    """One token through the attention of every layer: the output `[1, 1, heads, head_dim]` of the last, and its states.

    Transformers' own function is called, as a model calls it. What the cache chooses, it chooses in here.
    """
    module = SimpleNamespace(num_key_value_groups=shape.heads // shape.kv_heads, is_causal=True)
    output, attended = query, (query, query)
    for layer_idx, (keys, values) in enumerate(states):
        attended = cache.update(keys, values, layer_idx)
        output = sdpa_attention_forward(module, query, *attended, attention_mask=None)[0]
    return output, attended


def reference_output(query: Tensor, attended: tuple[Any, Any]) -> Tensor:
    """The same attention in float32 and plain torch, `[1, 1, heads, head_dim]`."""
    keys, values = attended
    if isinstance(keys, PackedStates):
        segments = keys.snapshot.read(query)
        found = slabs.attend(query.float(), segments, None, query.shape[3] ** -0.5)
    else:
        found = torch.nn.functional.scaled_dot_product_attention(
            query.float(), keys.float(), values.float(), enable_gqa=True
        )
    return found.transpose(1, 2)


def measure_attention(
    run: report.Session, shape: Shape, makers: Mapping[str, Maker], lengths: Sequence[int]
) -> dict[str, Measured]:
    """Seconds of decode steps of attention alone, for each contender at each length; outputs are checked.

    Contenders of all lengths take turns of `BLOCK` steps, so that a ratio of two lengths is of one time as well. A
    trial's figure is the mean over all steps, so that evictions in steps of many tokens count.
    """
    config, steps, trials = shape.config(), run.given.steps, run.given.trials or 5
    query = torch.randn(
        1, shape.heads, 1, shape.head_dim, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3)
    )
    token, filled = states_of(shape, 1, seed=1), {length: states_of(shape, length) for length in lengths}
    found: dict[str, Measured] = {str(length): {name: {"seconds": []} for name in makers} for length in lengths}
    entrants = [(name, length) for length in lengths for name in makers]
    tick = run.ticking(f"attention of decode steps at {', '.join(found)}", trials)
    for trial in range(trials):
        gc.collect()
        with quiet_clock():
            caches = {}
            for name, length in entrants:
                # With room for the first step, which is not counted: it may compile a kernel.
                cache = caches[name, length] = makers[name](config, length + steps + 1)
                fill(cache, filled[length], length)
                attention_step(cache, shape, token, query)
                found[str(length)][name]["seconds"].append([])
            for start in range(0, steps, BLOCK):
                for name, length in interleaved(entrants, trial + start // BLOCK):
                    for _ in range(min(BLOCK, steps - start)):
                        begin = time.perf_counter()
                        attention_step(caches[name, length], shape, token, query)
                        found[str(length)][name]["seconds"][trial].append(time.perf_counter() - begin)
            for (name, length), cache in caches.items():
                found[str(length)][name]["held"] = cache_nbytes(cache)
                output, attended = attention_step(cache, shape, token[:1], query)
                expected = reference_output(query, attended)
                apart = float((output.float() - expected).abs().max() / expected.abs().max())
                run.expect(apart <= MOST_APART, f"{name} at {length}: attention is {apart:.3f} from the reference")
            caches.clear()
        tick()
    for measured in found.values():
        for name, entry in summarise(measured).items():
            entry["of_dense"] = 1 / times_as_fast(measured, name, KVLAYERS, statistics.fmean)
    columns = {"ms, mean": ms("mean", ".3f"), "median": ms("median", ".3f"), "of dense": shown("of_dense", ".3f")}
    run.table("Attention of a decode step", "tokens, cache", found, {**columns, "MB held": mb("held")})
    return found


def measure_decode(run: report.Session) -> dict[str, Measured]:
    tokens = 1024 if run.quick else 16384
    shape = QUICK_ATTENTION if run.quick else dataclasses.replace(ATTENTION, layers=4)
    return measure_attention(run, shape, decode_makers(tokens), [tokens])


def measure_recall(run: report.Session) -> dict[str, Measured]:
    lengths = [512, 1024, 2048] if run.quick else [8192, 16384, 32768]
    makers = {**DENSE, RECALL: recalling(4 if run.quick else 64)}
    return measure_attention(run, QUICK_ATTENTION if run.quick else ATTENTION, makers, lengths)


def prefill(run: report.Session) -> Measured:
    """Attention to a prompt is exact, whatever is evicted behind it: so logits are those of a dense cache."""
    tokens, trials = 512 if run.quick else 4096, run.given.trials or 3
    makers = {KVLAYERS: DENSE[KVLAYERS], **{rule: evicting(rule=rule, keep=0.5) for rule in run.given.rules}}
    # Few CPUs multiply matrices of bfloat16, and on the others a pass takes most of a minute.
    workload = run.random(PREFILL_SHAPE, torch.float32)

    def check(name: str, expected: Tensor, seen: Tensor) -> None:
        apart = float((seen - expected).abs().max())
        line = f"{name}: logits of the prompt are {apart:.4f} apart"
        run.expect(apart == 0 or line in run.wrong, line)

    tick = run.ticking(f"prefill of {tokens}", trials + 1)
    found = summarise(measure_prefill(workload.model, workload.prompt(tokens), makers, trials, check, tick))
    for name, entry in found.items():
        entry["of_dense"] = 1 / times_as_fast(found, name, KVLAYERS)
    columns = {"seconds": shown("median", ".3f"), "of dense": shown("of_dense", ".3f")}
    run.table("Prefill", "rule", {"": found}, columns)
    return found


PARTS = {
    "decode": measure_decode,
    "recall": measure_recall,
    "prefill": prefill,
}


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), PARTS)


if __name__ == "__main__":
    sys.exit(main())
