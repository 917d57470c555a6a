"""The benchmark runs, and refuses figures of a cache that decodes other tokens."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
TINY = ["--quick", "--lengths", "32", "--trials", "1", "--steps", "4", "--stations", "40,80"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decode

    threads = torch.get_num_threads()
    yield decode
    torch.set_num_threads(threads)


class OtherValues(kvlayers.DynamicCache):
    """Returns values of the opposite sign, as no cache should."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys, -values


class OtherKeys(kvlayers.DynamicCache):
    """Returns the keys of other tokens."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys.flip(2), values


def with_ours(benchmark: Any, broken: type[kvlayers.DynamicCache]) -> dict[str, Any]:
    return {**benchmark.CONTENDERS, benchmark.OURS: lambda config, length: broken(config=config)}


def test_a_quick_benchmark_succeeds_and_writes_what_was_measured_where(benchmark: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "results" / "quick.json"
    assert benchmark.main([*TINY, "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert {"date", "hardware", "versions", "arguments", "results", "targets", "disagreements"} == set(written)
    assert {"cpu", "cores", "threads", "ram_bytes"} <= set(written["hardware"])
    assert {"python", "torch", "transformers", "kvlayers"} <= set(written["versions"])
    results = written["results"]
    assert {"decode", "update", "growth", "peak", "sliding"} == set(results)
    for name in benchmark.CONTENDERS:
        steps = results["decode"]["random"]["32"][name]
        assert len(steps["seconds"]) == 1
        assert len(steps["seconds"][0]) == 4
        assert {"median", "mean", "speed", "speed_to_floor", "held"} <= set(steps)
        assert len(results["update"]["64"][name]["seconds"]) == 1
        assert results["peak"]["caches"][name]["reported"] == 1


def test_a_cache_with_other_tokens_fails_the_benchmark(benchmark: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "quick.json"
    arguments = [*TINY, "--skip", "update,peak,sliding", "--steps", "16", "--output", str(output)]
    assert benchmark.main(arguments, contenders=with_ours(benchmark, OtherValues)) == 1
    found = json.loads(output.read_text())["disagreements"]
    assert found
    assert {entry["cache"] for entry in found if not entry["tie"]} == {benchmark.OURS}
    assert all(entry["logit_gap"] >= 0 for entry in found)


def test_a_sliding_cache_with_other_tokens_fails_the_benchmark(benchmark: Any, tmp_path: pathlib.Path) -> None:
    arguments = [*TINY, "--skip", "update,peak,decode", "--steps", "16", "--output", str(tmp_path / "quick.json")]
    assert benchmark.main(arguments, contenders=with_ours(benchmark, OtherValues)) == 1


def test_an_update_that_returns_other_states_fails_the_benchmark(benchmark: Any, tmp_path: pathlib.Path) -> None:
    arguments = [*TINY, "--skip", "decode,peak,sliding", "--output", str(tmp_path / "quick.json")]
    assert benchmark.main(arguments, contenders=with_ours(benchmark, OtherKeys)) == 1


def test_live_bytes_count_the_old_and_the_new_buffer_of_a_concatenation(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peak

    held = torch.zeros(100, dtype=torch.uint8)
    with peak.LiveBytes(ignored=[held]) as counter:
        grown = torch.cat([held, held])
        grown = torch.cat([grown, held])
        views = grown.view(3, 100)[1:]
        assert counter.now() == 300
        assert counter.peak == 500
        del grown
        assert counter.now() == 300
        del views
        assert counter.now() == 0
