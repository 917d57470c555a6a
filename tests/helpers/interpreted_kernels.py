"""Runs Python in a process in which triton interprets kernels.

Triton decides when a kernel is defined whether it is interpreted: only a process of its own can have it so.
"""

import json
import traceback
from collections.abc import Callable
from typing import Any

import fresh_process

BEFORE = """
import kvlayers, quick_interpreter
from kvlayers.kernels.attention.cuda import triton_kernels
quick_interpreter.hurry()
"""


def run(script: str) -> str:
    """Run Python code, and return what it printed."""
    ran = fresh_process.run(script, BEFORE, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def results_of(module: str) -> dict[str, Any]:
    """What the cases of a module of this directory gave."""
    found: dict[str, Any] = json.loads(run(f"import runpy; runpy.run_module('{module}', run_name='__main__')"))
    return found


def tried(check: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a check gives, or where it failed."""
    try:
        return check(*arguments, **options)
    except Exception:
        return traceback.format_exc()
