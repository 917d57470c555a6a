"""The Triton kernels compile for GPUs that are not there, and fit them (`helpers/compiled_kernels.py`)."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import versions

HELPERS = Path(__file__).parents[1] / "helpers"

pytestmark = [pytest.mark.slow, pytest.mark.nightly, versions.compiles_kernels]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a few kernels need, compiled in a process of its own: triton then knows no other driver."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("kernels"))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HELPERS / "compiled_kernels.py")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def test_kernels_compile_for_every_architecture(compiled: list[dict[str, Any]]) -> None:
    found = {(row["capability"], row["kernel"]) for row in compiled}
    assert {(capability, "attend_split") for capability in (80, 86, 89, 90, 120)} <= found
    assert {
        (80, "pack_block"),
        (90, "pack_block"),
        (90, "read_block"),
        (90, "merge_splits"),
        (120, "read_block"),
    } <= found
    kinds = Counter((row["capability"], row["case"].rpartition(", ")[2]) for row in compiled)
    assert kinds[80, "4 readers"]
    assert kinds[90, "8 readers"]
    # One for packed blocks, and one for states in full precision.
    assert (kinds[86, "pieces"], kinds[90, "pieces"]) == (2, 2)


def test_kernels_fit_the_shared_memory(compiled: list[dict[str, Any]]) -> None:
    assert [row for row in compiled if not row["fits"]] == []


def test_nothing_is_spilled_for_one_query(compiled: list[dict[str, Any]]) -> None:
    # A spilled register is read from memory in the inner loop.
    assert {(row["kernel"], row["case"], row["capability"]): row["spilled"] for row in compiled if row["spilled"]} == {}
