"""Continues one prompt many times: the cost of a fork and the memory of 40 continuations, beside transformers' caches.

    python lab/benchmarks/forks.py            # a fork of 8,192 tokens, 40 continuations of 1,024
    python lab/benchmarks/forks.py --quick    # fewer tokens, to see that it runs

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
from lib.timing import Turns
from lib.workload import FILL_CHUNK

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


def forks(run: report.Session) -> dict[str, Any]:
    """Seconds of a fork and of a deepcopy, in turns, and the bytes that a fork adds before it is written to."""
    workload, turns = run.random(), Turns((KVLAYERS, TRANSFORMERS))
    caches, tokens = empty_caches(workload.model), run.given.tokens
    states = workload.shape.states(tokens, workload.model.dtype)
    for cache in caches.values():
        fill(cache, states, FILL_CHUNK)
    own = caches[KVLAYERS]
    with quiet_clock():
        for _ in range(run.given.trials):
            turns.take(lambda name: own.fork() if name == KVLAYERS else copy.deepcopy(caches[TRANSFORMERS]))
    added = sum((storages(own.fork()) | storages(own)).values()) - sum(storages(own).values())
    found = {
        "kvlayers, fork()": {"median": turns.median(KVLAYERS), "added": added},
        "transformers, deepcopy": {"median": turns.median(TRANSFORMERS), "added": own.nbytes},
    }
    columns = {"ms": report.ms("median", ".3f"), "MB added": report.mb("added")}
    run.table(f"Another continuation of {tokens} tokens, {workload.name}", "", {"": found}, columns)
    return {**found, "seconds": turns.seconds}


def continue_all(model: Any, cache: Any, ids: Tensor, new: int) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Greedy tokens of all sequences, the gap between each one's two most likely logits, and what it took."""
    found, gaps, most, seconds = [], [], 0, []
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
    return torch.cat(found, 1), torch.stack(gaps, 1), {"most_bytes": most, "step": statistics.median(seconds)}


def continuations(run: report.Session) -> dict[str, Any]:
    given, workload = run.given, run.random()
    model, prompt = workload.model, workload.prompt(given.prompt)
    shape = (given.continuations, 1)
    first = torch.randint(3, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    tokens, gaps, found = {}, {}, {}
    for name, cache in empty_caches(model).items():
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        repeat = cache.expand if isinstance(cache, kvlayers.Cache) else cache.batch_repeat_interleave
        repeat(given.continuations)
        tokens[name], gaps[name], found[name] = continue_all(model, cache, first, given.new)
        gc.collect()
    others = tokens[KVLAYERS] != tokens[TRANSFORMERS]
    # After a sequence's first different token, its text differs.
    ties = gaps[TRANSFORMERS].gather(1, others.int().argmax(1)[:, None])[:, 0] <= TIE
    wrong, tied = int((others.any(1) & ~ties).sum()), int((others.any(1) & ties).sum())
    run.expect(not wrong, f"{wrong} of {given.continuations} continuations have other tokens")
    title = f"{given.continuations} continuations of {given.prompt} tokens, {given.new} each, {tied} with a tie"
    run.table(title, "", {"": found}, {"most MB held": report.mb("most_bytes"), "ms a step": report.ms("step", ".1f")})
    return {**found, "ties": tied}


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), {"forks": forks, "continuations": continuations})


if __name__ == "__main__":
    sys.exit(main())
