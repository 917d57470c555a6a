"""The benchmark of the harness runs, and refuses figures of a model that scores differently."""

import json
from pathlib import Path
from typing import Any

import pytest

from model_directories import random_text, save_model

pytest.importorskip("lm_eval", reason="lm-eval is not installed: it comes with the extra 'eval'")

BENCHMARKS = Path(__file__).parents[2] / "lab" / "benchmarks"
SIZES = ["--documents", "3", "--shots", "2", "--words", "10", "--trials", "1"]

pytestmark = pytest.mark.slow


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
    import harness

    return harness


def test_the_benchmark_of_the_harness_compares_scores_and_texts(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "harness.json"
    (tmp_path / "text").write_text(random_text(400))
    model = save_model(tmp_path / "model", "llama")
    arguments = ["--model", str(model), "--text", str(tmp_path / "text"), "--output", str(output), *SIZES]
    assert benchmark.main(arguments) == 0
    results = json.loads(output.read_text())["results"]
    assert list(results) == list(benchmark.TASKS)
    assert all(len(seconds) == 1 for entry in results.values() for seconds in entry["seconds"].values())
    monkeypatch.setattr(benchmark, "difference", lambda one, other: 1e-3)
    assert benchmark.main([*arguments, "--tasks", "choices"]) == 1
    with pytest.raises(SystemExit):
        benchmark.main([*arguments, "--tasks", "choice"])
