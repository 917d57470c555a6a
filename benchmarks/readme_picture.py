"""Measures and draws the picture in README.md: the time of a decode step and the bytes held, by context length.

    python benchmarks/readme_picture.py --record         # measure, record and draw: under 4 minutes on two idle cores
    python benchmarks/readme_picture.py --from-recorded  # draw again what is recorded, and measure nothing
    python benchmarks/readme_picture.py --quick          # a small model, to see that it runs

The model is a random llama of 8 layers in bfloat16, batch 1. The caches take turns within each trial, and every token
is compared with the one from transformers' `DynamicCache`: if kvlayers' `DynamicCache` gives another token, the exit
code is 1. Each length is written to `--output` as soon as it is measured. A run that was stopped continues from there:
lengths that the file already has are not measured again. Delete the file to start over.
"""

import argparse
import datetime
import io
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from lib import report
from lib.contenders import KVLAYERS, KVLAYERS_4_BITS, QUANTIZED, REFERENCE
from lib.timing import Disagreements, measure_decode
from lib.workload import QUICK_SHAPE, RandomModel, Shape
from plots import RECORDED, provenance
from record import without_single_times

PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "plots" / "readme.svg"
LENGTHS = (1024, 4096, 8192, 16384)
CACHES = {
    REFERENCE: ("transformers DynamicCache", "#d0605e"),
    KVLAYERS: ("kvlayers DynamicCache", "#3b8bd0"),
    KVLAYERS_4_BITS: ("kvlayers int4", "#2a9d6f"),
}
"""The caches that are compared, with the label and the colour of each line."""

INK = "#010203"
"""Stands for the colour of text, which the SVG file takes from the colour scheme of the reader."""

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvlayers",
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
COLOURS_OF_THE_READER = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


def measure(given: argparse.Namespace) -> int:
    """Measure the lengths that `--output` lacks, and write each of them there; return the exit code."""
    console = report.terminal()
    found = {**report.environment(), "note": given.note, "results": {"picture": {}}}
    if given.output.exists() and not given.quick:
        found = json.loads(given.output.read_text())
    measured = found["results"]["picture"]
    # Caches are filled in one piece, as by a prompt that is read in one forward pass.
    workload = RandomModel(QUICK_SHAPE if given.quick else Shape(), chunk=1 << 16)
    makers = {name: QUANTIZED[name] for name in CACHES}
    disagreements = Disagreements()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with report.progress_bars(console) as progress:
        ticking = report.ticking_in(progress)
        for length in given.lengths:
            if str(length) in measured:
                continue
            tick = ticking(f"{length:,} tokens", given.trials)
            entry = measure_decode(workload, makers, length, given.steps, given.trials, 4, disagreements, tick)
            report.summarise(entry)
            measured[str(length)] = without_single_times(entry)
            given.output.write_text(json.dumps(found, indent=1) + "\n")
    for length, entry in measured.items():
        for name, (label, _) in CACHES.items():
            step, speed, held = entry[name]["median"] * 1e3, entry[name]["speed"], entry[name]["held"] / 1e6
            console.print(f"{int(length):>6,} tokens  {label:<26} {step:6.1f} ms  {speed:5.2f}x  {held:6.1f} MB")
    wrong = [entry for entry in disagreements.found if entry["cache"] == KVLAYERS and not entry["tie"]]
    console.print(f"{len(wrong)} tokens of kvlayers' DynamicCache differ from transformers'")
    return 1 if wrong else 0


def picture(found: Mapping[str, Any]) -> Figure:
    """The step time and the bytes held, side by side, by context length."""
    measured = found["results"]["picture"]
    lengths = sorted(map(int, measured))
    drawn = Figure(figsize=(9, 3.9), layout="constrained", facecolor="none")
    panels = drawn.subplots(1, 2, subplot_kw={"facecolor": "none"})
    for axes, key, scale, title in (
        (panels[0], "median", 1e3, "Time of a decode step, ms"),
        (panels[1], "held", 1e-6, "Cache memory, MB"),
    ):
        for name, (label, colour) in CACHES.items():
            heights = [measured[str(length)][name][key] * scale for length in lengths]
            axes.plot(lengths, heights, marker="o", markersize=4, color=colour, label=label)
            axes.annotate(
                f"{heights[-1]:.0f}", (lengths[-1], heights[-1]), xytext=(6, 0), textcoords="offset points",
                va="center", color=colour,
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
    caption = " ".join(filter(None, (how, found.get("note"))))
    drawn.supxlabel(f"{caption}\n{provenance(found)}", fontsize=8, x=0.01, ha="left")
    return drawn


def draw(found: Mapping[str, Any], path: pathlib.Path) -> None:
    """Write the picture as an SVG file that is readable on a light and on a dark page."""
    written = io.StringIO()
    with matplotlib.rc_context(STYLE):
        # Without dates and versions in it, equal pictures are equal files.
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        picture(found).savefig(written, format="svg", transparent=True, metadata=metadata)
    svg = written.getvalue()
    start = svg.index(">", svg.index("<svg")) + 1
    svg = svg[:start] + COLOURS_OF_THE_READER + svg[start:].replace(INK, "currentColor")
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def recorded_path() -> pathlib.Path:
    """The newest record."""
    return max(RECORDED.glob("readme-*.json"))


def keep(output: pathlib.Path) -> pathlib.Path:
    """Record the measurements in place of the earlier ones, and remove `output`; return the record."""
    for old in RECORDED.glob("readme-*.json"):
        old.unlink()
    path = RECORDED / f"readme-{datetime.date.today()}.json"
    path.write_text(output.read_text())
    # The next run starts over.
    output.unlink()
    return path


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5, help="trials (5)")
    parser.add_argument("--steps", type=int, default=24, help="decode steps in each trial (24)")
    parser.add_argument("--note", default="", help="a remark for the caption, such as 'Measured on a busy machine.'")
    parser.add_argument("--record", action="store_true", help="record the measurements, and draw docs/plots/readme.svg")
    parser.add_argument("--from-recorded", action="store_true", help="draw what is recorded, and measure nothing")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/readme.json)")
    parser.add_argument("--quick", action="store_true", help="a small model and short contexts, a few seconds")
    given = parser.parse_args(arguments)
    if given.record and (given.quick or given.from_recorded):
        parser.error("--record keeps what a full run measures: use it without --quick and --from-recorded")
    given.lengths = (64, 128) if given.quick else LENGTHS
    given.output = given.output or report.RESULTS / ("readme-quick.json" if given.quick else "readme.json")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if an exact cache gives other tokens."""
    given = parse(arguments)
    if given.from_recorded:
        draw(json.loads(recorded_path().read_text()), PICTURE)
        print(f"drawn: {PICTURE}")
        return 0
    failed = measure(given)
    if given.record and not failed:
        path = keep(given.output)
        draw(json.loads(path.read_text()), PICTURE)
        print(f"recorded in {path}, and drawn: {PICTURE}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
