"""Steps that measure decoding, first tokens and offloading beside transformers' caches."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from lib import cases
from lib.gpu_model import (
    CACHES,
    DYNAMIC,
    FP8,
    INT4,
    INT8,
    ONE_BILLION,
    REFERENCE,
    WITHOUT_CUDNN,
    column_of,
    compare_logits,
    device_milliseconds,
    eight_billion,
    expected_logits,
    fill_with_random,
    filled,
    llama,
    measure_decoding,
    median,
    milliseconds,
    newest_logits,
    recorded,
    token_ids,
)
from lib.gpu_stage import NO_DEVICE, Findings, Setup, Step
from lib.timing import Turns, interleaved

SHAPES = ((8192, 1), (32768, 1), (2048, 1), (8192, 8), (32768, 8), (2048, 8))
"""Tokens and sequences, the most telling first."""

OFFLOADED, OFFLOADED_INT4 = "kvlayers offloaded", "kvlayers offloaded int4"
TRANSFORMERS_OFFLOADED = "transformers offloaded"
OFFLOADED_CACHES: dict[str, Callable[[Any, bool], Any]] = {
    OFFLOADED: cases.OFFLOADED["dynamic"],
    OFFLOADED_INT4: cases.OFFLOADED["int4"],
    TRANSFORMERS_OFFLOADED: lambda config, offloading: transformers.DynamicCache(config=config, offloading=offloading),
}


def decoding(setup: Setup) -> Findings:
    """Steps of `generate()` behind tokens of each sequence."""
    found, model = Findings(), eight_billion(setup)
    for tokens, batch in setup.in_time(found, setup.choose(SHAPES, ((256, 1), (320, 2)))):
        measure_decoding(setup, model, CACHES, tokens, batch, found)
    return found


def graphs(setup: Setup) -> Findings:
    """One step behind a fixed number of tokens as a CUDA graph: the time of the device without that of the host.

    A replay repeats the step, so that no dynamic nor packed cache can generate like this: the times say what a host
    without cost would leave.
    """
    found, model = Findings(), eight_billion(setup)
    for tokens, batch in setup.in_time(found, setup.choose(SHAPES, ((256, 1),))):
        ids, column = token_ids(setup, model.config, batch, 1), column_of(tokens, batch)
        make = functools.partial(filled, setup, model.config, tokens=tokens, batch=batch)
        _, allowed = expected_logits(model, functools.partial(make, CACHES[REFERENCE]), ids)

        def measure(
            name: str, make: Any = make, ids: Tensor = ids, allowed: float = allowed, column: str = column
        ) -> None:
            # The same two steps: what they compile and plan is not done while the second one is recorded.
            warm = make(CACHES[name])
            expected = [newest_logits(model, warm, ids) for _ in range(2)][1]
            del warm
            cache, logits = make(CACHES[name]), []

            def step() -> None:
                logits.append(newest_logits(model, cache, ids))

            if setup.on_cuda:
                replay = recorded(step)
            else:
                step()
                replay = step
            replay()
            compare_logits(found, f"{name}, {column}", expected, logits[-1], allowed)
            times = [device_milliseconds(setup, replay) for _ in range(setup.choose(20, 2))]
            found.add(name, median(times), "ms a step in a graph", column=column)
            found.details.setdefault(column, {})[name] = times

        for name in CACHES:
            if name != WITHOUT_CUDNN:
                found.guarded(f"{name}, {column}", functools.partial(measure, name), may_fail=True)
                setup.free_memory()
    return found


def first_token(setup: Setup) -> Findings:
    """Time to read a prompt."""
    found, model, tokens = Findings(), eight_billion(setup), setup.choose(8192, 256)
    ids, turns = token_ids(setup, model.config, 1, tokens), Turns((REFERENCE, DYNAMIC, INT4, INT8, FP8))

    def read(name: str) -> Tensor:
        logits = newest_logits(model, CACHES[name](model.config, tokens), ids)
        setup.synchronize()
        return logits

    for trial in range(setup.choose(5, 2)):
        # The first one compiles kernels.
        logits = turns.take(read, is_counted=trial > 0)
    # A prompt attends to its own states in full precision, whatever the cache holds afterwards.
    expected, allowed = expected_logits(model, lambda: CACHES[REFERENCE](model.config, tokens), ids)
    for name, seconds in turns.seconds.items():
        compare_logits(found, name, expected, logits[name], allowed)
        found.add(f"{name}: first token of {tokens:,}", 1e3 * median(seconds), "ms")
    found.details["seconds"] = turns.seconds
    return found


def offloading(setup: Setup) -> Findings:
    """Decode steps with offloaded caches, beside transformers' and beside what the bus allows."""
    found = Findings()
    model = setup.keep("one billion", lambda: llama(setup, ONE_BILLION))
    tokens, block, trials = setup.choose((32768, 16, 3), (256, 2, 2))
    home = torch.empty(setup.choose(1 << 28, 1 << 16), dtype=torch.uint8, pin_memory=setup.on_cuda)
    there = torch.empty_like(home, device=setup.device)
    copies = [milliseconds(setup, lambda: there.copy_(home, non_blocking=True)) for _ in range(25)]
    found.add("pinned memory to the device", len(home) / median(copies) / 1e6, "GB/s")
    names = list(OFFLOADED_CACHES)
    if not setup.on_cuda:
        names.remove(TRANSFORMERS_OFFLOADED)
        found.missing[TRANSFORMERS_OFFLOADED] = f"{NO_DEVICE}: it copies on a stream"
    caches: dict[tuple[str, bool], Any] = {}
    times: dict[str, list[float]] = {name: [] for name in names}
    steps = (trials + 1) * block
    ids = token_ids(setup, model.config, 1, steps)
    dense = functools.partial(filled, setup, model.config, CACHES[REFERENCE], tokens, 1)
    _, allowed = expected_logits(model, dense, ids[:, :1])

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

    usable = [name for name in names if found.guarded(name, functools.partial(make, name))]
    for trial in setup.in_time(found, range(trials + 1)):
        for name in interleaved(usable, trial):
            found.guarded(f"{name}, trial {trial}", functools.partial(turn, name, trial))
    for name in filter(times.get, names):
        found.add(f"{name}: a step", median(times[name]), "ms")
        if name != TRANSFORMERS_OFFLOADED:
            moved = caches[name, True].traffic.of_step().to_device
            bus = median(copies) * moved / len(home)
            found.add(f"{name}: copying its {moved / 1e6:,.0f} MB takes", bus, "ms")
    found.details["ms"] = times
    return found


FIRST = (
    Step("decoding", 75, decoding, least=20),
    Step("steps in graphs", 50, graphs, isolated=True, least=25),
    Step("first token of 8k", 8, first_token),
    Step("offloading", 45, offloading),
)
"""What is worth most, for a device that one has for a few minutes."""
