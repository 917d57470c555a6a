"""The HTML report of a command: its path, and the packages that make it."""

import importlib.util
import shlex
import sys
from pathlib import Path

from rich.console import Console

from kvlayers.errors import OptionError
from kvlayers.tools.cli.files import check_writable, home_expanded, unwritable
from kvlayers.tools.reporting.page import Report, write

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
