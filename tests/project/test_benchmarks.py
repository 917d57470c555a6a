"""The benchmark runs, and refuses figures of a cache that decodes other tokens."""

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
TINY = ["--quick", "--lengths", "32,64", "--trials", "1", "--steps", "4", "--stations", "40,80", "--skip", "static"]
ONLY_STATIC = ["--quick", "--skip", "decode,update,peak,sliding", "--trials", "1", "--steps", "16"]

pytestmark = [pytest.mark.slow, versions.benchmarks_of_transformers]


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
    return {**benchmark.CONTENDERS, benchmark.KVLAYERS: lambda config, length: broken(config=config)}


def test_a_quick_benchmark_succeeds_and_writes_what_was_measured_where(benchmark: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "results" / "quick.json"
    assert benchmark.main([*TINY, "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert {"date", "hardware", "versions", "arguments", "results", "targets", "disagreements", "wrong"} == set(written)
    assert {"cpu", "cores", "threads", "ram_bytes"} <= set(written["hardware"])
    assert {"python", "torch", "transformers", "kvlayers"} <= set(written["versions"])
    results = written["results"]
    assert {"decode", "update", "peak", "sliding"} == set(results)
    assert set(results["sliding"]["kvlayers.StaticCache"]["medians"]) == {"40", "80"}
    for name in benchmark.CONTENDERS:
        steps = results["decode"]["random"]["32"][name]
        assert len(steps["seconds"]) == 1
        assert len(steps["seconds"][0]) == 4
        assert {"median", "mean", "speed", "held"} <= set(steps)
        assert len(results["update"]["64"][name]["seconds"]) == 1
        assert results["peak"]["caches"][name]["reported"] == 1


def test_a_cache_with_other_tokens_fails_the_benchmark(benchmark: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "quick.json"
    arguments = [*TINY, "--skip", "update,peak,sliding,static", "--steps", "16", "--output", str(output)]
    assert benchmark.main(arguments, contenders=with_ours(benchmark, OtherValues)) == 1
    found = json.loads(output.read_text())["disagreements"]
    assert found
    assert {entry["cache"] for entry in found if not entry["tie"]} == {benchmark.KVLAYERS}
    assert all(entry["logit_gap"] >= 0 for entry in found)


def test_a_sliding_cache_with_other_tokens_fails_the_benchmark(benchmark: Any, tmp_path: pathlib.Path) -> None:
    arguments = [
        *TINY,
        "--skip",
        "update,peak,decode,static",
        "--steps",
        "16",
        "--output",
        str(tmp_path / "quick.json"),
    ]
    assert benchmark.main(arguments, contenders=with_ours(benchmark, OtherValues)) == 1


def test_an_update_that_returns_other_states_fails_the_benchmark(benchmark: Any, tmp_path: pathlib.Path) -> None:
    arguments = [*TINY, "--skip", "decode,peak,sliding,static", "--output", str(tmp_path / "quick.json")]
    assert benchmark.main(arguments, contenders=with_ours(benchmark, OtherKeys)) == 1


def test_live_bytes_count_the_old_and_the_new_buffer_of_a_concatenation(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lib import peak

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
    candidate = fidelity.Contender("kvlayers", "native", 4)
    makers = {candidate: lambda config: kvlayers.DynamicCache(config=config)}
    assert fidelity.main(["--quick", "--output", str(output)], makers) == 0
    written = json.loads(output.read_text())
    assert {"date", "hardware", "versions", "arguments", "results", "targets", "disagreements", "wrong"} == set(written)
    measured = written["results"][0]
    for kind in ("plain", "outliers"):
        exact, stand_in = (measured[kind][name] for name in (fidelity.EXACT.name, candidate.name))
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
    from lib.quantized import Contender, measure_bytes
    from lib.workload import RandomModel, Shape

    config = RandomModel(Shape(layers=2, heads=2, kv_heads=2, head_dim=64, intermediate=64, vocab=64)).model.config
    make = Contender("transformers", backend, 4).make
    tokens = 32 + 128 + 64
    # The first chunk is quantized at once, the next four when their residual is full, the last two not yet.
    quantized, residual = 32 + 128, 64
    of_a_vector = 64 // 2 + 2 + 2
    expected = 2 * 2 * 2 * (quantized * of_a_vector + residual * 64 * 2) / tokens
    assert measure_bytes(make, config, tokens - 64, 64, 32)["last_bytes"] == expected


def test_outliers_are_in_two_key_channels_and_only_while_asked_for(fidelity: Any) -> None:
    from lib import outliers, quantized, workload

    model = workload.RandomModel(quantized.QUICK_SHAPE).model.float()
    ids = torch.arange(8)[None]

    def keys() -> Tensor:
        cache = kvlayers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        return cache.layers[1].keys[0].abs().amin(1)

    before = keys()
    with outliers.KeyOutliers("constant", 30.0).applied(model):
        large = keys() > 20
    assert large.nonzero().tolist() == [[0, 31], [0, 63], [1, 31], [1, 63]]
    assert torch.equal(keys(), before)


def test_divergences_are_compared_with_the_better_of_transformers(fidelity: Any) -> None:
    seen = {"quanto": 0.3, "hqq": 0.1}
    plain = {fidelity.Contender("transformers", name, 4).name: {"kl": kl} for name, kl in seen.items()}
    plain[fidelity.Contender("transformers", "quanto", 2).name] = {"failure": "no more"}
    plain[fidelity.Contender("transformers", "hqq", 2).name] = {"kl": float("nan")}
    assert fidelity.better_baseline({"plain": plain}, "plain", 4) == {"kl": 0.1}
    assert fidelity.better_baseline({"plain": plain}, "plain", 2) is None


class OtherStaticValues(kvlayers.StaticCache):
    """Returns values of the opposite sign."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys, -values


@pytest.mark.nightly
def test_static_caches_are_compared_eager_compiled_and_in_generate(benchmark: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "quick.json"
    assert benchmark.main([*ONLY_STATIC, "--times", "1,8", "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    static = written["results"]["static"]
    assert not [entry for entry in written["disagreements"] if not entry["tie"]]
    eager, compiled, generate = static["eager"]["64"], static["compiled"]["64"], static["generate"]
    names = [f"{library}.StaticCache, {times}x" for library in ("kvlayers", "transformers") for times in (1, 8)]
    assert [eager[name]["reserved"] for name in names] == [128, 512, 128, 512]
    for name in names:
        entry = compiled[f"{name}, compiled"]
        assert (len(entry["seconds"][0]), entry["graphs"], entry["recompiles"]) == (16, 1, 0)
    candidate, baseline = (
        generate["calls"][f"{library}.StaticCache, compiled"] for library in ("kvlayers", "transformers")
    )
    assert 1 <= candidate["graphs"] <= 3
    assert baseline["graphs"] == 1
    assert candidate["recompiles"] == baseline["recompiles"] == 0
    assert candidate["first"] > candidate["median"] > 0
    assert all(entry["graphs"] == 0 for name, entry in generate["calls"].items() if name.endswith("DynamicCache"))


@pytest.mark.nightly
def test_a_static_cache_with_other_tokens_fails_the_benchmark(benchmark: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "quick.json"
    candidate = {"kvlayers.StaticCache": lambda config, length: OtherStaticValues(config, length)}
    arguments = [*ONLY_STATIC, "--times", "1", "--generate", "20,2,22", "--output", str(output)]
    assert benchmark.main(arguments, contenders={**benchmark.CONTENDERS, **candidate}) == 1
    failures = {entry["cache"] for entry in json.loads(output.read_text())["disagreements"] if not entry["tie"]}
    assert failures == {"kvlayers.StaticCache, 1x", "kvlayers.StaticCache, 1x, compiled"}


def test_calls_of_generate_with_other_tokens_are_disagreements(benchmark: Any) -> None:
    from lib import compiled, timing, workload

    model = workload.RandomModel(workload.QUICK_SHAPE)
    job = compiled.Job(model.name, model.model, model.prompt(20), 16, 64, "eager")
    disagreements = timing.Disagreements()
    contenders = {
        compiled.REFERENCE: compiled.GENERATORS[compiled.REFERENCE],
        compiled.KVLAYERS: lambda job: {"past_key_values": OtherValues(config=job.model.config)},
    }
    measured = compiled.measure_generate(job, contenders, 1, disagreements, lambda: None)
    assert {entry["cache"] for entry in disagreements.found if not entry["tie"]} == {compiled.KVLAYERS}
    assert all(20 <= entry["tokens"] < 36 for entry in disagreements.found)
    assert all(len(entry["seconds"]) == 1 for entry in measured.values())


def test_compiled_contenders_have_nothing_to_do_with_one_another(benchmark: Any) -> None:
    from lib import compiled

    class Doubling:
        def forward(self, numbers: Tensor) -> Tensor:
            return 2 * numbers

    inputs: list[Any] = []

    def backend(graph: Any, example_inputs: list[Any]) -> Any:
        inputs.append(example_inputs)
        return graph.forward

    first, second = (compiled.Compiled(Doubling(), {"backend": backend}) for _ in range(2))
    for _ in range(2):
        assert first(numbers=torch.ones(2)).tolist() == [2, 2]
        assert second(numbers=torch.ones(3)).tolist() == [2, 2, 2]
    assert (first.graphs, second.graphs) == (1, 1)
    # Where sizes are dynamic, they are inputs as well.
    assert [len(each) for each in inputs] == [1, 1]
    first(numbers=torch.ones(4))
    assert (first.graphs, second.graphs) == (2, 1)
    assert [len(each) for each in inputs] == [1, 1, 2]


def test_the_benchmark_of_offloading_counts_bytes_where_there_is_no_accelerator(
    benchmark: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import offload

    output = tmp_path / "offload.json"
    assert offload.main(["--quick", "--output", str(output)]) == 0
    traffic = json.loads(output.read_text())["results"]["traffic"]
    # Four layers, two KV heads of 32, keys and values, two bytes each.
    new_token = 4 * 2 * 32 * 2 * 2
    for name in (offload.KVLAYERS, offload.STATIC):
        assert traffic[name]["to_host"] == new_token
        assert traffic[name]["to_device"] % new_token == 0
        assert traffic[name]["peak_on_device"] < traffic[name]["held"]
    assert traffic[offload.KVLAYERS_PACKED]["to_device"] < traffic[offload.KVLAYERS]["to_device"]
    if not torch.accelerator.is_available():
        with pytest.raises(SystemExit):
            offload.main(["--quick", "--device", "cuda"])
        assert "there is no accelerator" in capsys.readouterr().err


def test_the_benchmark_of_sinks_compares_with_recomputing_what_is_held(benchmark: Any, tmp_path: pathlib.Path) -> None:
    import sinks

    output = tmp_path / "sinks.json"
    assert sinks.main(["--quick", "--output", str(output)]) == 0
    [figures] = json.loads(output.read_text())["results"]["windows"].values()
    assert len(figures[sinks.SINKS]["steps"]) == 4
    assert figures[sinks.RECOMPUTED]["perplexity"] > 1
    with pytest.raises(SystemExit):
        sinks.main(["--quick", "--window", "4"])


def test_the_benchmark_of_latents_compares_logits(
    benchmark: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mla

    monkeypatch.setattr(mla, "LAYERS", 1)
    output = tmp_path / "mla.json"
    assert mla.main(["--lengths", "200", "--steps", "2", "--threads", "1", "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert set(written["results"]) == {"float32", "bfloat16"}
    assert set(written["results"]["bfloat16"]["200"]) == set(mla.CACHES)
    monkeypatch.setitem(mla.CACHES, mla.KVLAYERS, mla.packed(4))
    assert mla.main(["--lengths", "400", "--steps", "1", "--output", str(output)]) == 1


ONLY_BRANCHES = ["--quick", "--only", "decode,insert", "--lengths", "32", "--steps", "8", "--trials", "1"]


def test_the_benchmark_of_prefixes_times_steps_behind_a_hit_and_counts_what_a_branch_writes(
    benchmark: Any, tmp_path: pathlib.Path
) -> None:
    import prefix

    output = tmp_path / "prefix.json"
    assert prefix.main([*ONLY_BRANCHES, "--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    steps = results["decode"]
    assert set(steps) == {"32, float32", "32, bfloat16", "32, int4"}
    assert all(len(entry["kvlayers, behind a hit"][0]) == 8 for entry in steps.values())
    # Two layers, two KV heads of 16, keys and values, two bytes each.
    assert results["insert"]["branch_bytes"] == 100 * 2 * 2 * 16 * 2 * 2
    assert all(moved >= results["insert"]["branch_bytes"] for moved in results["insert"]["moved_in_all"])


def test_other_tokens_behind_a_hit_fail_the_benchmark_of_prefixes(
    benchmark: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import prefix
    from lib import stored

    found = stored.hit_in

    def lacking_tokens(store: kvlayers.PrefixStore, ids: Tensor, covered: int) -> Any:
        cache = found(store, ids, covered)
        cache.crop(covered // 4)
        return cache

    monkeypatch.setattr(stored, "hit_in", lacking_tokens)
    arguments = [*ONLY_BRANCHES, "--only", "decode", "--kinds", "float32", "--output", str(tmp_path / "prefix.json")]
    assert prefix.main(arguments) == 1


def test_bytes_that_operations_write_are_counted_and_views_are_not(benchmark: Any) -> None:
    from lib.peak import MovedBytes

    states = torch.zeros(4, 8)
    with MovedBytes() as moved:
        states[:2].transpose(0, 1)
        torch.empty(100)
        assert moved.nbytes == 0
        states[:2].copy_(torch.ones(2, 8))
        # The ones, and the rows that they are written to.
        assert moved.nbytes == 2 * 64
        torch.cat([states, states])
        assert moved.nbytes == 2 * 64 + 256


def test_tokens_with_a_common_prefix_are_counted_once(benchmark: Any) -> None:
    from lib.stored import distinct_tokens

    assert distinct_tokens([[1, 2, 3], [1, 2, 4, 5], [2]]) == 6


def test_the_benchmark_of_attention_compares_it_with_reading_the_states(
    benchmark: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import attention

    output = tmp_path / "attention.json"
    arguments = ["--quick", "--threads", "1", "--output", str(output)]
    assert attention.main(arguments) == 0
    measured = json.loads(output.read_text())["results"]["attention"]["400"]
    assert set(measured) == {*attention.CACHES, attention.READ}
    assert 0 < measured[attention.bits(2)]["bytes"] < measured[attention.bits(8)]["bytes"]
    assert all(measured[name]["share"] > 0 for name in attention.CACHES)
    other = {**attention.CACHES, attention.KVLAYERS: attention.CACHES[attention.bits(2)]}
    monkeypatch.setattr(attention, "CACHES", other)
    assert attention.main(arguments) == 1


def test_the_benchmark_of_the_ordinary_case_compares_tokens(
    benchmark: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ordinary

    output = tmp_path / "ordinary.json"
    assert ordinary.main(["--quick", "--threads", "1", "--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    assert set(results["steps"]) == set(results["batches"]) == set(results["prefill"]) == {"1x64", "2x96"}
    assert set(results["batches"]["2x96"]) == set(ordinary.IN_BATCHES)
    assert [measured["same_tokens"] for measured in results["generate"].values()] == [True]
    monkeypatch.setitem(ordinary.EXACT, ordinary.KVLAYERS, lambda config, length: OtherValues(config=config))
    assert ordinary.main(["--quick", "--only", "prefill", "--threads", "1", "--output", str(output)]) == 1
    with pytest.raises(SystemExit):
        ordinary.main(["--only", "nothing"])
