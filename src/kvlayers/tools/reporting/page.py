"""The HTML report of a command: its contents, its path, and how it is rendered."""

import importlib.util
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from kvlayers.errors import OptionError
from kvlayers.tools.cli.console import check_writable, home_expanded, unwritable

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


PACKAGES = ("jinja2", "matplotlib")
INSTALL_REPORT = 'pip install "kvlayers[report]"'


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


def publish(console: Console, report: Report, path: Path) -> None:
    """Write a report, and print its path.

    Raises:
        FileError: the file can no longer be written.
    """
    try:
        write(report, path)
    except OSError as error:
        raise unwritable(path, error) from None
    console.print(f"Report: {_printable(str(path))}", markup=False, highlight=False, soft_wrap=True)


def command_line() -> str:
    """The command line that the user typed."""
    return _printable(shlex.join(["kvlayers", *sys.argv[1:]]))


def _printable(text: str) -> str:
    """The text with bytes that are not UTF-8 (file names may have such bytes) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def missing_packages() -> list[str]:
    """Which of `PACKAGES` are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]
