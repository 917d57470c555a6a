"""What tests of the benchmarks, and of the site, share."""

import importlib
import json
import pathlib
import runpy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a file of the folder of benchmarks by its name. The threads of torch stay as they were."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


@pytest.fixture
def found_by(tmp_path: pathlib.Path) -> Callable[..., Any]:
    """Runs a benchmark with some arguments, which must end with a code, and returns what it has written."""
    output = tmp_path / "found.json"

    def run(benchmark: Any, *arguments: str, code: int = 0) -> Any:
        assert benchmark.main([*arguments, "--output", str(output)]) == code
        return json.loads(output.read_text())

    return run


@pytest.fixture(scope="session")
def hooks() -> SimpleNamespace:
    """What makes pages of notebooks and drawings, a script that mkdocs finds by its path."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "site_hooks.py")))
