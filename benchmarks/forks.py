"""Continues one prompt many times: the cost of a fork and the memory of 40 continuations, beside transformers' caches.

    python benchmarks/forks.py            # a fork of 8,192 tokens, 40 continuations of 1,024
    python benchmarks/forks.py --quick    # fewer tokens, to see that it runs

Both are measured on a random llama-like model in bfloat16. A fork is compared with `copy.deepcopy` of transformers'
DynamicCache with the same states, continuations with its `batch_repeat_interleave`. Contenders take turns; figures are
medians over the trials.

The exit code is 1 if a token differs from the one with transformers' cache, except for ties in bfloat16.
"""

import copy
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from lib import report
from lib.contenders import fill
from lib.internals import quiet_clock
from lib.turns import Turns
from lib.workload import FILL_CHUNK, QUICK_SHAPE, RandomModel, Shape

KVLAYERS, TRANSFORMERS = "kvlayers", "transformers"
TIE = 0.05
"""The difference of two logits within which bfloat16 may choose either: it has 8 bits, and logits are of order 1."""


def options() -> report.Options:
    made = report.Options("forks", __doc__, quick="a small model and few tokens")
    made.sized("--tokens", 8192, 512, "tokens of the cache that is forked")
    made.sized("--prompt", 1024, 512, "tokens of the prompt that is continued")
    made.sized("--continuations", 40, 40, "sequences that go on from it")
    made.sized("--new", 48, 8, "tokens of each")
    made.sized("--trials", 15, 3, "forks that are timed")
    return made


def empty_caches(model: Any) -> dict[str, Any]:
    return {
        TRANSFORMERS: transformers.DynamicCache(config=model.config),
        KVLAYERS: kvlayers.DynamicCache(config=model.config),
    }


def storages(cache: Any) -> dict[int, int]:
    tensors = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    return {states.untyped_storage().data_ptr(): states.untyped_storage().nbytes() for states in tensors}


def measure_forks(workload: RandomModel, tokens: int, trials: int) -> dict[str, Any]:
    """Seconds of a fork and of a deepcopy, in turns, and the bytes that a fork adds before it is written to."""
    caches, turns, model = empty_caches(workload.model), Turns((KVLAYERS, TRANSFORMERS)), workload.model
    states = workload.shape.states(tokens, model.dtype)
    for cache in caches.values():
        fill(cache, states, FILL_CHUNK)
    own = caches[KVLAYERS]
    with quiet_clock():
        for _ in range(trials):
            turns.take(lambda name: own.fork() if name == KVLAYERS else copy.deepcopy(caches[TRANSFORMERS]))
    added = sum((storages(own.fork()) | storages(own)).values()) - sum(storages(own).values())
    return {
        "seconds": turns.seconds,
        "medians": {name: turns.median(name) for name in turns.seconds},
        "bytes_added": added,
        "held": own.nbytes,
    }


def continue_all(model: Any, cache: Any, first: Tensor, new: int) -> tuple[Tensor, Tensor, int, float]:
    """Greedy tokens of all sequences, the gap between each one's two most likely logits, peak bytes, seconds a step."""
    ids, found, gaps, most, seconds = first, [], [], 0, []
    with quiet_clock():
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
    first = torch.randint(3, model.config.vocab_size, (count, 1), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    tokens, gaps = {}, {}
    for name, cache in empty_caches(model).items():
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
    given = options().parse(arguments)
    with report.session(given) as run:
        workload = RandomModel(QUICK_SHAPE if given.quick else Shape())
        forks = measure_forks(workload, given.tokens, given.trials)
        many = measure_continuations(workload.model, workload.prompt(given.prompt), given.continuations, given.new)
    medians = forks["medians"]
    rows = {
        "kvlayers, fork()": {"median": medians[KVLAYERS], "added": forks["bytes_added"]},
        "transformers, deepcopy": {"median": medians[TRANSFORMERS], "added": forks["held"]},
    }
    columns = {"ms": report.ms("median", ".3f"), "MB added": report.mb("added")}
    run.table(f"Another continuation of {given.tokens} tokens, {workload.name}", "", {"": rows}, columns)
    title = f"{given.continuations} continuations of {given.prompt} tokens, {given.new} each"
    columns = {"most MB held": report.mb("most_bytes"), "ms a step": report.ms("step", ".1f")}
    run.table(title, "", {"": {name: many[name] for name in (KVLAYERS, TRANSFORMERS)}}, columns)
    run.target("fork, times as fast as deepcopy", medians[TRANSFORMERS] / medians[KVLAYERS], at_least=100)
    run.target("bytes that a fork adds", forks["bytes_added"], at_most=0)
    share = many[KVLAYERS]["most_bytes"] / many[TRANSFORMERS]["most_bytes"]
    run.target("bytes of continuations, relative to expanded", share, at_most=0.1)
    run.console.print(f"{many['other_tokens']} sequences with other tokens, {many['ties']} with a tie")
    run.finish({"forks": forks, "continuations": many})
    return 1 if many["other_tokens"] else 0


if __name__ == "__main__":
    sys.exit(main())
