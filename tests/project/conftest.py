"""What tests of the benchmarks share."""

import importlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

BENCHMARKS = pathlib.Path(__file__).parents[2] / "lab" / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a file of the folder of benchmarks by its name. The threads of torch stay as they were."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
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
