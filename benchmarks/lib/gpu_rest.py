"""Steps that measure offloading, compiled static caches, and generation when memory runs out."""

import dataclasses
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

import kvlayers
from lib.compiling import INDUCTOR, Compiled, nothing_in_memory, options_of
from lib.contenders import KVLAYERS, KVLAYERS_STATIC, TRANSFORMERS_STATIC, compiled
from lib.generation import GENERATORS, SERVING, Job, measure_generate
from lib.gpu_environment import seconds_of
from lib.gpu_model import (
    CACHES,
    ONE_BILLION,
    REFERENCE,
    compare_logits,
    expected_logits,
    fill_with_random,
    filled,
    guarded,
    llama,
    newest_logits,
    token_ids,
)
from lib.gpu_stage import NO_DEVICE, Findings, Setup, Step
from lib.gpu_timing import counted_captures, median, milliseconds
from lib.internals import interleaved
from lib.timing import Disagreements

OFFLOADED, OFFLOADED_INT4 = "kvlayers offloaded", "kvlayers offloaded int4"
TRANSFORMERS_OFFLOADED = "transformers offloaded"
OFFLOADED_CACHES: dict[str, Callable[[Any, bool], Any]] = {
    OFFLOADED: lambda config, offloading: kvlayers.DynamicCache(config=config, offloading=offloading),
    OFFLOADED_INT4: lambda config, offloading: kvlayers.QuantizedCache(config=config, nbits=4, offloading=offloading),
    TRANSFORMERS_OFFLOADED: lambda config, offloading: transformers.DynamicCache(config=config, offloading=offloading),
}


def one_billion(setup: Setup) -> Any:
    """A model of 1.1 billion parameters, made once for all steps in a row that use it."""
    return setup.keep("one billion", lambda: llama(setup, ONE_BILLION))


def offloading(setup: Setup) -> Findings:
    """Decode steps with offloaded caches, beside transformers' and beside what the bus allows."""
    found = Findings()
    model = one_billion(setup)
    tokens, block, trials = setup.choose((32768, 16, 3), (256, 2, 2))
    home = torch.empty(setup.choose(1 << 28, 1 << 16), dtype=torch.uint8, pin_memory=setup.on_cuda)
    there = torch.empty_like(home, device=setup.device)
    bandwidth = len(home) / seconds_of(setup, lambda: there.copy_(home, non_blocking=True))
    found.add("pinned memory to the device", bandwidth / 1e9, "GB/s")
    names = list(OFFLOADED_CACHES)
    if not setup.on_cuda:
        names.remove(TRANSFORMERS_OFFLOADED)
        found.missing[TRANSFORMERS_OFFLOADED] = f"{NO_DEVICE}: it copies on a stream"
    caches: dict[tuple[str, bool], Any] = {}
    times: dict[str, list[float]] = {name: [] for name in names}
    steps = (trials + 1) * block
    ids = token_ids(setup, model.config, 1, steps)
    reference = functools.partial(filled, setup, model.config, CACHES[REFERENCE], tokens, 1)
    _, allowed = expected_logits(model, reference, ids[:, :1])

    def decode(name: str, is_offloaded: bool, trial: int) -> list[Any]:
        cache = caches[name, is_offloaded]
        return [newest_logits(model, cache, ids[:, [step]]) for step in range(trial * block, (trial + 1) * block)]

    def make(name: str) -> None:
        # With the same states on the device, for the tokens that it must give. No two see the same lengths, for each
        # of which torch's attention may prepare.
        for is_offloaded in (True, False):
            cache = caches[name, is_offloaded] = OFFLOADED_CACHES[name](model.config, is_offloaded)
            fill_with_random(setup, model.config, cache, tokens + names.index(name) * steps)

    def turn(name: str, trial: int) -> None:
        logits: list[list[Any]] = []
        took = milliseconds(setup, lambda: logits.append(decode(name, True, trial))) / block
        times[name] += [took] if trial else []
        logits.append(decode(name, False, trial))
        compare_logits(found, f"{name}, trial {trial}", torch.stack(logits[1]), torch.stack(logits[0]), allowed)

    usable = [name for name in names if guarded(found, name, functools.partial(make, name))]
    for trial in setup.in_time(found, range(trials + 1)):
        for name in interleaved(usable, trial):
            guarded(found, f"{name}, trial {trial}", functools.partial(turn, name, trial))
    for name in names:
        if not times[name]:
            continue
        found.add(f"{name}: a step", median(times[name]), "ms")
        if name != TRANSFORMERS_OFFLOADED:
            moved = caches[name, True].traffic.of_step().to_device
            bus = 1000 * moved / bandwidth
            found.add(f"{name}: copying its {moved / 1e6:,.0f} MB takes", bus, "ms")
            found.add("  of the rate that this allows", 100 * bus / median(times[name]), "%", "85 or more")
        if times.get(TRANSFORMERS_OFFLOADED):
            ratio = median(times[TRANSFORMERS_OFFLOADED]) / median(times[name])
            found.add("  times as fast as transformers'", ratio, "x")
    found.details["ms"] = times
    return found


def _job(setup: Setup, new: int) -> Job:
    present, reserve = setup.choose((1024, 32768), (32, 1024))
    model = one_billion(setup)
    backend = INDUCTOR if setup.on_cuda else "eager"
    return Job("random llama", model, token_ids(setup, model.config, 1, present), new, reserve, backend)


def _ticks() -> Callable[[], None]:
    count = itertools.count(1)
    return lambda: print(f"          call {next(count)}", flush=True)


def _add_disagreements(found: Findings, disagreements: Disagreements) -> None:
    found.details["disagreements"] = disagreements.found
    found.expect(not disagreements.failures, f"{disagreements.failures} tokens are not the reference's, and no ties")


def compiled_generate(setup: Setup) -> Findings:
    """Calls of `generate()` with compiled static caches of 32,768 reserved tokens, 1,024 of them held.

    The time of the prefill is taken out.
    """
    found, disagreements = Findings(), Disagreements()
    job = _job(setup, setup.choose(128, 8))
    contenders = {name: GENERATORS[name] for name in SERVING}
    trials = setup.choose(3, 1)
    with nothing_in_memory(job.backend, setup.device):
        prefills = measure_generate(dataclasses.replace(job, new=1), contenders, trials, disagreements, _ticks())
        calls = measure_generate(job, contenders, trials, disagreements, _ticks())
    rates = {}
    for name in SERVING:
        prefill = median([took for (took,) in prefills[name]["seconds"]])
        took = median([took for (took,) in calls[name]["seconds"]]) - prefill
        # The prefill gives the first token.
        rates[name] = (job.new - 1) / took
        found.add(f"{name}: generate()", rates[name], "tokens/s")
        found.add("  its first call, compiling", calls[name]["first"], "s")
        found.add("  graphs", calls[name]["graphs"], "graphs")
        later = calls[name]["recompiles"]
        found.expect(not later, f"{name}: {later} graphs were compiled after the first call")
    best = rates[compiled(KVLAYERS_STATIC)]
    found.add("  times transformers' compiled", best / rates[compiled(TRANSFORMERS_STATIC)], "x", "1.5 or more")
    found.add("  times kvlayers.DynamicCache, eager", best / rates[KVLAYERS], "x", "4 or more")
    found.details |= {"prefills": prefills, "calls": calls}
    _add_disagreements(found, disagreements)
    return found


def windows(setup: Setup) -> Findings:
    """CUDA graphs that a compiled loop over a model with windows records, and its tokens beside an eager loop's."""
    found = Findings()
    window, prompt, new = setup.choose((1024, 1500, 96), (24, 40, 12))
    shape = dataclasses.replace(ONE_BILLION, layers=4)
    model = setup.keep("windows", lambda: llama(setup, shape, sliding_window=window))
    backend = INDUCTOR if setup.on_cuda else "eager"
    ids = token_ids(setup, model.config, 1, prompt + new)
    logits: dict[str, list[Any]] = {}
    with nothing_in_memory(backend, setup.device), counted_captures() as captures:
        forward = Compiled(model, options_of(backend, "reduce-overhead"))
        makers = {
            "eager": (kvlayers.DynamicCache(config=model.config), model),
            "compiled": (kvlayers.StaticCache(model.config, max_cache_len=prompt + new), forward),
        }
        for name, (cache, run) in makers.items():
            model(input_ids=ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
            logits[name] = []
            for step in range(prompt, prompt + new):
                torch.compiler.cudagraph_mark_step_begin()
                output = run(input_ids=ids[:, step : step + 1], past_key_values=cache, use_cache=True)
                logits[name].append(output.logits[0, -1].float().clone())
        recorded = captures[0]
    disagreements = Disagreements()
    for step, (expected, seen) in enumerate(zip(logits["eager"], logits["compiled"], strict=True)):
        where = {"model": "windows", "cache": compiled(KVLAYERS_STATIC), "tokens": prompt + step, "trial": 0}
        disagreements.compare_step(where, expected, seen)
    found.add(f"compiled graphs in {new} steps", forward.graphs, "graphs", "1 or 2")
    found.add(f"CUDA graphs in {new} steps", recorded, "graphs", "33 where the offset is a number of Python")
    found.expect(recorded <= 8, f"{recorded} CUDA graphs were recorded")
    _add_disagreements(found, disagreements)
    return found


@contextmanager
def memory_limit(setup: Setup, nbytes: int) -> Iterator[None]:
    """Let torch allocate only so many bytes more than are allocated now, on a GPU."""
    if not setup.on_cuda:
        yield
        return
    setup.free_memory()
    total = torch.cuda.get_device_properties(setup.device).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(setup.device) + nbytes) / total, setup.device
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setup.device)


def out_of_memory(setup: Setup) -> Findings:
    """`resilient_generate` where a cache in full precision does not fit, and one of 4 bits does."""
    found = Findings()
    model = one_billion(setup)
    config = model.config
    tokens, chunk, new = setup.choose((131072, 1024, 16), (256, 64, 4))
    prompt = token_ids(setup, config, 1, tokens)
    dense = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * (tokens + new)
    # Beside the cache of 4 bits there is room for the activations and the mask of a chunk.
    room = int(0.55 * dense) + (1200 << 20)
    arguments = {"max_new_tokens": new, "do_sample": False, "prefill_chunk_size": chunk}
    with warnings.catch_warnings(record=True) as seen, memory_limit(setup, room):
        warnings.simplefilter("always")
        begin = time.perf_counter()
        ids = kvlayers.resilient_generate(model, prompt, ladder=(None, "int4", "offloaded"), **arguments)
        setup.synchronize()
        seconds = time.perf_counter() - begin
    steps = [str(each.message) for each in seen if issubclass(each.category, kvlayers.SteppedDownWarning)]
    found.details |= {"room": room, "dense cache": dense, "warnings": steps, "tokens": ids[0, tokens:].tolist()}
    found.add(f"{tokens:,} tokens and {new} more", seconds, "s")
    found.add("steps down", len(steps), "steps", "1")
    found.expect(bool(steps) or setup.quick, "memory did not run out: the limit is too high")
    found.expect(ids.shape[1] == tokens + new, f"{ids.shape[1] - tokens} tokens instead of {new}")
    return found


OFFLOADING = Step("offloading", 45, offloading)

STEPS = (
    OFFLOADING,
    Step("compiled generate()", 150, compiled_generate),
    Step("windows", 60, windows),
    Step("memory that runs out", 60, out_of_memory),
)
