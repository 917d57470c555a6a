"""What caches that evict, and caches that recall, hold and cost: bytes, decode steps, prefill and traffic.

    python benchmarks/eviction.py                         # everything, on two cores
    python benchmarks/eviction.py --quick                 # small shapes, to see that it runs
    python benchmarks/eviction.py --only decode,recall    # parts: bytes, decode, recall, prefill, traffic
    python benchmarks/record.py benchmarks/results/eviction-....json benchmarks/recorded/eviction-<date>.json

| part | what it measures |
|---|---|
| bytes | `nbytes` after 16,384 tokens, relative to transformers' `DynamicCache` |
| decode | the attention of a decode step at 16,384 tokens, update and selection included, of caches that evict |
| recall | the same for recall of 64 pages at 8,192, 16,384 and 32,768 tokens |
| prefill | a forward pass over 4,096 tokens with each rule, relative to `kvlayers.DynamicCache` |
| traffic | bytes that travel to the device in a step when recall is offloaded; `pages="all"` beside no recall |

Attention is that of 32 heads and 8 KV heads of 128 in bfloat16, through the function of transformers that models call,
without the rest of a model. Prefill runs two layers of the shape of Llama 3.2 1B with random weights in float32.
Contenders take turns in an order that rotates; a ratio is the median of the trials' ratios.

The exit code is 1 if an output is wrong, and if all parts ran, also if a target is missed.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers

import kvlayers
from kvlayers.eviction import eviction_rule, eviction_rule_names
from lib import report
from lib.contenders import Maker, fill
from lib.evicting import measure_attention, measure_prefill, states_of, time_ratio
from lib.internals import cache_nbytes
from lib.report import mb, ms, shown
from lib.workload import QUICK_SHAPE, RandomModel, Shape
from offload import decode, traffic_of

PARTS = ("bytes", "decode", "recall", "prefill", "traffic")

TRANSFORMERS, DENSE = "transformers.DynamicCache", "kvlayers.DynamicCache"
EVEN, PER_HEAD, BUDGET = "keep 0.25", "keep 0.25, per head", "budget of a quarter"
RECALL = "recall"
RULE = "keydiff"
"""The rule of caches whose decode steps are timed: it looks at keys, so that caches can be filled without queries."""

ATTENTION = Shape(layers=2, heads=32, kv_heads=8, head_dim=128)
QUICK_ATTENTION = Shape(layers=1, heads=4, kv_heads=2, head_dim=32)
PREFILL_SHAPE = Shape(layers=2, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=1024)
TRAFFIC_SHAPE = Shape(layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=64, vocab=512)

DENSE_MAKERS: dict[str, Maker] = {
    TRANSFORMERS: lambda config, length: transformers.DynamicCache(config=config),
    DENSE: lambda config, length: kvlayers.DynamicCache(config=config, length_hint=length),
}


def evicting(**options: Any) -> Maker:
    return lambda config, length: kvlayers.EvictingCache(config=config, **{"rule": RULE, **options})


def recalling(pages: int | str, **options: Any) -> Maker:
    recall = kvlayers.layers.Recall(pages=pages)
    return lambda config, length: kvlayers.DynamicCache(config=config, length_hint=length, recall=recall, **options)


def options() -> report.Options:
    made = report.Options("eviction", __doc__, threads=2, quick="small shapes and few tokens")
    made.some_of("--only", PARTS, "parts, separated by commas")
    made.some_of("--rules", eviction_rule_names(), "rules of the prefill, separated by commas")
    made.add("--trials", type=int, help="trials (5; of prefill 3)")
    made.sized("--steps", 192, 32, "decode steps of a trial; 192 are three evictions of a budget")
    return made


def bytes_makers() -> dict[str, Maker]:
    found = {TRANSFORMERS: DENSE_MAKERS[TRANSFORMERS]}
    for keep, bits in ((0.5, None), (0.25, None), (0.5, 4)):
        for per_head in (False, True):
            name = f"keep {keep}{f', {bits} bits' if bits else ''}{', per head' if per_head else ''}"
            packing = {"quantization": {"nbits": bits}} if bits else {}
            found[name] = evicting(keep=keep, per_head=per_head, **packing)
    return found


def decode_makers(length: int) -> dict[str, Maker]:
    return {
        **DENSE_MAKERS,
        EVEN: evicting(keep=0.25, per_head=False),
        PER_HEAD: evicting(keep=0.25, per_head=True),
        BUDGET: evicting(budget=length // 4, per_head=False),
    }


def hold_to_targets(run: report.Session, results: Mapping[str, Any]) -> None:
    for name, entry in results.get("bytes", {}).items():
        if name != TRANSFORMERS:
            most = 0.16 if "bits" in name else float(name.split()[1].rstrip(",")) + 0.03
            run.target(f"bytes relative to dense, {name}", entry["of_dense"], at_most=most)
    for at, measured in results.get("decode", {}).items():
        for dense in DENSE_MAKERS:
            what = f"attention at {at}, {EVEN} relative to {dense}"
            run.target(what, time_ratio(measured[EVEN], measured[dense]), at_most=0.35)
        what = f"attention at {at}, per head relative to even"
        run.target(what, time_ratio(measured[PER_HEAD], measured[EVEN]), at_most=1.15)
    recall = results.get("recall", {})
    if len(recall) > 1:
        first, *_, last = recall
        middle = list(recall)[len(recall) // 2]
        for dense in DENSE_MAKERS:
            what = f"attention at {middle}, recall relative to {dense}"
            run.target(what, time_ratio(recall[middle][RECALL], recall[middle][dense]), at_most=0.45)
        growth = time_ratio(recall[last][RECALL], recall[first][RECALL])
        run.target(f"recall at {last} relative to {first}", growth, at_most=1.2)
    prefill = results.get("prefill", {})
    for rule in prefill:
        if rule != DENSE:
            most = 1.2 if eviction_rule(rule).queries else 1.1
            run.target(f"prefill with {rule}", time_ratio(prefill[rule], prefill[DENSE]), at_most=most)
    if "traffic" in results:
        moved = [entry["to_device"] for entry in results["traffic"]["offloaded"].values()]
        # Pages that the last step chose too do not travel again, so all chosen pages are the bound at every length.
        of_chosen = max(moved) / results["traffic"]["chosen"]
        run.target("most bytes to the device in a step relative to all chosen pages", of_chosen, at_most=1)
        run.target('logits of pages="all" equal to those without recall', results["traffic"]["exact"], at_least=1)


def main(arguments: Sequence[str] | None = None) -> int:
    given = options().parse(arguments)
    given.prefill_trials = given.trials or (1 if given.quick else 3)
    given.trials = given.trials or (1 if given.quick else 5)
    results: dict[str, Any] = {}
    wrong: list[str] = []
    with report.session(given) as run:
        for part in PARTS:
            if part in given.only:
                results[part], found = MEASURES[part](given, run.ticking)
                wrong += found
                # At once, as a whole run takes long.
                show(run, part, results[part])
    hold_to_targets(run, results)
    for each in wrong:
        run.console.print(f"[red]wrong[/]: {each}")
    run.finish(results, wrong=wrong)
    is_whole = not given.quick and set(given.only) == set(PARTS)
    return 1 if wrong or (is_whole and not all(each["met"] for each in run.targets)) else 0


def _bytes(given: Any, ticking: Any) -> tuple[Any, list[str]]:
    tokens, found = 1024 if given.quick else 16384, {}
    shape = QUICK_ATTENTION if given.quick else ATTENTION
    config, states = shape.config(), states_of(shape, tokens)
    with torch.no_grad():
        for name, make in bytes_makers().items():
            cache = make(config, tokens)
            fill(cache, states, tokens)
            held, dense = cache_nbytes(cache), found.get(TRANSFORMERS, {}).get("held")
            found[name] = {"held": held, "length": cache.get_seq_length(), "of_dense": held / (dense or held)}
    wrong = [f"{name}: its length is {entry['length']}" for name, entry in found.items() if entry["length"] != tokens]
    return found, wrong


def _decode(given: Any, ticking: Any) -> tuple[Any, list[str]]:
    tokens = 1024 if given.quick else 16384
    shape = QUICK_ATTENTION if given.quick else dataclasses.replace(ATTENTION, layers=4)
    tick = ticking(f"attention of decode steps at {tokens}", given.trials)
    return measure_attention(shape, decode_makers(tokens), [tokens], given.steps, given.trials, tick)


def _recall(given: Any, ticking: Any) -> tuple[Any, list[str]]:
    lengths = [512, 1024, 2048] if given.quick else [8192, 16384, 32768]
    shape = QUICK_ATTENTION if given.quick else ATTENTION
    makers = {**DENSE_MAKERS, RECALL: recalling(4 if given.quick else 64)}
    tick = ticking(f"attention with recall at {lengths[0]} to {lengths[-1]}", given.trials)
    return measure_attention(shape, makers, lengths, given.steps, given.trials, tick)


def _prefill(given: Any, ticking: Any) -> tuple[Any, list[str]]:
    tokens = 512 if given.quick else 4096
    makers = {DENSE: DENSE_MAKERS[DENSE], **{rule: evicting(rule=rule, keep=0.5) for rule in given.rules}}
    # Few CPUs multiply matrices of bfloat16, and on the others a pass takes most of a minute.
    workload = RandomModel(QUICK_SHAPE if given.quick else PREFILL_SHAPE, dtype=torch.float32)
    tick = ticking(f"prefill of {tokens}", given.prefill_trials + 1)
    return measure_prefill(workload.model, workload.prompt(tokens), makers, given.prefill_trials, tick)


def _traffic(given: Any, ticking: Any) -> tuple[Any, list[str]]:
    """Bytes that a step moves when recall is offloaded, and whether recall of all pages is bit-equal to no recall."""
    lengths, pages, new = ([512, 1024], 4, 8) if given.quick else ([2048, 4096, 8192], 16, 8)
    workload = RandomModel(TRAFFIC_SHAPE)
    model, config = workload.model, workload.model.config
    offloaded, wrong = {}, []
    for length in lengths:
        prompt = workload.prompt(length)
        moved = traffic_of(model, lambda: recalling(pages, offloading=True)(config, 0), prompt, new)
        if moved.pop("tokens") != decode(model, recalling(pages)(config, 0), prompt, new)[0]:
            wrong.append(f"offloaded recall at {length}: other tokens than without offloading")
        offloaded[str(length)] = moved
    prompt = workload.prompt(lengths[0])
    (tokens, logits), (others, other_logits) = (
        decode(model, make(config, lengths[0] + new), prompt, new) for make in (DENSE_MAKERS[DENSE], recalling("all"))
    )
    exact = tokens == others and torch.equal(logits, other_logits)
    # Keys and values of the pages that all KV heads of all layers choose, in bfloat16.
    shape, page_tokens = TRAFFIC_SHAPE, kvlayers.layers.Recall().page_tokens
    chosen = pages * page_tokens * shape.layers * shape.kv_heads * shape.head_dim * 2 * torch.bfloat16.itemsize
    return {"offloaded": offloaded, "pages": pages, "chosen": chosen, "exact": int(exact)}, wrong


MEASURES: dict[str, Callable[[Any, Any], tuple[Any, list[str]]]] = {
    "bytes": _bytes,
    "decode": _decode,
    "recall": _recall,
    "prefill": _prefill,
    "traffic": _traffic,
}


def show(run: report.Session, part: str, found: Any) -> None:
    if part == "bytes":
        columns = {"MB": mb("held", ".2f"), "of dense": shown("of_dense", ".4f")}
        run.table("Bytes after a prompt", "cache", {"": found}, columns)
        return
    if part == "traffic":
        keys = {"to device": "to_device", "to host": "to_host", "peak there": "peak_on_device", "held": "held"}
        columns = {heading: shown(key, ",.0f") for heading, key in keys.items()}
        run.table("Offloaded recall, bytes a step", "tokens", {"": found["offloaded"]}, columns)
        return
    for measured in [found] if part == "prefill" else found.values():
        for entry in measured.values():
            entry["of_dense"] = time_ratio(entry, measured[DENSE])
    if part == "prefill":
        columns = {"seconds": shown("median", ".3f"), "of dense": shown("of_dense", ".3f")}
        run.table("Prefill", "rule", {"": found}, columns)
        return
    columns = {"ms, mean": ms("mean", ".3f"), "median": ms("median", ".3f"), "of dense": shown("of_dense", ".3f")}
    run.table("Attention of a decode step", "tokens, cache", found, {**columns, "MB held": mb("held")})


if __name__ == "__main__":
    sys.exit(main())
