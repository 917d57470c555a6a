"""Draws results as plots, for the page of figures, and the picture in README.md.

    python lab/benchmarks/plots.py                                       # lab/benchmarks/recorded, to docs/plots
    python lab/benchmarks/plots.py lab/benchmarks/results/decode-....json --output plots

A plot is drawn if the result has its section. Each plot has the machine, the versions and the date of the measurement.
The picture is of the time of a decode step and the bytes held, by context length, as recorded by
`claims.py --only step --record`, which draws it too.
"""

import argparse
import io
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MultipleLocator
except ImportError:
    sys.exit("plots.py: expected matplotlib, but it is not installed: pip install matplotlib.")

import claimed
import pages
from pages import DOCS, RECORDED

PLOTS = DOCS / "plots"

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
    hardware, versions = found["hardware"], found["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "kvlayers"))
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads"
    memory = f"{hardware['ram_bytes'] / 2**30:.0f} GiB"
    return f"{machine}, {memory}, {found['date'][:10]}\n{names}, Python {versions['python']}"


Line = tuple[str, list[float], list[float], dict[str, Any]]
"""A label, places, heights, and the style."""


def lines_plot(found: Mapping[str, Any], title: str, across: str, up: str, lines: list[Line]) -> Axes:
    axes = Figure(figsize=(7, 4.6), layout="constrained").subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(f"{across}\n\n{provenance(found)}", fontsize=8)
    axes.set_ylabel(up, fontsize=9)
    axes.grid(alpha=0.3)
    for label, places, heights, style in lines:
        # Bars, if there are any, are the smallest and the largest median of the trials.
        axes.errorbar(places, heights, label=label, **{"capsize": 2, "markersize": 4, **style})
    axes.legend(fontsize=8)
    return axes


def update_plot(found: Mapping[str, Any]) -> Axes | None:
    measured = found["results"].get("update")
    if not measured:
        return None
    lengths, lines = sorted(measured, key=int), list[Line]()
    for name in (name for name in STYLES if name in measured[lengths[0]]):
        entries = [measured[length][name] for length in lengths]
        medians = [entry["median"] * 1e6 for entry in entries]
        spreads = [
            [abs(entry["median_range"][end] * 1e6 - median) for entry, median in zip(entries, medians, strict=True)]
            for end in (0, 1)
        ]
        lines.append((name, list(map(int, lengths)), medians, {"yerr": spreads, **STYLES[name]}))
    title = "An update of one layer by one token"
    axes = lines_plot(found, title, "tokens held", "µs (median; both axes logarithmic)", lines)
    axes.set_xscale("log", base=2)
    # A tick for each measured length and no other.
    axes.set_xticks(list(map(int, lengths)), [f"{int(length):,}" for length in lengths])
    axes.set_yscale("log")
    return axes


def window_plot(found: Mapping[str, Any]) -> Axes | None:
    measured = found["results"].get("sliding")
    if not measured:
        return None
    lines = list[Line]()
    for name in (name for name in STYLES if name in measured):
        medians = measured[name]["medians"]
        lines.append((name, list(map(int, medians)), [each * 1e3 for each in medians.values()], STYLES[name]))
    title = f"A decode step with a window of {found['arguments']['window']} tokens"
    axes = lines_plot(found, title, "tokens seen", "ms a step (median)", lines)
    axes.set_ylim(bottom=0)
    return axes


def calibration_plot(found: Mapping[str, Any]) -> Axes | None:
    measured = found["results"].get("calibration")
    if not measured:
        return None
    budgets = {float(budget): each for budget, each in measured["budgets"].items()}
    uniform = [(place, name, kl) for place, each in budgets.items() for name, kl in each["uniform"].items()]
    alike = {**STYLES["transformers.DynamicCache"], "linestyle": "", "markersize": 5}
    places, heights = [place for place, _, _ in uniform], [kl for _, _, kl in uniform]
    taken, left = ([each[key] for each in budgets.values()] for key in ("bytes_per_token", "divergence"))
    lines: list[Line] = [
        ("the same bits in every layer", places, heights, alike),
        ("calibrated", taken, left, {**STYLES["kvlayers.DynamicCache"], "markersize": 5}),
    ]
    title = f"Calibrated bits, {pathlib.Path(found['arguments']['model']).name}"
    axes = lines_plot(found, title, "bytes a token", "KL divergence, nats (logarithmic)", lines)
    for place, name, kl in uniform:
        axes.annotate(name, (place, kl), xytext=(6, 0), textcoords="offset points", fontsize=8, va="center")
    axes.set_xticks(list(budgets), [f"{place:,.0f}" for place in budgets])
    axes.set_yscale("log")
    axes.margins(x=0.1)
    return axes


def position_plot(found: Mapping[str, Any]) -> Axes | None:
    measured = found["results"].get("fidelity")
    if not measured:
        return None
    lines = list[Line]()
    for setting in measured["settings"]:
        points = {(each["start"] + each["stop"] - 1) / 2: each["kl"] for each in setting["by_position"]}
        shown = {position: kl for position, kl in points.items() if kl >= LEAST_KL}
        if shown:
            lines.append((setting["name"], list(shown), list(shown.values()), {"marker": "o"}))
    of = f"{measured['model']}, {measured['passages']} passages, {measured['chunk']} tokens at once"
    up = "KL divergence, nats (logarithmic)"
    axes = lines_plot(found, f"Divergence by position, {of}", "position in the passage, tokens", up, lines)
    axes.set_yscale("log")
    # Beside the axes, since there are many lines.
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    return axes


PICTURE = PLOTS / "readme.svg"
CACHES = {
    claimed.TRANSFORMERS: ("transformers DynamicCache", "#d0605e"),
    claimed.DYNAMIC: ("kvlayers DynamicCache", "#3b8bd0"),
    claimed.INT4: ("kvlayers int4", "#2a9d6f"),
}
"""The caches that are compared, with the label and the colour of each line."""

INK = "#010203"
"""Stands for the colour of text, which the SVG file takes from the colour scheme of the reader."""

PICTURE_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvlayers",
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
COLOURS_OF_THE_READER = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"

NEAR = 0.06
"""Share of the highest number within which two numbers would overlap."""


def picture(found: Mapping[str, Any]) -> Figure:
    cells = found["cells"]
    lengths = claimed.LENGTHS
    drawn = Figure(figsize=(9, 3.9), layout="constrained", facecolor="none")
    panels = drawn.subplots(1, 2, subplot_kw={"facecolor": "none"})
    for axes, column, title in (
        (panels[0], claimed.MILLISECONDS, "Time of a decode step, ms"),
        (panels[1], claimed.MEGABYTES, "Cache memory, MB"),
    ):
        curves = {row: [cells[claimed.length_row(row, length)][column] for length in lengths] for row in CACHES}
        for row, (label, colour) in CACHES.items():
            heights = curves[row]
            axes.plot(lengths, heights, marker="o", markersize=4, color=colour, label=label)
            axes.annotate(
                f"{heights[-1]:.0f}", (lengths[-1], heights[-1]), xytext=(6, 0), textcoords="offset points",
                va=side_of(heights[-1], [curve[-1] for curve in curves.values()]), color=colour,
            )  # fmt: skip
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("tokens in the cache")
        axes.xaxis.set_major_locator(MultipleLocator(4096))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1024:g}k" if tokens else "0"))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    panels[0].legend(frameon=False, fontsize=9)
    how = "Random llama of 8 layers, bfloat16, batch 1. Medians; the caches took turns."
    drawn.supxlabel(f"{how}\n{provenance(found['at'])}", fontsize=8, x=0.01, ha="left")
    return drawn


def side_of(height: float, heights: list[float]) -> str:
    """On which side of a curve's end its number stands clear of those of curves that end near it."""
    near = [other for other in heights if 0 < abs(other - height) < NEAR * max(heights)]
    if not near:
        return "center"
    return "top" if max(near) > height else "bottom"


def draw_picture(found: Mapping[str, Any], path: pathlib.Path) -> None:
    """Write the picture as an SVG file that is readable on a light and on a dark page."""
    written = io.StringIO()
    with matplotlib.rc_context(PICTURE_STYLE):
        # Without dates and versions in it, equal pictures are equal files.
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        picture(found).savefig(written, format="svg", transparent=True, metadata=metadata)
    svg = written.getvalue()
    start = svg.index(">", svg.index("<svg")) + 1
    svg = svg[:start] + COLOURS_OF_THE_READER + svg[start:].replace(INK, "currentColor")
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


DRAWN: dict[str, Callable[[Mapping[str, Any]], Axes | None]] = {
    "update": update_plot,
    "window": window_plot,
    "kl": calibration_plot,
    "position": position_plot,
}


def plots_of(results: pathlib.Path, output: pathlib.Path) -> list[pathlib.Path]:
    found = json.loads(results.read_text())
    written = []
    for name, plot in DRAWN.items():
        axes = plot(found)
        if axes is not None:
            path = output / f"{results.stem}-{name}.png"
            # Without matplotlib's version in it, equal plots are equal files.
            axes.get_figure().savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
            written.append(path)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", nargs="*", type=pathlib.Path, help="files of results; those of lab/benchmarks/recorded"
    )
    parser.add_argument("--output", type=pathlib.Path, default=PLOTS, help="where the plots go")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for results in arguments.results or sorted(RECORDED.glob("*.json")):
        for path in plots_of(results, arguments.output):
            print(path)
    if not arguments.results:
        draw_picture(pages.parts("claims")["step"], arguments.output / PICTURE.name)


if __name__ == "__main__":
    main()
