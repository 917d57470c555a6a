"""What is run first on a device that one has for a few minutes: the most valuable steps of all stages."""

import functools
from typing import Any

from lib.gpu_check import CACHES as KINDS
from lib.gpu_check import CEILINGS, CODES, NUMERICS, QUANTIZATIONS, TESTS, Case, caches, numerics
from lib.gpu_model import (
    CACHES,
    REFERENCE,
    WITHOUT_CUDNN,
    column_of,
    compare_logits,
    eight_billion,
    expected_logits,
    failure_of,
    filled,
    newest_logits,
    note_failure,
    token_ids,
)
from lib.gpu_rest import OFFLOADING
from lib.gpu_speed import DECODING, FIRST_TOKEN, decoding
from lib.gpu_stage import Findings, Setup, Step
from lib.gpu_timing import elapsed, median, recorded

CASES = [
    Case("bfloat16", 1, None, False),
    Case("bfloat16", 5, "bool", True),
    Case("bfloat16", 16, "added", False),
    Case("float32", 1, None, True),
]
SHAPES = ((8192, 1), (32768, 1), (2048, 1), (8192, 8), (32768, 8), (2048, 8))
"""Tokens and sequences, the most telling first."""


def results(setup: Setup) -> Findings:
    """Some cases of attention in each format, and caches of each kind: each format and some kinds in a part."""
    return caches(setup) if setup.part in KINDS else numerics(setup, CASES)


def graphs(setup: Setup) -> Findings:
    """One step behind a fixed number of tokens as a CUDA graph: the time of the device without that of the host.

    A replay repeats the step, so that no dynamic nor packed cache can generate like this: the times say what a host
    without cost would leave.
    """
    found = Findings()
    model = eight_billion(setup)
    for tokens, batch in setup.in_time(found, setup.choose(SHAPES, ((256, 1),))):
        ids, column = token_ids(setup, model.config, batch, 1), column_of(tokens, batch)
        make = functools.partial(filled, setup, model.config, tokens=tokens, batch=batch)
        _, allowed = expected_logits(model, functools.partial(make, CACHES[REFERENCE]), ids)
        times: dict[str, list[float]] = {}

        def measure(
            name: str,
            make: Any = make,
            ids: Any = ids,
            allowed: float = allowed,
            column: str = column,
            times: Any = times,
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
            times[name] = [1000 * elapsed(setup, replay) for _ in range(setup.choose(20, 2))]

        for name in CACHES:
            if name != WITHOUT_CUDNN:
                reason = failure_of(functools.partial(measure, name))
                if reason is not None:
                    note_failure(found, f"{name}, {column}", reason, is_missing=True)
                setup.free_memory()
        for name, each in times.items():
            found.add(name, median(each), "ms a step in a graph", column=column)
            if REFERENCE in times:
                ratio = median(times[REFERENCE]) / median(each)
                found.add(name, ratio, "x as fast as the first, in a graph", column=column)
        found.details[column] = times
    return found


STEPS = (
    CEILINGS,
    Step("results", 40, results, isolated=True, parts=(*QUANTIZATIONS, *KINDS)),
    Step("decoding", 75, lambda setup: decoding(setup, SHAPES, DECODING), least=20),
    Step("steps in graphs", 50, graphs, isolated=True, least=25),
    FIRST_TOKEN,
    OFFLOADING,
    CODES,
    TESTS,
    NUMERICS,
)
