"""A plugin for pytest that writes what a run came to, and what it ran on, to the file that `--result` names.

`nox -s matrix` loads it: what pytest prints is for people, and a run that did not finish leaves no file.
"""

import datetime
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import pytest
import torch
import transformers


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--result`."""
    parser.addoption("--result", type=Path, help="write what the run came to, as JSON, to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count in the process that has the whole run before it, which the workers of xdist have not."""
    result = config.getoption("result")
    if result is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Result(result))


class Result:
    """What a run came to.

    Args:
        file: Where it is written, once the run has finished.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.started = time.monotonic()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        """Write it, unless the run was broken off, or had no tests."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        count = {outcome: len(reports) for outcome, reports in terminalreporter.stats.items()}
        found = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "passed": count.get("passed", 0),
            "skipped": count.get("skipped", 0),
            "failed": count.get("failed", 0) + count.get("error", 0),
            "minutes": (time.monotonic() - self.started) / 60,
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "commit": commit(),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(found, indent=2) + "\n")


def commit() -> str:
    """The commit that the tests are of, with what git says of changes to it; empty where this is no checkout."""
    described = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=, changed"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip()


def machine() -> str:
    """The processor by name, where the system tells it, and how many cores of it there are."""
    processor = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.exists():
        names = [line.partition(":")[2].strip() for line in described.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return f"{processor}, {os.cpu_count()} cores"
