"""Compares kvlayers' and transformers' caches in one process: time, bytes and tokens.

    python lab/benchmarks/decode.py                     # everything, about forty minutes on two cores
    python lab/benchmarks/decode.py --quick             # a small model, to see that it runs
    python lab/benchmarks/decode.py --skip static       # without compiled code, about fifteen minutes
    python lab/benchmarks/decode.py --model DIR_OR_HUB  # another model beside the random one

Contenders alternate in short turns within a trial, in an order that rotates; figures are medians over the trials. Every
step's token is compared with the one from transformers' DynamicCache, and the exit code is 1 if one differs. Timings
never decide the exit code. `claims.py --only step` measures quantized caches beside these.

Static caches are measured with reservations of several times the tokens in the cache, in eager code and in compiled
code, where every graph is compiled before the clock starts. They are also measured in whole calls of `generate()`, of
which the first one compiles.

Run it on an idle machine: if other processes use the cores, torch's threads wait for one another, and the figures
measure the scheduler.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lib import report
from lib.compiled import (
    GENERATORS,
    INDUCTOR,
    Job,
    measure_generate,
    measure_static,
    nothing_in_memory,
    reservations,
    show_calls,
)
from lib.contenders import CONTENDERS, FLOOR, KVLAYERS, Maker
from lib.peak import measure_peak
from lib.report import mb, ms, shown, span, us
from lib.timing import Disagreements, Trials, mean_with_growth, measure_decode, measure_update, summarise

SECTIONS = ("update", "decode", "static", "sliding", "peak")


def options() -> report.Options:
    made = report.Options("decode", __doc__, quick="a small model and short lengths, under a minute")
    made.sized("--lengths", [128, 1024, 4096, 16384], [64, 128], "tokens held, separated by commas", report.numbers)
    made.real_model()
    made.sized("--trials", 5, 2, "trials")
    made.sized("--steps", 32, 8, "decode steps in each trial")
    made.sized("--block", 8, 8, "steps before the next contender's turn")
    made.sized("--window", 512, 32, "sliding window")
    stations = [600, 1500, 3000, 4500, 6000]
    made.sized("--stations", stations, [40, 120], "tokens at which its steps are timed", report.numbers)
    made.sized("--static-lengths", [128, 1024, 8192], [64], "tokens present in static caches", report.numbers)
    made.sized("--times", [1, 8, 32], [1, 8], "their reservations, times the tokens present", report.numbers)
    made.sized("--most-reserved", 65536, 65536, "tokens, for reservations beyond 1x")
    sizes = "prompt, new and reserved tokens of generate()"
    made.sized("--generate", [200, 512, 4096], [250, 16, 1024], sizes, report.numbers)
    made.sized("--backend", INDUCTOR, "eager", "of torch.compile", str)
    made.some_of("--skip", SECTIONS, "sections", ())
    return made


class Sections:
    """The sections of a run, with the caches that they compare."""

    def __init__(self, makers: Mapping[str, Maker]) -> None:
        self.makers = makers
        self._disagreements: Disagreements | None = None

    def _trials(self, run: report.Session) -> Trials:
        self._disagreements = self._disagreements or run.disagreements()
        given = run.given
        return Trials(given.steps, given.trials, run.ticking, given.block, self._disagreements)

    def update(self, run: report.Session) -> dict[Any, Any]:
        workload, found = run.random(), dict[Any, Any]()
        config, shape = workload.model.config, workload.shape
        for length in sorted({64, *run.given.lengths}):
            found[length] = summarise(measure_update(config, shape, self.makers, length, self._trials(run)))
            with_growth = mean_with_growth(config, shape, self.makers[KVLAYERS], length)
            found[length][KVLAYERS]["with_growth"] = with_growth
        columns = {"us": us("median"), "mean": us("mean"), "mean with growth": us("with_growth")}
        run.table("Update of one layer", "tokens, cache", found, {**columns, "times as fast": span("speed")})
        return found

    def decode(self, run: report.Session) -> dict[str, Any]:
        found = {}
        for kind, workload in {"random": run.random(), "real": run.real()}.items():
            if workload is None:
                continue
            most = workload.limit - run.given.steps if workload.limit else max(run.given.lengths)
            by_length = {
                length: summarise(measure_decode(workload, self.makers, length, self._trials(run)))
                for length in sorted({min(length, most) for length in run.given.lengths})
            }
            columns = {"ms a step": ms("median"), "mean": ms("mean"), "times as fast": span("speed")}
            columns |= {"MB held": mb("held"), "logits apart": shown("logit_distance", ".3f")}
            run.table(f"Decode step, {workload.name}", "tokens, cache", by_length, columns)
            found[kind] = {"model": workload.name, **by_length}
        return found

    def static(self, run: report.Session) -> dict[str, Any]:
        given, workload, trials = run.given, run.random(), self._trials(run)
        found: dict[str, Any] = {"model": workload.name, "eager": {}, "compiled": {}}
        prompt, new, reserve = given.generate
        job = Job(workload.name, workload.model, workload.prompt(prompt), new, reserve, given.backend)
        with nothing_in_memory(given.backend):
            for length in given.static_lengths:
                reserved = reservations(length, given.times, given.most_reserved, given.steps)
                eager, in_graphs = measure_static(workload, self.makers, length, reserved, trials, given.backend)
                found["eager"][length], found["compiled"][length] = summarise(eager), summarise(in_graphs)
            tick = run.ticking(f"generate {new} tokens", len(GENERATORS) + trials.count)
            calls = summarise(measure_generate(job, GENERATORS, trials.count, trials.disagreements, tick))
        found["generate"] = {"prompt": prompt, "reserve": reserve, "calls": calls}
        columns = {"reserved": shown("reserved", ""), "ms a step": ms("median"), "times as fast": span("speed")}
        columns |= {"MB held": mb("held"), "logits\napart": shown("logit_distance", ".3f")}
        columns |= {"graphs": shown("graphs", ""), "compiled\nlater": shown("recompiles", "")}
        for code, title in (("eager", "eager code"), ("compiled", "compiled code, dynamic ones in eager code")):
            run.table(f"Static caches in {title}, {workload.name}", "tokens, cache", found[code], columns)
        show_calls(run, f"generate() after {prompt} tokens, {reserve} reserved, {workload.name}", calls)
        return found

    def sliding(self, run: report.Session) -> dict[str, Any]:
        """Steps of a model with a sliding window at several token counts, and updates of one of its layers."""
        workload, stations = run.random(sliding_window=run.given.window), run.given.stations
        makers = {name: make for name, make in self.makers.items() if name != FLOOR}
        steps = {at: summarise(measure_decode(workload, makers, at, self._trials(run))) for at in stations}
        updates = summarise(
            measure_update(workload.model.config, workload.shape, makers, stations[-1], self._trials(run))
        )
        found = {
            name: {
                "medians": {at: steps[at][name]["median"] for at in stations},
                "update_median": updates[name]["median"],
                "update_mean": statistics.median(map(statistics.fmean, updates[name]["seconds"])),
            }
            for name in makers
        }
        columns: dict[str, report.Cell] = {
            f"at {at}": lambda entry, at=at: f"{entry['medians'][at] * report.MILLI:.2f}" for at in stations
        }
        columns |= {"update us": us("update_median"), "mean": us("update_mean")}
        run.table("Sliding window, ms a step", "cache", {"": found}, columns)
        return found

    def peak(self, run: report.Session) -> dict[str, Any]:
        tokens, config = max(run.given.lengths), run.random().model.config
        caches = {name: measure_peak(make, config, tokens, min(1024, tokens)) for name, make in self.makers.items()}
        keys = {"peak": "peak", "worst moment": "worst_moment", "held at the end": "held"}
        columns = {heading: shown(key, ".3f") for heading, key in {**keys, "reported / counted": "reported"}.items()}
        title = f"Bytes while growing to {tokens} tokens, as multiples of those that are live"
        run.table(title, "cache", {"": caches}, columns)
        return {"tokens": tokens, "caches": caches}


def main(arguments: Sequence[str] | None = None, contenders: Mapping[str, Maker] = CONTENDERS) -> int:
    """Run it.

    Args:
        arguments: the command line.
        contenders: the caches to compare, by name.

    Returns:
        The exit code: 1 if a contender's tokens or states differ from the reference.
    """
    made = options()
    given = made.parse(arguments)
    if len(given.generate) != 3 or sum(given.generate[:2]) > given.generate[2]:
        made.parser.error("--generate takes three numbers, and more tokens cannot come than are reserved")
    sections = Sections(contenders)
    return report.run(given, {name: getattr(sections, name) for name in SECTIONS})


if __name__ == "__main__":
    sys.exit(main())
