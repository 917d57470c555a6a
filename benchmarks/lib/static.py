"""Static caches with several reservations: eager steps, compiled steps, calls of `generate()`, and their tables."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lib.compiling import Compiled, nothing_in_memory, nothing_on_disk, options_of
from lib.contenders import COMPILED, KVLAYERS, KVLAYERS_STATIC, REFERENCE, TRANSFORMERS_STATIC, Maker, compiled
from lib.generation import GENERATORS, SERVING, Job, measure_generate
from lib.internals import quiet_clock
from lib.report import MILLI, new_table, promised, span, summarise, times_as_fast
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


def summarise_static(static: dict[str, Any]) -> None:
    """Summarise the steps at every length, and the calls of `generate()`."""
    for measured in (*static["eager"].values(), *static["compiled"].values(), static["generate"]["calls"]):
        summarise(measured)


def static_targets(static: dict[str, Any]) -> list[dict[str, Any]]:
    """The project's targets for static caches."""
    if not static:
        return []
    steps = [promise for length, measured in static["eager"].items() for promise in _step_targets(length, measured)]
    calls = static["generate"]["calls"]
    candidate = calls[compiled(KVLAYERS_STATIC)]
    return [
        *steps,
        promised("generate, graphs", candidate["graphs"], at_most=static["generate"]["buckets"] + 1),
        promised("generate, graphs compiled after the first call", candidate["recompiles"], at_most=0),
        *(
            promised(
                f"generate, compiled, time of a later call over that of {other}",
                times_as_fast(calls, other, compiled(KVLAYERS_STATIC)),
                at_most=1,
            )
            for other in (compiled(TRANSFORMERS_STATIC), KVLAYERS, REFERENCE)
        ),
    ]


def _step_targets(length: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    small, large = (with_reservation(KVLAYERS_STATIC, times) for times in (1, 32))
    baseline = with_reservation(TRANSFORMERS_STATIC, 32)
    found = []
    if length == 1024 and large in measured and small in measured:
        where = f"eager static step at {length} of {measured[large]['reserved']}"
        slower = times_as_fast(measured, small, large)
        found += [
            promised(f"{where}, time relative to {measured[small]['reserved']} reserved", slower, at_most=1.15),
            promised(
                f"{where}, times as fast as {TRANSFORMERS_STATIC}", times_as_fast(measured, large, baseline), at_least=5
            ),
        ]
    if small in measured:
        slower = times_as_fast(measured, KVLAYERS, small)
        found.append(
            promised(f"eager static step at {length}, time relative to kvlayers' DynamicCache", slower, at_most=1.05)
        )
    return found


def show_static(console: Console, static: dict[str, Any]) -> None:
    """Print all tables."""
    if not static:
        return
    console.print(_steps_table(f"Static caches in eager code, {static['model']}", static["eager"]))
    beside = "Static caches in compiled code, dynamic ones in eager code"
    console.print(_steps_table(f"{beside}, {static['model']}", static["compiled"]))
    generate = static["generate"]
    where = f"{generate['prompt']} tokens, {generate['reserve']} reserved, {generate['buckets']} buckets"
    console.print(calls_table(f"generate() after {where}, {static['model']}", generate["calls"]))


def _steps_table(title: str, lengths: dict[int, Any]) -> Table:
    columns = ("reserved", "ms a step", "times as fast", "MB held", "logits\napart")
    compiling = ("graphs", "compiled\nin s", "compiled\nlater")
    table = new_table(title, "tokens, cache", *columns, *compiling)
    for length, measured in lengths.items():
        for name, entry in measured.items():
            graphs = ["", "", ""]
            if "graphs" in entry:
                graphs = [str(entry["graphs"]), f"{entry['compile_seconds']:.1f}", str(entry["recompiles"])]
            table.add_row(
                f"{length:>6} {name.removesuffix(COMPILED)}",
                f"{entry.get('reserved', '')}",
                f"{entry['median'] * MILLI:.2f}",
                span(entry, "speed"),
                f"{entry['held'] / 1e6:.1f}",
                f"{entry['logit_distance']:.3f}",
                *graphs,
            )
        table.add_section()
    return table


def calls_table(title: str, calls: dict[str, Any]) -> Table:
    """A table of calls of `generate()`, with bytes if they were counted."""
    peaks = any("peak" in entry for entry in calls.values())
    columns = ("s a call", "tokens/s", "times as fast", *(["peak MB"] if peaks else []))
    table = new_table(title, "cache", *columns, "graphs", "first\ncall, s", "compiled\nlater")
    for name, entry in calls.items():
        table.add_row(
            name,
            f"{entry['median']:.3f}",
            f"{entry['new'] / entry['median']:.1f}",
            span(entry, "speed"),
            *([_megabytes(entry["peak"])] if peaks else []),
            f"{entry['graphs'] or ''}",
            f"{entry['first']:.3f}",
            f"{entry['recompiles'] if entry['graphs'] else ''}",
        )
    return table


def _megabytes(count: int | None) -> str:
    return "not measured" if count is None else f"{count / 1e6:.2f}"
