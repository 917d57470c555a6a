"""What a command ends with: its results, as a console, a page of HTML and JSON show them; and the plots of the page."""

import importlib.util
import io
import itertools
import math
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from kvlayers.commands.console import home_expanded, print_json, table
from kvlayers.errors import OptionError
from kvlayers_lab.cli.console import check_writable, print_sentences, unwritable

TEMPLATE = "report.html.jinja"


@dataclass(frozen=True)
class ReportTable:
    """A table of figures.

    Attributes:
        title: title of the table.
        columns: headings of the columns.
        rows: the cells of each row.
        bold: indices of the rows that are bold.
        failed: indices of the rows that a console shows in red.
        texts: indices of the columns with text. The others have figures.
        page_only: headings of the columns that a console of 80 columns has no room for.
        on_console: whether a console shows it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: Collection[int] = ()
    failed: Collection[int] = ()
    texts: Collection[int] = (0,)
    page_only: Collection[str] = ()
    on_console: bool = True

    def show(self, console: Console) -> None:
        """Print the table."""
        # rich would wrap a title of the table to its width, which may be small.
        console.print(self.title, style="italic", markup=False, highlight=False)
        shown = [index for index, column in enumerate(self.columns) if column not in self.page_only]
        rows = [[row[index] for index in shown] for row in self.rows]
        styles = [
            "red" if index in self.failed else "bold" if index in self.bold else None for index in range(len(rows))
        ]
        console.print(table([self.columns[index] for index in shown], rows, None, styles, self.texts))


@dataclass(frozen=True)
class ReportPlot:
    """A plot.

    Attributes:
        title: title of the plot.
        svg: draws it, as an `<svg>` element. It needs matplotlib.
    """

    title: str
    svg: Callable[[], str]


@dataclass(frozen=True)
class Report:
    """What people read of a command's results.

    Attributes:
        title: title of the page.
        tables: tables of the figures.
        findings: the findings, one sentence each.
        answer: the finding that a console shows before the tables, if there is one.
        plots: plots of the figures, for the page.
        notes: how to read the figures, one sentence each, for the page.
        facts: settings, machine, versions and date, by name, for the page.
    """

    title: str
    tables: Sequence[ReportTable]
    findings: Sequence[str]
    answer: str | None = None
    plots: Sequence[ReportPlot] = ()
    notes: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)

    def show(self, console: Console) -> None:
        """Print the answer, the tables and the findings."""
        print_sentences(console, filter(None, [self.answer]))
        for each in self.tables:
            if each.on_console:
                each.show(console)
        print_sentences(console, self.findings)


class Results(Protocol):
    """What a command that measures ends with."""

    @property
    def passed(self) -> bool:
        """Whether the command ends with 0."""

    def plain(self) -> dict[str, Any]:
        """All measurements as JSON types."""

    def report(self) -> Report:
        """What people read."""


def html(report: Report, command: str) -> str:
    """The page of a report that a command line made. All text is escaped, except the SVG of the plots."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvlayers_lab.cli", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(TEMPLATE).render(report=report, command=command)


PACKAGES = ("jinja2", "matplotlib")
INSTALL_REPORT = 'pip install . "./lab[report]" in a checkout of kvlayers'


def report_path(console: Console, asked: Path | None, default: Path | None) -> Path | None:
    """Path of the report, `None` for no report. It is checked before anything is measured.

    Args:
        console: where to say that the default report cannot be made.
        asked: what the user named with `--report`.
        default: the path if the user named nothing, `None` for no report.

    Raises:
        OptionError: the user asked for a report, and packages that make it are missing.
        FileError: the file cannot be written.
    """
    path = asked or default
    if path is None:
        return None
    missing = " and ".join(missing_packages())
    if missing and asked is None:
        console.print(f"No report, since {missing} is not installed: {INSTALL_REPORT}", markup=False, highlight=False)
        return None
    if missing:
        raise OptionError(f"`--report` needs {missing}, which is not installed: {INSTALL_REPORT}")
    file = home_expanded(path)
    check_writable(file)
    return file


def conclude(console: Console, results: Results, path: Path | None, as_json: bool) -> bool:
    """Show results, write their report to `path` unless it is `None`, and print them as JSON if that is asked for.

    Returns whether they passed.

    Raises:
        FileError: the file can no longer be written.
    """
    report = results.report()
    report.show(console)
    if path is not None:
        command = _printable(shlex.join(["kvlayers", *sys.argv[1:]]))
        try:
            path.write_text(html(report, command), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise unwritable(path, error) from None
        console.print(f"Report: {_printable(str(path))}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json(results.plain())
    return results.passed


def _printable(text: str) -> str:
    """The text with bytes that are not UTF-8 (file names may have such bytes) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def missing_packages() -> list[str]:
    """Which of `PACKAGES` are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


INK = "#010203"
"""A placeholder for the text colour of the page, replaced in the SVG."""

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
"""The points of a line: y by x."""


def line_plot(
    name: str, title: str, x_label: str, y_label: str, series: Mapping[str, Points], dashed: tuple[str, ...]
) -> str:
    """Lines with logarithmic axes, base 2 for x and base 10 for y.

    Args:
        name: letters that no other plot of the page has as its name.
        title: title of the plot.
        x_label: label of the x axis.
        y_label: label of the y axis.
        series: the lines by their names. Points whose y is not positive are left out.
        dashed: names of the dashed lines.
    """

    def draw(figure: Any) -> None:
        [axes] = _panels(figure, title, x_label, y_label)
        _draw_lines(axes, series, dashed, markersize=4)
        xs = sorted({x for points in series.values() for x in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:,.0f}" for x in xs])
        axes.minorticks_off()
        _scale_y(axes, [y for points in series.values() for y in points.values() if y > 0])
        if series:
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))

    return figure_svg(name, (8, 4.5), draw)


def labelled_points(
    name: str, title: str, x_label: str, y_label: str, points: Mapping[str, tuple[float, float]]
) -> str:
    """Points with their names beside them, with a logarithmic y axis of base 10.

    Args:
        name: letters that no other plot of the page has as its name.
        title: title of the plot.
        x_label: label of the x axis.
        y_label: label of the y axis.
        points: x and y of each point by its name. Points whose y is not positive are left out.
    """

    def draw(figure: Any) -> None:
        [axes] = _panels(figure, title, x_label, y_label)
        shown = sorted((x, y, label) for label, (x, y) in points.items() if y > 0)
        for index, (x, y, label) in enumerate(shown):
            axes.plot([x], [y], marker="o", color="#2f81c7")
            # Labels alternate between left and right, since neighbouring points may be close to each other.
            aside = {"xytext": (7, 0), "ha": "left"} if index % 2 else {"xytext": (-7, 0), "ha": "right"}
            axes.annotate(label, (x, y), textcoords="offset points", va="center", fontsize=9, **aside)
        _scale_y(axes, [y for _, y, _ in shown])
        axes.margins(x=0.12, y=0.1)

    return figure_svg(name, (8, 4.5), draw)


def curves(
    name: str,
    title: str,
    x_label: str,
    upper: tuple[str, Mapping[str, Points]],
    lower: tuple[str, Mapping[str, Points]],
) -> str:
    """Two panels of lines over the same linear x axis: a logarithmic y axis above, and shares from 0 to 1 below.

    Args:
        name: letters that no other plot of the page has as its name.
        title: title of the plot.
        x_label: label of the x axis.
        upper: label of the upper y axis, and the lines by their names. Points whose y is not positive are left out.
        lower: the same for the lower panel, with lines of the same names.
    """

    def draw(figure: Any) -> None:
        from matplotlib.ticker import PercentFormatter

        above, below = _panels(figure, title, x_label, upper[0], lower[0])
        for axes, (_, series), least in ((above, upper, 0), (below, lower, -1)):
            # Colours repeat after ten lines.
            _draw_lines(axes, series, list(series)[10:], least, markersize=3, linewidth=1.2)
        _scale_y(above, [y for points in upper[1].values() for y in points.values() if y > 0])
        above.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
        below.yaxis.set_major_formatter(PercentFormatter(1))
        below.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")

    return figure_svg(name, (8, 6), draw)


def _panels(figure: Any, title: str, x_label: str, *y_labels: str) -> Any:
    """Panels over one x axis, the first one taller."""
    heights = [3, 2][: len(y_labels)]
    panels = figure.subplots(
        len(y_labels), 1, squeeze=False, sharex=True, height_ratios=heights, subplot_kw={"facecolor": "none"}
    )[:, 0]
    panels[0].set_title(title, loc="left", fontsize=11)
    panels[-1].set_xlabel(x_label)
    for axes, y_label in zip(panels, y_labels, strict=True):
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.25)
    return panels


def _draw_lines(
    axes: Any, series: Mapping[str, Points], dashed: Collection[str], least: float = 0, **options: float
) -> None:
    """Draw lines of the points whose y is above `least`."""
    for label, points in series.items():
        xs = sorted(x for x, y in points.items() if y > least)
        axes.plot(xs, [points[x] for x in xs], "--" if label in dashed else "-", marker="o", label=label, **options)


def _scale_y(axes: Any, ys: Sequence[float]) -> None:
    """Make the y axis logarithmic, with more ticks if the points span fewer than three powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    few_powers = bool(ys) and max(ys) < 1000 * min(ys)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_powers else (1,)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def figure_svg(name: str, size: tuple[float, float], draw: Callable[[Any], None]) -> str:
    """A figure as an `<svg>` element alone, with ids that no other plot has, in the text colour of the page.

    Args:
        name: letters that no other plot of the page has as its name.
        size: width and height in inches.
        draw: draws on the figure that it is given.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        draw(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = written.getvalue()
    own_ids = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg[svg.index("<svg") :])
    return own_ids.replace(INK, "currentColor")


Cells = Mapping[tuple[int, float], float]
"""The cells of a heat map: a figure by length in tokens and depth from 0 to 1."""

COLUMNS = 3
"""Heat maps side by side: with more of them, the figures in the cells of a page of 60 rem are too small to read."""

MOST_LETTERS = 34
"""Letters of a title that fit above a heat map."""

COLORS = "cividis"
"""A colour map that people with any form of colour blindness can read, from dark (low) to light (high)."""


def heat_maps(name: str, title: str, maps: Mapping[str, Cells], scale: tuple[float, float]) -> str:
    """Heat maps on one colour scale: lengths from left to right, depths from top to bottom, a figure in each cell.

    Args:
        name: letters that no other plot of the page has as its name.
        title: title of the plot.
        maps: the heat maps by their titles. A cell that is missing stays empty.
        scale: the figures of the darkest and of the lightest colour.
    """
    lengths = sorted({length for cells in maps.values() for length, _ in cells})
    depths = sorted({depth for cells in maps.values() for _, depth in cells})
    columns = min(COLUMNS, len(maps))
    rows = -(-len(maps) // columns)

    def draw(figure: Any) -> None:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        panels = figure.subplots(
            rows, columns, squeeze=False, sharex=True, sharey=True, subplot_kw={"facecolor": "none"}
        )
        for axes in panels.flat[len(maps) :]:
            axes.remove()
        for index, (axes, (label, cells)) in enumerate(zip(panels.flat, maps.items(), strict=False)):
            _draw_map(axes, cells, lengths, depths, scale)
            # The end of a long name says more than its beginning: package.module:callable.
            axes.set_title(
                label if len(label) <= MOST_LETTERS else f"…{label[1 - MOST_LETTERS :]}", loc="left", fontsize=9
            )
            # The map below may be missing, so that no other map has the labels of this column.
            axes.tick_params(labelbottom=index + columns >= len(maps), length=0)
        figure.supxlabel("tokens", fontsize=9)
        figure.supylabel("depth of the answer", fontsize=9)

    return figure_svg(name, (8, 0.9 + rows * (0.5 + 0.32 * len(depths))), draw)


def _draw_map(axes: Any, cells: Cells, lengths: list[int], depths: list[float], scale: tuple[float, float]) -> None:
    figures = [[cells.get((length, depth), math.nan) for length in lengths] for depth in depths]
    # Not an image, which would be a bitmap in the SVG.
    mesh = axes.pcolormesh(figures, cmap=COLORS, vmin=scale[0], vmax=scale[1], edgecolor=INK, linewidth=0.3)
    for row, column in itertools.product(range(len(depths)), range(len(lengths))):
        figure = figures[row][column]
        if not math.isnan(figure):
            ink = "white" if mesh.norm(figure) < 0.55 else "black"
            axes.text(column + 0.5, row + 0.5, f"{figure:.2f}", color=ink, ha="center", va="center", fontsize=8)
    axes.set_xticks([column + 0.5 for column in range(len(lengths))], [f"{length:,}" for length in lengths], fontsize=8)
    axes.set_yticks([row + 0.5 for row in range(len(depths))], [f"{depth:.0%}" for depth in depths], fontsize=8)
    axes.set_ylim(len(depths), 0)
    axes.spines[:].set_visible(False)
