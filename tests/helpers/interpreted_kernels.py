"""Runs Python in a process in which triton interprets kernels.

Triton decides when a kernel is defined whether it is interpreted: only a process of its own can have it so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(*arguments: str) -> str:
    """Run Python with these arguments, and return what it printed."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def results_of(module: str) -> dict[str, Any]:
    """What the cases of a module of this directory gave."""
    found: dict[str, Any] = json.loads(run(str(Path(__file__).with_name(f"{module}.py"))))
    return found
