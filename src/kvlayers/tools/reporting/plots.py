"""Plots as SVG elements that take the colours of the page around them. They need matplotlib."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

INK = "#010203"
"""Stands for the colour of text until the drawing is done."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvlayers",
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.facecolor": "none",
    "legend.edgecolor": INK,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

Points = Mapping[float, float]
"""A line: heights by places."""


def lines(name: str, title: str, across: str, up: str, series: Mapping[str, Points], dashed: tuple[str, ...]) -> str:
    """Lines over places on a scale of powers of two, heights on one of powers of ten.

    Args:
        name: of the drawing, unique on its page: letters.
        title: what it is of.
        across: what the places are.
        up: what the heights are.
        series: the lines by their names. Heights that are not positive are left out.
        dashed: names of lines that are drawn dashed.
    """

    def draw(axes: Any) -> None:
        for label, points in series.items():
            places = sorted(place for place, height in points.items() if height > 0)
            style = "--" if label in dashed else "-"
            axes.plot(places, [points[place] for place in places], style, marker="o", markersize=4, label=label)
        places = sorted({place for points in series.values() for place in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:,.0f}" for place in places])
        axes.minorticks_off()
        _by_powers_of_ten(axes, [height for points in series.values() for height in points.values() if height > 0])
        if series:
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))

    return _drawn(name, title, across, up, draw)


def labelled_points(name: str, title: str, across: str, up: str, points: Mapping[str, tuple[float, float]]) -> str:
    """Points with their names beside them, heights on a scale of powers of ten.

    Args:
        name: of the drawing, unique on its page: letters.
        title: what it is of.
        across: what the places are.
        up: what the heights are.
        points: place and height of each, by its name. Those without a positive height are left out.
    """

    def draw(axes: Any) -> None:
        drawn = sorted((place, height, label) for label, (place, height) in points.items() if height > 0)
        for index, (place, height, label) in enumerate(drawn):
            axes.plot([place], [height], marker="o", color="#2f81c7")
            # Neighbours have theirs on different sides, as they may be close to each other.
            aside = {"xytext": (7, 0), "ha": "left"} if index % 2 else {"xytext": (-7, 0), "ha": "right"}
            axes.annotate(label, (place, height), textcoords="offset points", va="center", fontsize=9, **aside)
        _by_powers_of_ten(axes, [height for _, height, _ in drawn])
        axes.margins(x=0.12, y=0.1)

    return _drawn(name, title, across, up, draw)


def _by_powers_of_ten(axes: Any, heights: Sequence[float]) -> None:
    """A scale for heights, with so many numbers that some are between the lowest and the highest."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    few_powers = bool(heights) and max(heights) < 1000 * min(heights)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_powers else (1,)))
    axes.yaxis.set_major_formatter(lambda height, _: f"{height:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _drawn(name: str, title: str, across: str, up: str, draw: Callable[[Any], None]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor="none")
        axes = figure.subplots(subplot_kw={"facecolor": "none"})
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(alpha=0.25)
        draw(axes)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata=_NO_METADATA)
    return _part_of_a_page(written.getvalue(), name)


def _part_of_a_page(svg: str, name: str) -> str:
    """The element alone, with ids that no other drawing has, in the colour of the page's text."""
    element = svg[svg.index("<svg") :]
    own_ids = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element)
    return own_ids.replace(INK, "currentColor")
