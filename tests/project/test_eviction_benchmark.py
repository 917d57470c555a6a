"""The benchmark of eviction and recall runs, and refuses figures of a cache that attends to other states."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
import versions

BENCHMARKS = pathlib.Path(__file__).parents[2] / "lab" / "benchmarks"

pytestmark = [pytest.mark.slow, versions.benchmarks_of_transformers]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import eviction

    threads = torch.get_num_threads()
    yield eviction
    torch.set_num_threads(threads)


def test_a_quick_benchmark_succeeds_and_writes_what_was_measured_where(benchmark: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "results" / "quick.json"
    assert benchmark.main(["--quick", "--steps", "8", "--threads", "1", "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert {"date", "hardware", "versions", "arguments", "results", "targets", "disagreements", "wrong"} == set(written)
    results = written["results"]
    assert set(results) == set(benchmark.PARTS)
    [decode] = results["decode"].values()
    assert set(decode) == set(benchmark.decode_makers(64))
    assert [len(trial) for trial in decode[benchmark.EVEN]["seconds"]] == [8]
    assert len(results["recall"]) == 3
    assert {"knorm", "snapkv"} <= set(results["prefill"])


def test_a_part_runs_alone(benchmark: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "quick.json"
    assert benchmark.main(["--quick", "--only", "prefill", "--rules", "knorm", "--output", str(output)]) == 0
    assert set(json.loads(output.read_text())["results"]["prefill"]) == {benchmark.KVLAYERS, "knorm"}


class OtherValues(kvlayers.DynamicCache):
    """Returns values of the opposite sign, as no cache should."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys, -values


def test_a_prompt_with_other_logits_fails_the_benchmark(
    benchmark: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "evicting", lambda **options: lambda config, length: OtherValues(config=config))
    output = tmp_path / "quick.json"
    assert benchmark.main(["--quick", "--only", "prefill", "--rules", "knorm", "--output", str(output)]) == 1
    [wrong] = json.loads(output.read_text())["wrong"]
    assert wrong.startswith("knorm: logits of the prompt are ")


def test_parts_that_do_not_exist_are_refused(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--only", "decode,speed"])
    assert "got speed" in capsys.readouterr().err
