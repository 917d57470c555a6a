"""Where a command writes its report, and what every report says."""

import importlib.util
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from kvlayers.errors import OptionError
from kvlayers.tools.cli.files import check_writable, home_expanded, unwritable
from kvlayers.tools.reporting.page import Report, write
from kvlayers.utils.units import readable_bytes


def destination(console: Console, given: Path | None, default: Path | None) -> Path | None:
    """Where a report goes, `None` for none, seen before anything is measured.

    Args:
        console: told where a report that nobody asked for cannot be made.
        given: what the user named.
        default: where it goes where the user named nothing, `None` for nowhere.

    Raises:
        OptionError: a report is asked for, and packages that it is made with are missing.
        FileError: the file cannot be written.
    """
    path = given or default
    if path is None:
        return None
    missing = " and ".join(missing_packages())
    if missing and given is None:
        console.print(f"No report, as {missing} cannot be found: {REMEDY}", markup=False, highlight=False)
        return None
    if missing:
        raise OptionError(f"expected {missing}, to write a report with, but saw no such package: {REMEDY}")
    file = home_expanded(path)
    check_writable(file)
    return file


def publish(console: Console, report: Report, path: Path) -> None:
    """Write a report, and say where.

    Raises:
        FileError: the file cannot be written any more.
    """
    try:
        write(report, path)
    except OSError as error:
        raise unwritable(path, error) from None
    console.print(f"Report: {_printable(str(path))}", markup=False, highlight=False, soft_wrap=True)


def command_line() -> str:
    """What the user typed."""
    return _printable(shlex.join(["kvlayers", *sys.argv[1:]]))


def _printable(text: str) -> str:
    """Text in which bytes that are no UTF-8, as names of files may have, are written out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def facts(found: Mapping[str, Any]) -> dict[str, str]:
    """What `environment()` has found, in words."""
    hardware, versions = found["hardware"], found["versions"]
    memory = "" if hardware["ram_bytes"] is None else f", {readable_bytes(hardware['ram_bytes'])}"
    machine = {"CPU": f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads{memory}"}
    gpu = {} if hardware["cuda"] is None else {"GPU": hardware["cuda"]}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "platform")
    return {**machine, **gpu, "System": versions["platform"], "Versions": packages, "Date": found["date"]}


PACKAGES = ("jinja2", "matplotlib")
REMEDY = 'pip install "kvlayers[report]"'


def missing_packages() -> list[str]:
    """Those of `PACKAGES` that are not there."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]
