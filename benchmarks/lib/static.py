"""Measures static caches with several reservations: eager steps, compiled steps, and calls of `generate()`."""

from dataclasses import dataclass
from typing import Any

from kvlayers.tools.measuring.interleave import quiet_clock
from lib.compiling import Compiled, nothing_in_memory, nothing_on_disk, options_of
from lib.contenders import KVLAYERS, KVLAYERS_STATIC, REFERENCE, TRANSFORMERS_STATIC, Maker, compiled
from lib.generation import GENERATORS, SERVING, Job, measure_generate
from lib.timing import Disagreements, Ticking, greedy_reference, measure_decode
from lib.workload import Workload

SPARE = 64
"""Tokens that the smallest reservation has beyond those in the cache, unless more steps are timed."""


@dataclass
class Plan:
    """The sizes for the measurements.

    Args:
        lengths: tokens in the cache.
        times: reservations, as multiples of `lengths`.
        most: the largest reservation, in tokens.
        steps: decode steps in each trial.
        trials: the number of trials.
        block: steps before the next contender's turn.
        backend: the backend of `torch.compile`.
        prompt: tokens of the prompt for `generate()`.
        new: tokens that it generates.
        reserve: tokens that static caches reserve for it.
    """

    lengths: list[int]
    times: list[int]
    most: int
    steps: int
    trials: int
    block: int
    backend: str
    prompt: int = 200
    new: int = 512
    reserve: int = 4096

    def reservations(self, length: int) -> dict[int, int]:
        """The reservation for each multiple, for `length` tokens in the cache."""
        room = length + max(SPARE, self.steps)
        wanted = {times: max(times * length, room) for times in self.times}
        return {times: tokens for times, tokens in wanted.items() if times == 1 or tokens <= self.most}


def reserving(make: Maker, tokens: int) -> Maker:
    """Make a maker's caches for a fixed number of tokens, however many they will hold."""
    return lambda config, length: make(config, tokens)


def with_reservation(name: str, times: int) -> str:
    """The name of a static cache that reserves `times` the tokens in it."""
    return f"{name}, {times}x"


def measure_static(
    workload: Workload, makers: dict[str, Maker], plan: Plan, disagreements: Disagreements, ticking: Ticking
) -> dict[str, Any]:
    """Time static caches with every reservation beside dynamic ones.

    Returns:
        `eager` and `compiled` with the decode steps by length and contender, and `generate`.
    """
    found: dict[str, Any] = {"model": workload.name, "eager": {}, "compiled": {}}
    with nothing_in_memory(plan.backend):
        for length in plan.lengths:
            steps = measure_steps(workload, makers, length, plan, disagreements, ticking)
            found["eager"][length], found["compiled"][length] = steps
        found["generate"] = _measure_generate(workload, plan, disagreements, ticking)
    return found


def measure_steps(
    workload: Workload,
    makers: dict[str, Maker],
    length: int,
    plan: Plan,
    disagreements: Disagreements,
    ticking: Ticking,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time decode steps in eager and in compiled code, each beside dynamic caches in eager code.

    Returns:
        The results for eager code and for compiled code, as `measure_decode` returns them.
    """
    sizes, static = {}, {}
    for of in (KVLAYERS_STATIC, TRANSFORMERS_STATIC):
        for times, tokens in plan.reservations(length).items():
            name = with_reservation(of, times)
            sizes[name], static[name] = tokens, reserving(makers[of], tokens)
    dynamic = {name: makers[name] for name in (REFERENCE, KVLAYERS)}
    tick = ticking(f"static caches at {length}", plan.trials)
    eager = measure_decode(
        workload, {**dynamic, **static}, length, plan.steps, plan.trials, plan.block, disagreements, tick
    )
    in_graphs = _measure_compiled(workload, dynamic, static, length, plan, disagreements, ticking)
    for name, tokens in sizes.items():
        eager[name]["reserved"] = in_graphs[compiled(name)]["reserved"] = tokens
    return eager, in_graphs


def _measure_generate(workload: Workload, plan: Plan, disagreements: Disagreements, ticking: Ticking) -> dict[str, Any]:
    """Time calls of `generate()`; `buckets` is the number of buckets that its decode steps reach."""
    job = Job(workload.name, workload.model, workload.prompt(plan.prompt), plan.new, plan.reserve, plan.backend)
    tick = ticking(f"generate {plan.new} tokens", len(SERVING) + plan.trials)
    contenders = {name: GENERATORS[name] for name in SERVING}
    return {
        "prompt": plan.prompt,
        "reserve": plan.reserve,
        "buckets": job.buckets_reached(),
        "calls": measure_generate(job, contenders, plan.trials, disagreements, tick),
    }


def _measure_compiled(
    workload: Workload,
    dynamic: dict[str, Maker],
    static: dict[str, Maker],
    length: int,
    plan: Plan,
    disagreements: Disagreements,
    ticking: Ticking,
) -> dict[str, Any]:
    """Time decode steps in compiled code, after a prefill in eager code. Every graph is compiled first.

    Returns:
        The results of `measure_decode`, with `graphs`, `compile_seconds`, and `recompiles` during the timed steps.
    """
    makers = {compiled(name): make for name, make in static.items()}
    options = options_of(plan.backend)
    forwards = {name: Compiled(workload.model, options) for name in makers}
    tick = ticking(f"compiling at {length}", len(makers))
    for name, make in makers.items():
        with nothing_on_disk(plan.backend):
            _warm_up(workload, make, forwards[name], length, plan.steps)
        tick()
    compiled_before = {name: forward.graphs for name, forward in forwards.items()}
    tick = ticking(f"compiled static caches at {length}", plan.trials)
    measured = measure_decode(
        workload, {**dynamic, **makers}, length, plan.steps, plan.trials, plan.block, disagreements, tick, forwards
    )
    for name, forward in forwards.items():
        measured[name]["graphs"] = compiled_before[name]
        measured[name]["recompiles"] = forward.graphs - compiled_before[name]
        measured[name]["compile_seconds"] = forward.seconds
    return measured


def _warm_up(workload: Workload, make: Maker, forward: Compiled, length: int, steps: int) -> None:
    """Take as many steps as will be timed, so that all sizes that they need are compiled."""
    first = workload.prepare(length)
    cache = make(workload.model.config, length + steps)
    with quiet_clock():
        workload.fill(cache)
        greedy_reference(forward, cache, first, steps)
