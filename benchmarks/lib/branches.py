"""A branch of a stored document: its decode steps beside those of a contiguous cache, and what its insertion costs."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvlayers
from lib.contenders import fill, random_states
from lib.internals import interleaved, quiet_clock
from lib.peak import MovedBytes
from lib.timing import Disagreements, Tick, step
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


def states_of(shape: Shape, tokens: int, dtype: torch.dtype, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Random keys and values `[1, kv_heads, tokens, head_dim]` for each layer."""
    return random_states(shape.layers, shape.kv_heads, shape.head_dim, tokens, dtype, seed)


def branch_ids(document: Tensor, number: int, tokens: int) -> Tensor:
    """Ids `[tokens]` of a document, followed by ids that only this branch has."""
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
    so that the spare room of the document is taken. `processor` is the time of the processor, of all threads together:
    other work on the machine hardly changes it.
    """
    kind = KINDS[name]
    workload = RandomModel(shape, dtype=kind.dtype)
    model, config = workload.model, workload.model.config
    document, ids = states_of(shape, tokens, kind.dtype, 0), torch.arange(tokens)
    questions = [states_of(shape, QUESTION_TOKENS, kind.dtype, seed) for seed in (1, 2, 3)]
    seconds: dict[str, list[list[float]]] = {CONTIGUOUS: [], BEHIND_HIT: []}
    processor: dict[str, list[list[float]]] = {CONTIGUOUS: [], BEHIND_HIT: []}
    apart, held = 0.0, {}
    for trial in range(trials):
        gc.collect()
        with torch.no_grad():
            stored = kind.make(config)
            fill(stored, document, FILL_CHUNK)
            store = kvlayers.PrefixStore(ROOM)
            store.insert(ids, stored, model="benchmark")
            del stored
            hits = [hit_in(store, branch_ids(ids, number, QUESTION_TOKENS), tokens) for number in range(3)]
            for hit, question in zip(hits, questions, strict=True):
                fill(hit, question, QUESTION_TOKENS)
            contiguous = kind.make(config)
            fill(contiguous, document, FILL_CHUNK)
            fill(contiguous, questions[-1], QUESTION_TOKENS)
        caches = {CONTIGUOUS: contiguous, BEHIND_HIT: hits[-1]}
        held = {key: cache.nbytes for key, cache in caches.items()}
        for times in (*seconds.values(), *processor.values()):
            times.append([])
        token = 1
        with quiet_clock():
            for index in range(steps):
                found = {}
                for way in interleaved(list(caches), trial + index):
                    begin = time.process_time()
                    took, found[way] = step(model, caches[way], token)
                    processor[way][trial].append(time.process_time() - begin)
                    seconds[way][trial].append(took)
                where = {"cache": f"kvlayers, {name}, {BEHIND_HIT}", "model": workload.name, "trial": trial}
                where["tokens"] = tokens + QUESTION_TOKENS + index
                apart = max(apart, disagreements.compare_step(where, found[CONTIGUOUS], found[BEHIND_HIT]))
                token = int(found[CONTIGUOUS].argmax())
        del hits, contiguous, caches, store
        tick()
    return {
        "seconds": seconds,
        "processor": processor,
        "medians": {way: statistics.median(itertools.chain(*times)) for way, times in seconds.items()},
        "ratio": _ratio(seconds),
        "processor_ratio": _ratio(processor),
        "held": held,
        "logit_distance": apart,
    }


def _ratio(times: dict[str, list[list[float]]]) -> float:
    """The median ratio of the two caches' times of the same step."""
    pairs = zip(itertools.chain(*times[BEHIND_HIT]), itertools.chain(*times[CONTIGUOUS]), strict=True)
    return statistics.median(hit / own for hit, own in pairs)


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
        fill(stored, states_of(shape, tokens, dtype, 0), FILL_CHUNK)
        store.insert(ids, stored, model="benchmark")
        del stored
        for number in range(branches):
            own, states = branch_ids(ids, number, new), states_of(shape, new, dtype, 1 + number)
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
