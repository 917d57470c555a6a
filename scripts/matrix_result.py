"""A pytest plugin that writes the counts of a run, its versions and its machine to the file that `--result` names.

`nox -s matrix` loads it, since pytest's own output is for people. A run that does not finish leaves no file.
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
    parser.addoption("--result", type=Path, help="write the counts of the run to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin in the main process only, since the workers of xdist see parts of the run."""
    result = config.getoption("result")
    if result is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Result(result))


class Result:
    """Counts of a run.

    Args:
        file: where they are written once the run has finished.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.started = time.monotonic()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        """Write the counts, unless the run was interrupted or had no tests."""
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
    """The commit that was tested, marked if there are changes; empty outside of a checkout."""
    described = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=, changed"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip()


def machine() -> str:
    """The processor, by name if the system knows it, and its number of cores."""
    processor = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.exists():
        names = [line.partition(":")[2].strip() for line in described.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return f"{processor}, {os.cpu_count()} cores"
