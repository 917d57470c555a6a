"""Compares kvlayers' and transformers' caches in one process: time, bytes and tokens.

    python benchmarks/decode.py                     # everything, about forty minutes on two cores
    python benchmarks/decode.py --quick             # a small model, to see that it runs
    python benchmarks/decode.py --skip static       # without compiled code, about fifteen minutes
    python benchmarks/decode.py --model DIR_OR_HUB  # another model beside the random one

Contenders alternate in short turns within a trial, in an order that rotates; figures are medians over the trials. Every
step's token is compared with the one from transformers' DynamicCache, and the exit code is 1 if one differs. Timings
never decide the exit code. `--help` lists the options.

"amortised" is the median step with kvlayers' DynamicCache plus its share of growing, measured over a whole cycle from
one growth to the next: a plain mean over tens of steps contains either no growth or too much of it.

Static caches are measured with reservations of several times the tokens in the cache, in eager code and in compiled
code, where every graph is compiled before the clock starts. They are also measured in whole calls of `generate()`, of
which the first one compiles.

Run it on an idle machine: if other processes use the cores, torch's threads wait for one another, and the figures
measure the scheduler.
"""

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lib import report
from lib.compiling import INDUCTOR
from lib.contenders import (
    CONTENDERS,
    FLOOR,
    KVLAYERS,
    KVLAYERS_4_BITS,
    QUANTIZED,
    REFERENCE,
    TRANSFORMERS_4_BITS,
    Maker,
)
from lib.peak import measure_peak
from lib.report import MILLI, mb, ms, shown, span, us
from lib.static import Plan, hold_static_to_targets, measure_static, show_static
from lib.timing import Disagreements, Trials, measure_decode, measure_growth, measure_sliding, measure_update
from lib.workload import QUICK_SHAPE, RandomModel, Shape, Workload, real_workload

SECTIONS = ("decode", "update", "growth", "peak", "sliding", "quantized", "static")


def options() -> report.Options:
    made = report.Options("decode", __doc__, quick="a small model and short lengths, under a minute")
    made.sized("--lengths", [128, 1024, 4096, 16384], [64, 128], "tokens held, separated by commas", report.numbers)
    made.real_model("directory or hub name of the real model; 'none' for none", "none")
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
    made.add("--skip", type=report.names, default=[], help="of decode,update,peak,sliding,quantized,static")
    return made


def parse(arguments: Sequence[str] | None) -> Any:
    made = options()
    given = made.parse(arguments)
    if len(given.generate) != 3 or sum(given.generate[:2]) > given.generate[2]:
        made.parser.error("--generate takes three numbers, and more tokens cannot come than are reserved")
    if any(later - earlier <= given.steps for earlier, later in itertools.pairwise(given.stations)):
        made.parser.error(f"stations must be more than the {given.steps} steps apart that are timed at each")
    return given


def fitting(lengths: list[int], workload: Workload, steps: int, say: Callable[[str], object]) -> list[int]:
    if workload.limit is None:
        return lengths
    most = workload.limit - steps
    if max(lengths) > most:
        say(f"{workload.name} has a context of {workload.limit}: lengths are capped at {most}")
    return sorted({min(length, most) for length in lengths})


class Measurements:
    """The sections of a run.

    Attributes:
        results: what each section found.
        trials: how often, and where tokens or states differ from the reference's.
    """

    def __init__(self, run: report.Session, makers: dict[str, Maker]) -> None:
        self.run, self.given, self.makers = run, run.given, makers
        self.shape = QUICK_SHAPE if self.given.quick else Shape()
        self.random = RandomModel(self.shape)
        self.trials = Trials(self.given.steps, self.given.trials, run.ticking, self.given.block)
        self.results: dict[str, Any] = {section: {} for section in SECTIONS}

    def update(self) -> None:
        config = self.random.model.config
        for length in sorted({64, *self.given.lengths}):
            measured = measure_update(config, self.shape, self.makers, length, self.trials)
            report.summarise(measured)
            self.results["update"][length] = measured
            growth = measure_growth(config, self.shape, self.makers[KVLAYERS], length)
            measured[KVLAYERS] |= {"with_growth": growth.get("mean"), "growing": growth.get("growth_update")}
            self.results["growth"][length] = growth

    def decode(self) -> None:
        real = real_workload(self.given.model, self.given.text, self.run.console.print)
        workloads: dict[str, Workload] = {"random": self.random, **({} if real is None else {"real": real})}
        for kind, workload in workloads.items():
            found = self.results["decode"][kind] = {"model": workload.name}
            for length in fitting(self.given.lengths, workload, self.given.steps, self.run.console.print):
                found[length] = measure_decode(workload, self.makers, length, self.trials)
                report.summarise(found[length])
                if kind == "random":
                    add_amortised(found[length], self.results["growth"].get(length, {}), self.shape.layers)

    def quantized(self) -> None:
        """Steps with quantized caches. They give other numbers by design, which benchmarks/fidelity.py measures."""
        found = self.results["quantized"] = {"model": self.random.name}
        trials = dataclasses.replace(self.trials, disagreements=Disagreements())
        # transformers' quantized caches need a length that is a multiple of their groups of 64.
        shortest = 64 if self.given.quick else 4096
        for length in [length for length in self.given.lengths if length >= shortest]:
            found[length] = measure_decode(self.random, QUANTIZED, length, trials)
            report.summarise(found[length])
            add_agreement(found[length], trials.disagreements, length, trials.steps * trials.count)

    def static(self) -> None:
        given = self.given
        plan = Plan(given.static_lengths, given.times, given.most_reserved, self.trials, given.backend, *given.generate)
        found = measure_static(self.random, self.makers, plan)
        for measured in (*found["eager"].values(), *found["compiled"].values(), found["generate"]["calls"]):
            report.summarise(measured)
        self.results["static"] = found

    def sliding(self) -> None:
        workload = RandomModel(self.shape, sliding_window=self.given.window)
        self.results["sliding"] = measure_sliding(workload, self.makers, self.given.stations, self.trials)
        summarise_sliding(self.results["sliding"])

    def peak(self) -> None:
        tokens, config = max(self.given.lengths), self.random.model.config
        caches = {name: measure_peak(make, config, tokens, min(1024, tokens)) for name, make in self.makers.items()}
        self.results["peak"] = {"tokens": tokens, "caches": caches}


def summarise_sliding(measured: dict[str, Any]) -> None:
    """Add each station's median, and the ratio of the slowest station to the first."""
    for entry in measured.values():
        medians = {at: statistics.median(map(statistics.median, trials)) for at, trials in entry["stations"].items()}
        first, *_, last = medians.values()
        entry["medians"] = medians
        entry["last_over_first"] = last / first
        entry["slowest_over_first"] = max(medians.values()) / first
        entry["update_median"] = statistics.median(map(statistics.median, entry["updates"]))
        entry["update_mean"] = statistics.median(map(statistics.fmean, entry["updates"]))


def add_amortised(decode: dict[str, Any], growth: dict[str, float], layers: int) -> None:
    """Add the long-run cost of growing to the decode step with kvlayers' DynamicCache: see `measure_growth`."""
    if growth:
        extra = layers * (growth["mean"] - growth["median"])
        decode[KVLAYERS]["amortised"] = decode[KVLAYERS]["median"] + extra
        decode[KVLAYERS]["amortised_speed_to_floor"] = decode[FLOOR]["median"] / decode[KVLAYERS]["amortised"]
        decode[KVLAYERS]["growth_step"] = decode[KVLAYERS]["median"] + layers * growth["growth_update"]


def add_agreement(measured: dict[str, Any], rounded: Any, length: int, steps: int) -> None:
    """Add the fraction of steps with the reference's greedy token, and of its bytes, to each contender."""
    # transformers' cache concatenates, so it holds the bytes of the states alone.
    dense = measured[REFERENCE]["held"]
    for name, entry in measured.items():
        entry["of_dense"] = entry["held"] / dense
        others = [found for found in rounded.found if found["cache"] == name and 0 <= found["tokens"] - length < steps]
        entry["agreement"] = 1 - len(others) / steps


def hold_to_targets(run: report.Session, results: dict[str, Any]) -> None:
    decode, update, quantized = results["decode"].get("random", {}), results["update"], results["quantized"]
    if 16384 in decode:
        candidate = decode[16384][KVLAYERS]
        run.target("step at 16k, times as fast as transformers' DynamicCache", candidate["speed"], at_least=3.5)
        run.target("step at 16k, speed relative to preallocated memory", candidate["speed_to_floor"], at_least=0.9)
        run.target("step at 16k, speed relative to an exact StaticCache", candidate["speed_to_exact"], at_least=0.9)
        if "amortised" in candidate:
            amortised = candidate["amortised_speed_to_floor"]
            run.target("step at 16k, with growth amortised, relative to preallocated memory", amortised, at_least=0.9)
    if 128 in decode:
        run.target("step at 128, times as fast as transformers'", decode[128][KVLAYERS]["speed"], at_least=0.98)
    if 64 in update:
        for kind, key in (("median", "speed"), ("mean", "speed_of_means")):
            time = 1 / update[64][KVLAYERS][key]
            run.target(f"update at 64, {kind} time relative to transformers'", time, at_most=1)
    for length, least in ((4096, 4), (16384, 5)):
        for baseline in TRANSFORMERS_4_BITS if length in quantized else ():
            speed = report.times_as_fast(quantized[length], KVLAYERS_4_BITS, baseline)
            run.target(f"4-bit step at {length}, times as fast as {baseline}", speed, at_least=least)
    if 16384 in quantized:
        measured = quantized[16384]
        slower = report.times_as_fast(measured, KVLAYERS, KVLAYERS_4_BITS)
        run.target("4-bit step at 16384, time relative to kvlayers' DynamicCache", slower, at_most=1.3)
        for name, most in ((KVLAYERS_4_BITS, 0.295), ("kvlayers 2 bits", 0.17)):
            run.target(f"bytes held at 16k, {name} relative to dense", measured[name]["of_dense"], at_most=most)
    if results["peak"]:
        peak = results["peak"]["caches"][KVLAYERS]["peak"]
        what = f"peak growing to {results['peak']['tokens']}, relative to the bytes in use"
        run.target(what, peak, at_most=1.3)
    if results["sliding"]:
        last = results["sliding"][KVLAYERS]["last_over_first"]
        run.target("sliding window, last step time relative to the first", last, at_most=1.1)
    if results["static"]:
        hold_static_to_targets(run, results["static"])


def show(run: report.Session, results: dict[str, Any]) -> None:
    step = {"ms a step": ms("median"), "mean": ms("mean")}
    held = {"MB held": mb("held"), "logits apart": shown("logit_distance", ".3f")}
    relative = {"times as fast": span("speed")}
    of_floor = {"amortised": ms("amortised"), **relative, "to exact length": span("speed_to_floor")}
    for kind in results["decode"].values():
        run.table(f"Decode step, {kind['model']}", "tokens, cache", by_length(kind), {**step, **of_floor, **held})
    if results["quantized"]:
        rounded = {"of dense": shown("of_dense", ".4f"), "same token": shown("agreement", ".0%")}
        title = f"Decode step with quantized caches, {results['quantized']['model']}"
        run.table(title, "tokens, cache", by_length(results["quantized"]), {**step, **relative, **held, **rounded})
    if results["update"]:
        columns = {"us": us("median"), "mean": us("mean"), "mean with growth": us("with_growth")}
        columns |= {"growing": us("growing", ".0f"), **relative}
        run.table("Update of one layer", "tokens, cache", results["update"], columns)
    if results["peak"]:
        keys = {"peak": "peak", "worst moment": "worst_moment", "held at the end": "held"}
        keys["reported / counted"] = "reported"
        title = f"Bytes while growing to {results['peak']['tokens']} tokens, as multiples of those that are live"
        columns = {heading: shown(key, ".3f") for heading, key in keys.items()}
        run.table(title, "cache", {"": results["peak"]["caches"]}, columns)
    if sliding := results["sliding"]:
        stations = next(iter(sliding.values()))["medians"]
        columns = {f"at {at}": lambda entry, at=at: f"{entry['medians'][at] * MILLI:.2f}" for at in stations}
        columns |= {
            "last / first": shown("last_over_first"),
            "update us": us("update_median"),
            "mean": us("update_mean"),
        }
        run.table("Sliding window, ms a step", "cache", {"": sliding}, columns)
    if results["static"]:
        show_static(run, results["static"])


def by_length(kind: dict[Any, Any]) -> dict[int, Any]:
    return {length: measured for length, measured in kind.items() if length != "model"}


def main(arguments: Sequence[str] | None = None, contenders: dict[str, Maker] | None = None) -> int:
    """Run it.

    Args:
        arguments: the command line.
        contenders: the caches to compare, by name.

    Returns:
        The exit code: 1 if a contender's tokens or states differ from the reference.
    """
    given = parse(arguments)
    with report.session(given) as run:
        measurements = Measurements(run, contenders or CONTENDERS)
        for section in ("update", "decode", "quantized", "static", "sliding", "peak"):
            if section not in given.skip:
                getattr(measurements, section)()
    results = measurements.results
    show(run, results)
    hold_to_targets(run, results)
    return run.finish(results, measurements.trials.disagreements)


if __name__ == "__main__":
    sys.exit(main())
