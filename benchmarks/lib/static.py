"""Static caches with several reservations: eager steps, compiled steps, calls of `generate()`, and their tables."""

from dataclasses import dataclass
from typing import Any

from lib.compiling import Compiled, nothing_in_memory, nothing_on_disk, options_of
from lib.contenders import KVLAYERS, KVLAYERS_STATIC, REFERENCE, TRANSFORMERS_STATIC, Maker, compiled
from lib.generation import GENERATORS, SERVING, Job, measure_generate
from lib.internals import quiet_clock
from lib.report import Cell, Session, mb, ms, shown, span, times_as_fast
from lib.timing import Trials, greedy_reference, measure_decode
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
        trials: how often steps, and calls of `generate()`, are timed.
        backend: the backend of `torch.compile`.
        prompt: tokens of the prompt for `generate()`.
        new: tokens that it generates.
        reserve: tokens that static caches reserve for it.
    """

    lengths: list[int]
    times: list[int]
    most: int
    trials: Trials
    backend: str
    prompt: int = 200
    new: int = 512
    reserve: int = 4096

    def reservations(self, length: int) -> dict[int, int]:
        """The reservation for each multiple, for `length` tokens in the cache."""
        room = length + max(SPARE, self.trials.steps)
        wanted = {times: max(times * length, room) for times in self.times}
        return {times: tokens for times, tokens in wanted.items() if times == 1 or tokens <= self.most}


def reserving(make: Maker, tokens: int) -> Maker:
    return lambda config, length: make(config, tokens)


def with_reservation(name: str, times: int) -> str:
    return f"{name}, {times}x"


def measure_static(workload: Workload, makers: dict[str, Maker], plan: Plan) -> dict[str, Any]:
    """Time static caches with every reservation beside dynamic ones.

    Returns:
        `eager` and `compiled` with the decode steps by length and contender, and `generate`.
    """
    found: dict[str, Any] = {"model": workload.name, "eager": {}, "compiled": {}}
    with nothing_in_memory(plan.backend):
        for length in plan.lengths:
            found["eager"][length], found["compiled"][length] = measure_steps(workload, makers, length, plan)
        job = Job(workload.name, workload.model, workload.prompt(plan.prompt), plan.new, plan.reserve, plan.backend)
        trials = plan.trials
        tick = trials.ticking(f"generate {plan.new} tokens", len(SERVING) + trials.count)
        contenders = {name: GENERATORS[name] for name in SERVING}
        found["generate"] = {
            "prompt": plan.prompt,
            "reserve": plan.reserve,
            # That its decode steps reach.
            "buckets": job.buckets_reached(),
            "calls": measure_generate(job, contenders, trials.count, trials.disagreements, tick),
        }
    return found


def measure_steps(
    workload: Workload, makers: dict[str, Maker], length: int, plan: Plan
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time decode steps in eager and in compiled code, each beside dynamic caches in eager code.

    Compiled code comes behind a prefill in eager code, and every graph is compiled before the clock starts.

    Returns:
        The results for eager code and for compiled code, as `measure_decode` returns them; of compiled code also
        `graphs`, `compile_seconds`, and `recompiles` during the timed steps.
    """
    sizes, static = {}, {}
    for of in (KVLAYERS_STATIC, TRANSFORMERS_STATIC):
        for times, tokens in plan.reservations(length).items():
            name = with_reservation(of, times)
            sizes[name], static[name] = tokens, reserving(makers[of], tokens)
    dynamic = {name: makers[name] for name in (REFERENCE, KVLAYERS)}
    eager = measure_decode(workload, {**dynamic, **static}, length, plan.trials)
    in_graphs = {compiled(name): make for name, make in static.items()}
    forwards = {name: Compiled(workload.model, options_of(plan.backend)) for name in in_graphs}
    tick = plan.trials.ticking(f"compiling at {length}", len(in_graphs))
    for name, make in in_graphs.items():
        with nothing_on_disk(plan.backend):
            _warm_up(workload, make, forwards[name], length, plan.trials.steps)
        tick()
    before = {name: forward.graphs for name, forward in forwards.items()}
    measured = measure_decode(workload, {**dynamic, **in_graphs}, length, plan.trials, forwards)
    for name, forward in forwards.items():
        counts = {"graphs": before[name], "recompiles": forward.graphs - before[name]}
        measured[name] |= {**counts, "compile_seconds": forward.seconds}
    for name, tokens in sizes.items():
        eager[name]["reserved"] = measured[compiled(name)]["reserved"] = tokens
    return eager, measured


def _warm_up(workload: Workload, make: Maker, forward: Compiled, length: int, steps: int) -> None:
    """Take as many steps as will be timed, so that all sizes that they need are compiled."""
    first = workload.prepare(length)
    cache = make(workload.model.config, length + steps)
    with quiet_clock():
        workload.fill(cache)
        greedy_reference(forward, cache, first, steps)


def hold_static_to_targets(run: Session, static: dict[str, Any]) -> None:
    for length, measured in static["eager"].items():
        _hold_steps_to_targets(run, length, measured)
    calls = static["generate"]["calls"]
    candidate = calls[compiled(KVLAYERS_STATIC)]
    run.target("generate, graphs", candidate["graphs"], at_most=static["generate"]["buckets"] + 1)
    run.target("generate, graphs compiled after the first call", candidate["recompiles"], at_most=0)
    for other in (compiled(TRANSFORMERS_STATIC), KVLAYERS, REFERENCE):
        time = times_as_fast(calls, other, compiled(KVLAYERS_STATIC))
        run.target(f"generate, compiled, time of a later call over that of {other}", time, at_most=1)


def _hold_steps_to_targets(run: Session, length: int, measured: dict[str, Any]) -> None:
    small, large = (with_reservation(KVLAYERS_STATIC, times) for times in (1, 32))
    if length == 1024 and large in measured and small in measured:
        where = f"eager static step at {length} of {measured[large]['reserved']}"
        slower = times_as_fast(measured, small, large)
        run.target(f"{where}, time relative to {measured[small]['reserved']} reserved", slower, at_most=1.15)
        speed = times_as_fast(measured, large, with_reservation(TRANSFORMERS_STATIC, 32))
        run.target(f"{where}, times as fast as {TRANSFORMERS_STATIC}", speed, at_least=5)
    if small in measured:
        slower = times_as_fast(measured, KVLAYERS, small)
        run.target(f"eager static step at {length}, time relative to kvlayers' DynamicCache", slower, at_most=1.05)


def show_static(run: Session, static: dict[str, Any]) -> None:
    columns = {"reserved": shown("reserved", ""), "ms a step": ms("median"), "times as fast": span("speed")}
    columns |= {"MB held": mb("held"), "logits\napart": shown("logit_distance", ".3f"), "graphs": shown("graphs", "")}
    columns |= {"compiled\nin s": shown("compile_seconds", ".1f"), "compiled\nlater": shown("recompiles", "")}
    for code, title in (("eager", "eager code"), ("compiled", "compiled code, dynamic ones in eager code")):
        run.table(f"Static caches in {title}, {static['model']}", "tokens, cache", static[code], columns)
    generate = static["generate"]
    where = f"{generate['prompt']} tokens, {generate['reserve']} reserved, {generate['buckets']} buckets"
    show_calls(run, f"generate() after {where}, {static['model']}", generate["calls"])


def show_calls(run: Session, title: str, calls: dict[str, Any]) -> None:
    """Print a table of calls of `generate()`, with bytes if they were counted."""
    columns: dict[str, Cell] = {
        "s a call": shown("median", ".3f"),
        "tokens/s": lambda entry: f"{entry['new'] / entry['median']:.1f}",
        "times as fast": span("speed"),
        "peak MB": mb("peak", ".2f"),
        "graphs": lambda entry: f"{entry['graphs'] or ''}",
        "first\ncall, s": shown("first", ".3f"),
        "compiled\nlater": lambda entry: f"{entry['recompiles']}" if entry["graphs"] else "",
    }
    run.table(title, "cache", {"": calls}, columns)
