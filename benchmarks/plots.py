"""Draws results as plots, for the page of figures.

    python benchmarks/plots.py                                       # benchmarks/recorded, to docs/plots
    python benchmarks/plots.py benchmarks/results/decode-....json --output plots

A plot is drawn if the result has its section. Each plot has the machine, the versions and the date of the measurement.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    sys.exit("plots.py: expected matplotlib, but it is not installed: pip install matplotlib.")

ROOT = pathlib.Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "recorded"
PLOTS = ROOT / "docs" / "plots"

STYLES: dict[str, dict[str, Any]] = {
    "transformers.DynamicCache": {"color": "#b4464b", "marker": "o"},
    "transformers.StaticCache": {"color": "#b4464b", "marker": "s", "linestyle": "--"},
    "preallocated to length": {"color": "#8a8a8a", "marker": "", "linestyle": ":"},
    "kvlayers.DynamicCache": {"color": "#20639b", "marker": "o"},
    "kvlayers.StaticCache": {"color": "#20639b", "marker": "s", "linestyle": "--"},
}
"""By contender: a colour for each library, a line style for each kind of cache."""

DOTS_PER_INCH = 110

LEAST_KL = 1e-7
"""Divergence, in nats, below which it is the rounding of float32, which a logarithmic axis would make a line of."""


def provenance(found: Mapping[str, Any]) -> str:
    """Machine, versions and date of a result, in two lines."""
    hardware, versions = found["hardware"], found["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "kvlayers"))
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads"
    memory = f"{hardware['ram_bytes'] / 2**30:.0f} GiB"
    return f"{machine}, {memory}, {found['date'][:10]}\n{names}, Python {versions['python']}"


def figure(found: Mapping[str, Any], title: str, across: str, up: str) -> tuple[Figure, Axes]:
    """An empty plot, with a title and where it was measured."""
    drawn = Figure(figsize=(7, 4.6), layout="constrained")
    axes = drawn.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(f"{across}\n\n{provenance(found)}", fontsize=8)
    axes.set_ylabel(up, fontsize=9)
    axes.grid(alpha=0.3)
    return drawn, axes


def draw(axes: Axes, name: str, points: Mapping[int, tuple[float, float, float]]) -> None:
    """Draw a line: medians by tokens, with the smallest and the largest median of the trials as bars."""
    tokens = sorted(points)
    medians = [points[at][0] for at in tokens]
    below = [points[at][0] - points[at][1] for at in tokens]
    above = [points[at][2] - points[at][0] for at in tokens]
    axes.errorbar(tokens, medians, yerr=(below, above), label=name, capsize=2, markersize=4, **STYLES[name])


def by_contender(measured: Mapping[str, Any], scale: float) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Turn contenders by length into lengths by contender, in units of `1 / scale` seconds."""
    lines: dict[str, dict[int, tuple[float, float, float]]] = {}
    for length, contenders in measured.items():
        if length == "model":
            continue
        for name, entry in contenders.items():
            low, high = entry["median_range"]
            lines.setdefault(name, {})[int(length)] = (entry["median"] * scale, low * scale, high * scale)
    return {name: lines[name] for name in STYLES if name in lines}


def lengths_as_ticks(axes: Axes, lengths: list[int]) -> None:
    """Make the axis logarithmic, with a tick for each measured length and no other."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])


def step_plot(found: Mapping[str, Any]) -> Figure | None:
    """Milliseconds a decode step by tokens held, with a random model."""
    measured = found["results"].get("decode", {}).get("random")
    if not measured:
        return None
    title = f"A decode step, {measured['model']}, bfloat16, batch 1"
    drawn, axes = figure(found, title, "tokens held", "ms a step (median; least and greatest of the trials)")
    lines = by_contender(measured, 1e3)
    for name, points in lines.items():
        draw(axes, name, points)
    lengths_as_ticks(axes, sorted({length for points in lines.values() for length in points}))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return drawn


def update_plot(found: Mapping[str, Any]) -> Figure | None:
    """Microseconds of one layer's update by one token, by tokens held."""
    measured = found["results"].get("update")
    if not measured:
        return None
    drawn, axes = figure(
        found, "An update of one layer by one token", "tokens held", "µs (median; both axes logarithmic)"
    )
    lines = by_contender(measured, 1e6)
    for name, points in lines.items():
        draw(axes, name, points)
    lengths_as_ticks(axes, sorted({length for points in lines.values() for length in points}))
    axes.set_yscale("log")
    axes.legend(fontsize=8)
    return drawn


def window_plot(found: Mapping[str, Any]) -> Figure | None:
    """Milliseconds a decode step of a model with sliding windows, by tokens seen."""
    measured = found["results"].get("sliding")
    if not measured:
        return None
    window = found["arguments"]["window"]
    drawn, axes = figure(found, f"A decode step with a window of {window} tokens", "tokens seen", "ms a step (median)")
    for name in STYLES:
        if name in measured:
            medians = {int(at): seconds * 1e3 for at, seconds in measured[name]["medians"].items()}
            axes.plot(list(medians), list(medians.values()), label=name, markersize=4, **STYLES[name])
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return drawn


def chat_plot(found: Mapping[str, Any]) -> Figure | None:
    """Seconds of each turn of a chat, with a prefix store and without."""
    turns = found["results"].get("chat")
    if not turns:
        return None
    model = pathlib.Path(found["arguments"]["model"]).name
    drawn, axes = figure(found, f"Turns of a chat, {model}, float32", "tokens of the turn's prompt", "s a turn")
    tokens = [turn["tokens"] for turn in turns]
    transformers_style, kvlayers_style = STYLES["transformers.DynamicCache"], STYLES["kvlayers.DynamicCache"]
    axes.plot(
        tokens, [turn["transformers"] for turn in turns], label="transformers", markersize=4, **transformers_style
    )
    axes.plot(
        tokens, [turn["seconds"] for turn in turns], label="kvlayers, PrefixStore", markersize=4, **kvlayers_style
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return drawn


def calibration_plot(found: Mapping[str, Any]) -> Figure | None:
    """Divergence by bytes a token, for calibrated bits and for the same bits in every layer."""
    measured = found["results"].get("calibration")
    if not measured:
        return None
    model, budgets = pathlib.Path(found["arguments"]["model"]).name, measured["budgets"]
    drawn, axes = figure(found, f"Calibrated bits, {model}", "bytes a token", "KL divergence, nats (logarithmic)")
    places = [float(budget) for budget in budgets]
    uniform = [
        (place, name, kl)
        for place, each in zip(places, budgets.values(), strict=True)
        for name, kl in each["uniform"].items()
    ]
    alike, kvlayers_style = STYLES["transformers.DynamicCache"], STYLES["kvlayers.DynamicCache"]
    axes.plot(
        [place for place, _, _ in uniform],
        [kl for _, _, kl in uniform],
        label="the same bits in every layer",
        markersize=5,
        **{**alike, "linestyle": ""},
    )
    for place, name, kl in uniform:
        axes.annotate(name, (place, kl), xytext=(6, 0), textcoords="offset points", fontsize=8, va="center")
    calibrated = [(each["bytes_per_token"], each["divergence"]) for each in budgets.values()]
    axes.plot(*zip(*calibrated, strict=True), label="calibrated", markersize=5, **kvlayers_style)
    axes.set_xticks(places, [f"{place:,.0f}" for place in places])
    axes.set_yscale("log")
    axes.margins(x=0.1)
    axes.legend(fontsize=8)
    return drawn


def position_plot(found: Mapping[str, Any]) -> Figure | None:
    """Divergence by position in a passage, for each cache."""
    measured = found["results"].get("fidelity")
    if not measured:
        return None
    passages, model = measured["passages"], measured["model"]
    title = f"Divergence by position, {model}, {passages} passages, {measured['chunk']} tokens at once"
    drawn, axes = figure(found, title, "position in the passage, tokens", "KL divergence, nats (logarithmic)")
    for setting in measured["settings"]:
        points = {(each["start"] + each["stop"] - 1) / 2: each["kl"] for each in setting["by_position"]}
        shown = {position: kl for position, kl in points.items() if kl >= LEAST_KL}
        if shown:
            axes.plot(list(shown), list(shown.values()), label=setting["name"], marker="o", markersize=4)
    axes.set_yscale("log")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    return drawn


DRAWN: dict[str, Callable[[Mapping[str, Any]], Figure | None]] = {
    "step": step_plot,
    "update": update_plot,
    "window": window_plot,
    "chat": chat_plot,
    "kl": calibration_plot,
    "position": position_plot,
}


def plots_of(results: pathlib.Path, output: pathlib.Path) -> list[pathlib.Path]:
    """Draw the plots of a file of results; return their paths."""
    found = json.loads(results.read_text())
    written = []
    for name, plot in DRAWN.items():
        drawn = plot(found)
        if drawn is not None:
            path = output / f"{results.stem}-{name}.png"
            # Without matplotlib's version in it, equal plots are equal files.
            drawn.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
            written.append(path)
    return written


def main() -> None:
    """Draw the plots of all given results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=pathlib.Path, help="files of results; those of benchmarks/recorded")
    parser.add_argument("--output", type=pathlib.Path, default=PLOTS, help="where the plots go")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for results in arguments.results or sorted(RECORDED.glob("*.json")):
        for path in plots_of(results, arguments.output):
            print(path)


if __name__ == "__main__":
    main()
