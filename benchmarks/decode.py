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

import itertools
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lib import report
from lib.compiling import INDUCTOR
from lib.contenders import CONTENDERS, FLOOR, KVLAYERS, QUANTIZED, REFERENCE, Maker
from lib.peak import measure_peak
from lib.report import MICRO, MILLI, new_table, span
from lib.static import Plan, measure_static, show_static, static_targets, summarise_static
from lib.timing import Disagreements, measure_decode, measure_growth, measure_sliding, measure_update
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


def fitting(lengths: list[int], workload: Workload, steps: int, console: Console) -> list[int]:
    """The lengths, limited to the model's context."""
    if workload.limit is None:
        return lengths
    most = workload.limit - steps
    if max(lengths) > most:
        console.print(f"{workload.name} has a context of {workload.limit}: lengths are capped at {most}")
    return sorted({min(length, most) for length in lengths})


class Measurements:
    """The sections of a run.

    Args:
        run: arguments, terminal and bars.
        makers: the caches to compare, by name.

    Attributes:
        results: what each section found.
        disagreements: where tokens or states differ from the reference's.
    """

    def __init__(self, run: report.Session, makers: dict[str, Maker]) -> None:
        self.run, self.given, self.makers = run, run.given, makers
        self.shape = QUICK_SHAPE if self.given.quick else Shape()
        self.random = RandomModel(self.shape)
        self.disagreements = Disagreements()
        self.results: dict[str, Any] = {section: {} for section in SECTIONS}

    def _decoded(self, workload: Workload, makers: dict[str, Maker], length: int, where: Disagreements) -> Any:
        given = self.given
        tick = self.run.ticking(f"{workload.name} at {length}", given.trials)
        found = measure_decode(workload, makers, length, given.steps, given.trials, given.block, where, tick)
        report.summarise(found)
        return found

    def update(self) -> None:
        """Updates of one layer, and how long it takes to grow."""
        config, given = self.random.model.config, self.given
        for length in sorted({64, *given.lengths}):
            tick = self.run.ticking(f"update at {length}", given.trials)
            measured = measure_update(
                config, self.shape, self.makers, length, given.steps, given.trials, self.disagreements, tick
            )
            report.summarise(measured)
            self.results["update"][length] = measured
            self.results["growth"][length] = measure_growth(config, self.shape, self.makers[KVLAYERS], length)

    def decode(self) -> None:
        """Steps of the random model, and of the real one if there is one."""
        real = real_workload(self.given.model, self.given.text, self.run.console.print)
        workloads: dict[str, Workload] = {"random": self.random, **({} if real is None else {"real": real})}
        for kind, workload in workloads.items():
            found = self.results["decode"][kind] = {"model": workload.name}
            for length in fitting(self.given.lengths, workload, self.given.steps, self.run.console):
                found[length] = self._decoded(workload, self.makers, length, self.disagreements)
                if kind == "random":
                    add_amortised(found[length], self.results["growth"].get(length, {}), self.shape.layers)

    def quantized(self) -> None:
        """Steps with quantized caches. They give other numbers by design, which benchmarks/fidelity.py measures."""
        found = self.results["quantized"] = {"model": self.random.name}
        rounded = Disagreements()
        # transformers' quantized caches need a length that is a multiple of their groups of 64.
        shortest = 64 if self.given.quick else 4096
        for length in [length for length in self.given.lengths if length >= shortest]:
            found[length] = self._decoded(self.random, QUANTIZED, length, rounded)
            add_agreement(found[length], rounded, length, self.given.steps * self.given.trials)

    def static(self) -> None:
        """Static caches with several reservations."""
        given = self.given
        prompt, new, reserve = given.generate
        plan = Plan(
            lengths=given.static_lengths,
            times=given.times,
            most=given.most_reserved,
            steps=given.steps,
            trials=given.trials,
            block=given.block,
            backend=given.backend,
            prompt=prompt,
            new=new,
            reserve=reserve,
        )
        found = measure_static(self.random, self.makers, plan, self.disagreements, self.run.ticking)
        summarise_static(found)
        self.results["static"] = found

    def sliding(self) -> None:
        """Steps of a model with windows."""
        given = self.given
        tick = self.run.ticking(f"window {given.window}", given.trials)
        workload = RandomModel(self.shape, sliding_window=given.window)
        found = measure_sliding(
            workload, self.makers, given.stations, given.steps, given.trials, self.disagreements, tick
        )
        summarise_sliding(found)
        self.results["sliding"] = found

    def peak(self) -> None:
        """Bytes while caches grow."""
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
    """Add the fraction of steps with the reference's greedy token to each contender at `length` tokens."""
    for name, entry in measured.items():
        others = [found for found in rounded.found if found["cache"] == name and 0 <= found["tokens"] - length < steps]
        entry["agreement"] = 1 - len(others) / steps


def hold_to_targets(run: report.Session, results: dict[str, Any]) -> None:
    """Bounds that are not among the claims of README.md, which `claims.py` measures."""
    decode, update = results["decode"].get("random", {}), results["update"]
    if 16384 in decode:
        candidate = decode[16384][KVLAYERS]
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
    if results["peak"]:
        peak = results["peak"]["caches"][KVLAYERS]["peak"]
        run.target("peak while growing, relative to the bytes in use", peak, at_most=1.3)
    if results["sliding"]:
        last = results["sliding"][KVLAYERS]["last_over_first"]
        run.target("sliding window, last step time relative to the first", last, at_most=1.1)
    for target in static_targets(results["static"]):
        run.targets += [] if run.given.quick else [target]


def show(console: Console, results: dict[str, Any]) -> None:
    """Print all tables."""
    for kind in results["decode"].values():
        console.print(_decode_table(kind))
    if results["quantized"]:
        console.print(_quantized_table(results["quantized"]))
    if results["update"]:
        console.print(_update_table(results["update"], results["growth"]))
    if results["peak"]:
        console.print(_peak_table(results["peak"]))
    if results["sliding"]:
        console.print(_sliding_table(results["sliding"]))
    show_static(console, results["static"])


def _decode_table(kind: dict[Any, Any]) -> Table:
    columns = ("ms a step", "mean", "amortised", "times as fast", "to exact length", "MB held", "logits apart")
    table = new_table(f"Decode step, {kind['model']}", "tokens, cache", *columns)
    for length, measured in ((key, value) for key, value in kind.items() if key != "model"):
        for name, entry in measured.items():
            table.add_row(
                f"{length:>6} {name}",
                f"{entry['median'] * MILLI:.2f}",
                f"{entry['mean'] * MILLI:.2f}",
                f"{entry['amortised'] * MILLI:.2f}" if "amortised" in entry else "",
                span(entry, "speed"),
                span(entry, "speed_to_floor"),
                f"{entry['held'] / 1e6:.1f}",
                f"{entry['logit_distance']:.3f}",
            )
        table.add_section()
    return table


def _quantized_table(kind: dict[Any, Any]) -> Table:
    columns = ("ms a step", "mean", "times as fast", "MB held", "of dense", "same token", "logits apart")
    table = new_table(f"Decode step with quantized caches, {kind['model']}", "tokens, cache", *columns)
    for length, measured in ((key, value) for key, value in kind.items() if key != "model"):
        for name, entry in measured.items():
            table.add_row(
                f"{length:>6} {name}",
                f"{entry['median'] * MILLI:.2f}",
                f"{entry['mean'] * MILLI:.2f}",
                span(entry, "speed"),
                f"{entry['held'] / 1e6:.1f}",
                f"{entry['held'] / measured[REFERENCE]['held']:.4f}",
                f"{entry['agreement']:.0%}",
                f"{entry['logit_distance']:.3f}",
            )
        table.add_section()
    return table


def _update_table(update: dict[int, Any], growth: dict[int, Any]) -> Table:
    table = new_table(
        "Update of one layer", "tokens, cache", "us", "mean", "mean with growth", "growing", "times as fast"
    )
    for length, measured in update.items():
        for name, entry in measured.items():
            cycle = growth.get(length) if name == KVLAYERS else None
            table.add_row(
                f"{length:>6} {name}",
                f"{entry['median'] * MICRO:.1f}",
                f"{entry['mean'] * MICRO:.1f}",
                f"{cycle['mean'] * MICRO:.1f}" if cycle else "",
                f"{cycle['growth_update'] * MICRO:.0f}" if cycle else "",
                span(entry, "speed"),
            )
        table.add_section()
    return table


def _peak_table(peak: dict[str, Any]) -> Table:
    title = f"Bytes while growing to {peak['tokens']} tokens, as multiples of those that are live"
    table = new_table(title, "cache", "peak", "worst moment", "held at the end", "reported / counted")
    for name, entry in peak["caches"].items():
        table.add_row(name, *(f"{entry[key]:.3f}" for key in ("peak", "worst_moment", "held", "reported")))
    return table


def _sliding_table(sliding: dict[str, Any]) -> Table:
    stations = [f"at {at}" for at in next(iter(sliding.values()))["medians"]]
    table = new_table("Sliding window, ms a step", "cache", *stations, "last / first", "update us", "mean")
    for name, entry in sliding.items():
        steps = [f"{seconds * MILLI:.2f}" for seconds in entry["medians"].values()]
        updates = [f"{entry[key] * MICRO:.1f}" for key in ("update_median", "update_mean")]
        table.add_row(name, *steps, f"{entry['last_over_first']:.2f}", *updates)
    return table


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
    show(run.console, results)
    # The targets are for the full model: a small model has other costs.
    hold_to_targets(run, results)
    return run.finish(results, measurements.disagreements)


if __name__ == "__main__":
    sys.exit(main())
