"""Draws the picture in README.md: the time of a decode step and the bytes held, by context length, from a record.

`claims.py --only step --record` measures them and draws it, and `claims.py --write` draws it again.
"""

import functools
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

try:
    from matplotlib.ticker import FuncFormatter, MultipleLocator
except ImportError:
    sys.exit("plots.py: expected matplotlib, but it is not installed: pip install matplotlib.")

import claimed
from kvlayers_lab.cli.report import figure_svg
from pages import DOCS

PICTURE = DOCS / "plots" / "readme.svg"
CACHES = {
    claimed.TRANSFORMERS: ("transformers DynamicCache", "#d0605e"),
    claimed.DYNAMIC: ("kvlayers DynamicCache", "#3b8bd0"),
    claimed.INT4: ("kvlayers int4", "#2a9d6f"),
}
"""The caches that are compared, with the label and the colour of each line."""

COLOURS_OF_THE_READER = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"

NEAR = 0.06
"""Share of the highest number within which two numbers would overlap."""


def provenance(found: Mapping[str, Any]) -> str:
    hardware, versions = found["hardware"], found["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "kvlayers"))
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads"
    memory = f"{hardware['ram_bytes'] / 2**30:.0f} GiB"
    return f"{machine}, {memory}, {found['date'][:10]}\n{names}, Python {versions['python']}"


def draw(figure: Any, found: Mapping[str, Any]) -> None:
    """Draw two panels from a record of `claims.py --only step`."""
    cells = found["cells"]
    lengths = claimed.LENGTHS
    panels = figure.subplots(1, 2, subplot_kw={"facecolor": "none"})
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
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=9)
    how = "Random llama of 8 layers, bfloat16, batch 1. Medians; the caches took turns."
    figure.supxlabel(f"{how}\n{provenance(found['at'])}", fontsize=8, x=0.01, ha="left")


def side_of(height: float, heights: list[float]) -> str:
    """On which side of a curve's end its number stands clear of those of curves that end near it."""
    near = [other for other in heights if 0 < abs(other - height) < NEAR * max(heights)]
    if not near:
        return "center"
    return "top" if max(near) > height else "bottom"


def draw_picture(found: Mapping[str, Any], path: pathlib.Path) -> None:
    """Write the picture as an SVG file that is readable on a light and on a dark page."""
    svg = figure_svg("readme", (9, 3.9), functools.partial(draw, found=found))
    start = svg.index(">") + 1
    svg = svg[:start] + COLOURS_OF_THE_READER + svg[start:]
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
