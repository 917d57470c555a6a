"""A report: what is in it, and how it becomes a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TEMPLATE = "report.html.jinja"


@dataclass(frozen=True)
class ReportTable:
    """A table of figures.

    Attributes:
        title: what it is of.
        columns: heads of the columns; the first is of words, the others of figures.
        rows: cells, a row each.
        bold: indices of the rows that stand out.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: Sequence[int] = ()


@dataclass(frozen=True)
class ReportPlot:
    """A plot.

    Attributes:
        title: what it is of.
        svg: the drawing, an `<svg>` element, as `kvlayers.tools.reporting.plots` makes it.
    """

    title: str
    svg: str


@dataclass(frozen=True)
class Report:
    """All that a reader sees.

    Attributes:
        title: of the page.
        command: the command line that made it.
        findings: what came out, a sentence each.
        tables: the figures.
        plots: drawings of them.
        notes: how to read the figures, a sentence each.
        facts: machine, versions, date and settings, by name.
    """

    title: str
    command: str
    findings: Sequence[str]
    tables: Sequence[ReportTable]
    plots: Sequence[ReportPlot]
    notes: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def html(report: Report) -> str:
    """The page. All text is escaped; only the drawings are taken as they are."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvlayers.tools.reporting", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(TEMPLATE).render(report=report)


def write(report: Report, path: Path) -> None:
    """Write the page to a file. Raises `OSError` as files do."""
    path.write_text(html(report), encoding="utf-8", errors="backslashreplace")
