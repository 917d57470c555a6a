"""A branch of a stored document: its decode steps beside those of a contiguous cache, and what its insertion costs."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvlayers
from lib.contenders import fill
from lib.internals import quiet_clock
from lib.peak import MovedBytes
from lib.timing import Disagreements, Tick, step
from lib.turns import Turns, ratio
from lib.workload import FILL_CHUNK, RandomModel, Shape

CONTIGUOUS, BEHIND_HIT = "contiguous", "behind a hit"
QUESTION_TOKENS = 16
COUNTED = 2
ROOM = 2**36


class Kind(NamedTuple):
    """A kind of cache: the dtype of its model, and how it is made."""

    dtype: torch.dtype
    make: Callable[[Any], kvlayers.Cache]


def _dense(config: Any) -> kvlayers.Cache:
    return kvlayers.DynamicCache(config=config)


KINDS = {
    "float32": Kind(torch.float32, _dense),
    "bfloat16": Kind(torch.bfloat16, _dense),
    "int4": Kind(torch.bfloat16, lambda config: kvlayers.QuantizedCache(config=config, nbits=4)),
}


def branch_ids(document: Tensor, number: int, tokens: int) -> Tensor:
    return torch.cat([document, document.new_full((tokens,), int(document.max()) + 1 + number)])


def hit_in(store: kvlayers.PrefixStore, ids: Tensor, covered: int) -> kvlayers.Cache:
    """The cache that a store finds for ids, which has seen `covered` tokens."""
    hit = store.lookup(ids, model="benchmark")
    if hit.cache is None or hit.covered != covered:
        raise RuntimeError(f"the store found {hit.covered} of {covered} tokens: {hit.reason}")
    return hit.cache


def measure_steps(
    shape: Shape, name: str, tokens: int, steps: int, trials: int, disagreements: Disagreements, tick: Tick
) -> dict[str, Any]:
    """Seconds of steps behind a hit on `tokens` tokens and a question, and of a contiguous cache with equal states.

    The two caches take turns at every step, and are passed the same tokens. The hit is the third one on its document,
    so that the spare room of the document is taken.
    """
    kind = KINDS[name]
    workload = RandomModel(shape, dtype=kind.dtype)
    model, config = workload.model, workload.model.config
    document, ids = shape.states(tokens, kind.dtype), torch.arange(tokens)
    questions = [shape.states(QUESTION_TOKENS, kind.dtype, seed) for seed in (1, 2, 3)]
    turns, apart, held = Turns((CONTIGUOUS, BEHIND_HIT)), 0.0, {}

    def filled(*parts: list[tuple[Tensor, Tensor]]) -> kvlayers.Cache:
        cache = kind.make(config)
        for part in parts:
            fill(cache, part, FILL_CHUNK)
        return cache

    for trial in range(trials):
        gc.collect()
        with torch.no_grad():
            store = kvlayers.PrefixStore(ROOM)
            store.insert(ids, filled(document), model="benchmark")
            hits = [hit_in(store, branch_ids(ids, number, QUESTION_TOKENS), tokens) for number in range(3)]
            for hit, question in zip(hits, questions, strict=True):
                fill(hit, question, QUESTION_TOKENS)
            caches = {CONTIGUOUS: filled(document, questions[-1]), BEHIND_HIT: hits[-1]}
        held = {key: cache.nbytes for key, cache in caches.items()}
        turns.next, token = trial, 1
        with quiet_clock():
            for index in range(steps):
                found = turns.take_timed(lambda way, caches=caches, token=token: step(model, caches[way], token))
                where = {"cache": f"kvlayers, {name}, {BEHIND_HIT}", "model": workload.name, "trial": trial}
                where["tokens"] = tokens + QUESTION_TOKENS + index
                apart = max(apart, disagreements.compare_step(where, found[CONTIGUOUS], found[BEHIND_HIT]))
                token = int(found[CONTIGUOUS].argmax())
        caches.clear()
        del hits, store
        tick()
    return {
        "seconds": {way: [turns.seconds[way]] for way in turns.seconds},
        "processor": {way: [turns.processor[way]] for way in turns.processor},
        "medians": {way: turns.median(way) for way in turns.seconds},
        "ratio": turns.ratio(BEHIND_HIT, CONTIGUOUS),
        "processor_ratio": ratio(turns.processor, BEHIND_HIT, CONTIGUOUS),
        "held": held,
        "logit_distance": apart,
    }


def measure_insert(
    shape: Shape, dtype: torch.dtype, tokens: int, new: int, branches: int, tick: Tick
) -> dict[str, Any]:
    """What branches of `new` tokens on a document of `tokens` cost: seconds, bytes written, and bytes held more.

    `moved` are bytes that `insert()` writes, and `moved_in_all` those of the look-up, the new states and the insertion.
    They are counted for the first `COUNTED` branches; the others are timed, since a counted operation takes longer.
    """
    ids, store = torch.arange(tokens), kvlayers.PrefixStore(ROOM)
    of_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
    found: dict[str, list[Any]] = {name: [] for name in ("seconds", "processor", "moved", "moved_in_all", "more_bytes")}
    with torch.no_grad():
        stored = kvlayers.DynamicCache()
        fill(stored, shape.states(tokens, dtype), FILL_CHUNK)
        store.insert(ids, stored, model="benchmark")
        del stored
        for number in range(branches):
            own, states = branch_ids(ids, number, new), shape.states(new, dtype, 1 + number)
            before = store.statistics.bytes
            with MovedBytes() as in_all:
                branch = hit_in(store, own, tokens)
                fill(branch, states, new)
            if number < COUNTED:
                with MovedBytes() as moved:
                    store.insert(own, branch, model="benchmark")
                found["moved"].append(moved.nbytes)
                found["moved_in_all"].append(in_all.nbytes + moved.nbytes)
            else:
                with quiet_clock():
                    begin, processor = time.perf_counter(), time.process_time()
                    store.insert(own, branch, model="benchmark")
                    found["seconds"].append(time.perf_counter() - begin)
                    found["processor"].append(time.process_time() - processor)
            found["more_bytes"].append(store.statistics.bytes - before)
            del branch
            tick()
    return {
        **found,
        "median": statistics.median(found["seconds"]),
        "slowest": max(found["seconds"]),
        "branch_bytes": new * of_token,
        "document_bytes": tokens * of_token,
    }
