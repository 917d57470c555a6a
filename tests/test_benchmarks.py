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
TINY = ["--quick", "--lengths", "32,64", "--trials", "1", "--steps", "4", "--stations", "40,80"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decode

    threads = torch.get_num_threads()
    yield decode
    torch.set_num_threads(threads)


@pytest.fixture
def fidelity(benchmark: Any) -> Any:
    import fidelity

    return fidelity


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
    assert {"decode", "update", "growth", "peak", "sliding", "quantized"} == set(results)
    assert set(results["quantized"]["64"]) == set(benchmark.QUANTIZED)
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


def test_fidelity_scores_a_cache_of_full_precision_at_zero(fidelity: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "results" / "quick.json"
    ours = fidelity.Contender("kvlayers", "native", 4)
    makers = {ours: lambda config: kvlayers.DynamicCache(config=config)}
    assert fidelity.main(["--quick", "--output", str(output)], makers) == 0
    written = json.loads(output.read_text())
    assert {"date", "hardware", "versions", "arguments", "results", "targets"} == set(written)
    measured = written["results"][0]
    for kind in ("plain", "outliers"):
        exact, stand_in = (measured[kind][name] for name in (fidelity.EXACT.name, ours.name))
        assert exact["tokens"] == 2 * 64
        assert exact["kl"] == stand_in["kl"] == exact["kl_99"] == 0
        assert exact["agreement"] == 1
        assert 0 < measured[kind]["transformers DynamicCache in bfloat16"]["kl"] < 1e-4
    # Two layers, two KV heads of 64, keys and values, two bytes each.
    assert measured["bytes"]["transformers DynamicCache"]["bytes"] == 2 * 2 * 64 * 2 * 2


def test_fidelity_fails_where_full_precision_differs(fidelity: Any, tmp_path: pathlib.Path) -> None:
    arguments = ["--quick", "--output", str(tmp_path / "quick.json"), "--outlier", "0"]
    assert fidelity.main(arguments, {fidelity.EXACT: lambda config: OtherValues(config=config)}) == 1


def test_fidelity_goes_on_without_a_cache_that_fails(
    fidelity: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(kvlayers.DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if self.get_seq_length() >= 96:
                raise RuntimeError("no more")
            return super().update(*args, **kwargs)

    def run(library: str) -> int:
        makers = {fidelity.Contender(library, "native", 4): lambda config: Failing(config=config)}
        return fidelity.main(["--quick", "--outlier", "0", "--output", str(tmp_path / "quick.json")], makers)

    assert run("transformers") == 0
    assert "transformers native, 4 bits failed: RuntimeError: no more" in capsys.readouterr().out
    measured = json.loads((tmp_path / "quick.json").read_text())["results"][0]
    assert measured["plain"]["transformers native, 4 bits"]["failure"] == "RuntimeError: no more"
    assert measured["plain"][fidelity.EXACT.name]["kl"] == 0
    assert run("kvlayers") == 1


@pytest.mark.parametrize(("backend", "package"), [("quanto", "optimum.quanto"), ("hqq", "hqq")])
def test_bytes_of_transformers_quantized_layers_are_those_of_codes_scales_zeros_and_residual(
    benchmark: Any, backend: str, package: str
) -> None:
    pytest.importorskip(package)
    from quantized import Contender, measure_bytes
    from workload import RandomModel, Shape

    config = RandomModel(Shape(layers=2, heads=2, kv_heads=2, head_dim=64, intermediate=64, vocab=64)).model.config
    make = Contender("transformers", backend, 4).make
    tokens = 32 + 128 + 64
    # The first chunk is quantized at once, the next four when their residual is full, the last two not yet.
    quantized, residual = 32 + 128, 64
    of_a_vector = 64 // 2 + 2 + 2
    expected = 2 * 2 * 2 * (quantized * of_a_vector + residual * 64 * 2) / tokens
    assert measure_bytes(make, config, tokens - 64, 64, 32)["last_bytes"] == expected


def test_outliers_are_in_two_key_channels_and_only_while_asked_for(fidelity: Any) -> None:
    import outliers

    model = fidelity.RandomModel(fidelity.QUICK_SHAPE).model.float()
    ids = torch.arange(8)[None]

    def keys() -> Tensor:
        cache = kvlayers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        return cache.layers[1].keys[0].abs().amin(1)

    before = keys()
    with outliers.key_outliers(model, 30.0):
        large = keys() > 20
    assert large.nonzero().tolist() == [[0, 31], [0, 63], [1, 31], [1, 63]]
    assert torch.equal(keys(), before)


def test_promises_of_fidelity_are_held_against_the_better_of_transformers(fidelity: Any) -> None:
    seen = {
        fidelity.Contender("kvlayers", "native", 4): (0.02, 100.0),
        fidelity.Contender("transformers", "quanto", 4): (0.3, 100.0),
        fidelity.Contender("transformers", "hqq", 4): (0.1, 110.0),
        fidelity.Contender("kvlayers", "native", 2): (0.09, 61.0),
        fidelity.Contender("transformers", "hqq", 2): (4.0, 60.0),
        fidelity.Contender("kvlayers", "native", 8): (0.0, 200.0),
    }
    plain = {key.name: {"kl": kl, "agreement": 0.996} for key, (kl, _) in seen.items()}
    outliers = {"kvlayers native, 4 bits": {"kl": 0.05, "agreement": 0.9}}
    held = {key.name: {"bytes": count} for key, (_, count) in seen.items()}
    found = fidelity.promises({"model": "m", "plain": plain, "outliers": outliers, "bytes": held})
    assert [(round(entry["value"], 4), entry["met"]) for entry in found] == [
        (0.2, False),
        (1.0, True),
        (0.0225, True),
        (1.0167, False),
        (0.9, True),
        (2.5, False),
        (0.996, True),
    ]
