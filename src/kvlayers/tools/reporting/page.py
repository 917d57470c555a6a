"""A report, and how it is rendered to an HTML file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TEMPLATE = "report.html.jinja"


@dataclass(frozen=True)
class ReportTable:
    """A table of figures.

    Attributes:
        title: title of the table.
        columns: headings of the columns. The first column has text, the others have figures.
        rows: the cells of each row.
        bold: indices of the rows that are bold.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: Sequence[int] = ()


@dataclass(frozen=True)
class ReportPlot:
    """A plot.

    Attributes:
        title: title of the plot.
        svg: an `<svg>` element from `kvlayers.tools.reporting.plots`.
    """

    title: str
    svg: str


@dataclass(frozen=True)
class Report:
    """The contents of a report.

    Attributes:
        title: title of the page.
        command: the command line that made the report.
        findings: the findings, one sentence each.
        tables: tables of the figures.
        plots: plots of the figures.
        notes: how to read the figures, one sentence each.
        facts: settings, machine, versions and date, by name.
    """

    title: str
    command: str
    findings: Sequence[str]
    tables: Sequence[ReportTable]
    plots: Sequence[ReportPlot]
    notes: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def html(report: Report) -> str:
    """Render the page. All text is escaped, except the SVG of the plots."""
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
    """Write the page to a file. Raises `OSError` if it cannot be written."""
    path.write_text(html(report), encoding="utf-8", errors="backslashreplace")
