"""Summaries of the measurements: targets, tables, and where they were made."""

import argparse
import datetime
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvlayers.tools.measuring.environment import environment as environment
from lib.contenders import FLOOR, KVLAYERS, KVLAYERS_4_BITS, REFERENCE, TRANSFORMERS_4_BITS, TRANSFORMERS_STATIC
from lib.timing import Disagreements, Tick, Ticking

RESULTS = pathlib.Path(__file__).parents[1] / "results"
SHOWN = 40
MILLI, MICRO = 1e3, 1e6


def terminal() -> Console:
    """The console for tables. Without a terminal, rich's 80 columns would break them."""
    return Console(width=None if sys.stdout.isatty() else 132)


def progress_bars(console: Console, *more: ProgressColumn) -> Progress:
    """Progress bars with a description, a count and the time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, *more, console=console)


def ticking_in(progress: Progress) -> Ticking:
    """Return a function that adds a bar and returns the function that advances it."""

    def ticking(what: str, total: int) -> Tick:
        task = progress.add_task(what, total=total)
        return lambda: progress.advance(task)

    return ticking


def output_path(benchmark: str) -> pathlib.Path:
    """The default output file of a benchmark."""
    return RESULTS / f"{benchmark}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}.json"


def summarise(measured: dict[str, Any]) -> None:
    """Add the median, the mean, and ratios to the reference and to the floor to each contender's raw `seconds`.

    A median is the median of the trials' medians. A ratio is the median of the trials' ratios, so that it only compares
    measurements made side by side; `spread` has the smallest and the largest of them.
    """
    for entry in measured.values():
        medians = [statistics.median(trial) for trial in entry["seconds"]]
        entry["median"] = statistics.median(medians)
        entry["median_range"] = [min(medians), max(medians)]
        entry["mean"] = statistics.median(statistics.fmean(trial) for trial in entry["seconds"])
        entry["slowest"] = max(max(trial) for trial in entry["seconds"])
    for entry in measured.values():
        for key, other in (("speed", REFERENCE), ("speed_to_floor", FLOOR), ("speed_to_exact", TRANSFORMERS_STATIC)):
            if other not in measured:
                continue
            pairs = zip(measured[other]["seconds"], entry["seconds"], strict=True)
            ratios = [statistics.median(baseline) / statistics.median(candidate) for baseline, candidate in pairs]
            entry[key], entry[f"{key}_spread"] = statistics.median(ratios), [min(ratios), max(ratios)]
        pairs = zip(measured[REFERENCE]["seconds"], entry["seconds"], strict=True)
        entry["speed_of_means"] = statistics.median(statistics.fmean(t) / statistics.fmean(o) for t, o in pairs)


def times_as_fast(measured: dict[str, Any], candidate: str, baseline: str) -> float:
    """How many times as fast one contender is as another: the median of the trials' ratios."""
    pairs = zip(measured[baseline]["seconds"], measured[candidate]["seconds"], strict=True)
    return statistics.median(statistics.median(t) / statistics.median(o) for t, o in pairs)


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


def promised(what: str, value: float, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """A target: its bound, the measurement, and whether it is met."""
    met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    asked = f">= {at_least}" if at_least is not None else f"<= {at_most}"
    return {"what": what, "asked": asked, "value": value, "met": met}


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The project's targets for these figures: target, measurement, and whether it is met."""
    found: list[dict[str, Any]] = []

    def promise(what: str, value: float, **bounds: float) -> None:
        found.append(promised(what, value, **bounds))

    decode, update = results["decode"].get("random", {}), results["update"]
    if 16384 in decode:
        candidate = decode[16384][KVLAYERS]
        promise("step at 16k, times as fast as transformers' DynamicCache", candidate["speed"], at_least=3.5)
        promise("step at 16k, speed relative to preallocated memory", candidate["speed_to_floor"], at_least=0.9)
        promise(
            "the same relative to transformers' StaticCache of the exact length",
            candidate["speed_to_exact"],
            at_least=0.9,
        )
        if "amortised" in candidate:
            promise("the same with growth amortised", candidate["amortised_speed_to_floor"], at_least=0.9)
    if 128 in decode:
        promise(
            "step at 128, times as fast as transformers' DynamicCache", decode[128][KVLAYERS]["speed"], at_least=0.98
        )
    if 64 in update:
        promise("update at 64, median time relative to transformers'", 1 / update[64][KVLAYERS]["speed"], at_most=1)
        promise(
            "update at 64, mean time relative to transformers'", 1 / update[64][KVLAYERS]["speed_of_means"], at_most=1
        )
    for length, measured in results.get("quantized", {}).items():
        if length not in (4096, 16384):
            continue
        least = 4 if length == 4096 else 5
        candidate, where = measured[KVLAYERS_4_BITS], f"4-bit step at {length}"
        for baseline in TRANSFORMERS_4_BITS:
            speed = times_as_fast(measured, KVLAYERS_4_BITS, baseline)
            promise(f"{where}, times as fast as {baseline}", speed, at_least=least)
        if length == 16384:
            slower = times_as_fast(measured, KVLAYERS, KVLAYERS_4_BITS)
            promise(f"{where}, time relative to kvlayers' DynamicCache", slower, at_most=1.3)
            dense = length_bytes(measured)
            promise("bytes held at 16k, 4 bits relative to dense", candidate["held"] / dense, at_most=0.295)
            promise(
                "bytes held at 16k, 2 bits relative to dense", measured["kvlayers 2 bits"]["held"] / dense, at_most=0.17
            )
    if results["peak"]:
        entry = results["peak"]["caches"][KVLAYERS]
        promise(
            f"peak growing to {results['peak']['tokens']}, relative to the bytes in use", entry["peak"], at_most=1.3
        )
    if results["sliding"]:
        entry = results["sliding"][KVLAYERS]
        promise("sliding window, last step time relative to the first", entry["last_over_first"], at_most=1.1)
    return found


def length_bytes(measured: dict[str, Any]) -> int:
    """Bytes of the states alone, which are those of transformers' cache because it concatenates."""
    return int(measured[REFERENCE]["held"])


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


def new_table(title: str, *columns: str) -> Table:
    """An empty table whose first column names the rows."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table


def span(entry: dict[str, Any], key: str) -> str:
    """A figure with the smallest and the largest of the trials."""
    low, high = entry[f"{key}_spread"]
    return f"{entry[key]:.2f} ({low:.2f}-{high:.2f})"


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
                f"{entry['held'] / length_bytes(measured):.4f}",
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


def show_targets(console: Console, promises: list[dict[str, Any]]) -> None:
    """Print the targets and the measurements."""
    for promise in promises:
        verdict = "[green]met[/]" if promise["met"] else "[red]missed[/]"
        console.print(f"{verdict}: {promise['what']}: {promise['value']:.4g}, asked {promise['asked']}")


def write(console: Console, given: argparse.Namespace, environment: dict[str, Any], content: dict[str, Any]) -> None:
    """Write the machine, the arguments and the results of a benchmark to `given.output`, as JSON."""
    plain = {key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(given).items()}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps({**environment, "arguments": plain, **content}, indent=1))
    console.print(f"written to {given.output}")


def finish(
    console: Console,
    given: argparse.Namespace,
    environment: dict[str, Any],
    results: dict[str, Any],
    promises: Sequence[dict[str, Any]],
    *disagreements: Disagreements,
) -> int:
    """Write the JSON, print where caches disagreed, in each dtype, and return the exit code."""
    found = [entry for each in disagreements for entry in each.found]
    write(console, given, environment, {"results": results, "targets": promises, "disagreements": found})
    for entry in sorted(found, key=lambda entry: entry["tie"])[:SHOWN]:
        gap = f", logits {entry['logit_gap']:.4f} apart" if "logit_gap" in entry else ""
        console.print(
            f"{'tie' if entry['tie'] else '[red]disagreement[/]'}: {entry['cache']} on {entry['model']} at "
            f"{entry['tokens']} tokens, trial {entry['trial']}: expected {entry['expected']}, saw {entry['seen']}{gap}"
        )
    for each in disagreements:
        ties, dtype = len(each.found) - each.failures, str(each.dtype).removeprefix("torch.")
        console.print(f"{each.failures} disagreements with transformers' DynamicCache, and {ties} ties in {dtype}")
    return 1 if any(each.failures for each in disagreements) else 0
