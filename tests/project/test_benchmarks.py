"""What benchmarks share measures what it says, and what the smaller ones of them find is what they are called."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import kvlayers
import versions
from kvlayers.quantizers import quantizer_names, unregister_quantizer

of_transformers = versions.benchmarks_of_transformers


@pytest.mark.slow
@of_transformers
def test_bytes_of_transformers_quantized_layers_are_those_of_codes_scales_zeros_and_residual(script: Any) -> None:
    pytest.importorskip("optimum.quanto")
    from lib.contenders import measure_bytes, quanto
    from lib.workload import RandomModel, Shape

    config = RandomModel(Shape(layers=2, heads=2, kv_heads=2, head_dim=64, intermediate=64, vocab=64)).model.config
    tokens = 32 + 128 + 64
    # The first chunk is quantized at once, the next four when their residual is full, the last two not yet.
    quantized, residual = 32 + 128, 64
    of_a_vector = 64 // 2 + 2 + 2
    expected = 2 * 2 * 2 * (quantized * of_a_vector + residual * 64 * 2) / tokens
    assert measure_bytes(quanto(4), config, tokens - 64, 64, 32)["last_bytes"] == expected


@pytest.mark.slow
@of_transformers
def test_compiled_contenders_have_nothing_to_do_with_one_another(script: Any) -> None:
    from lib import compiled

    def doubling(numbers: Tensor) -> Tensor:
        return 2 * numbers

    inputs: list[Any] = []

    def backend(graph: Any, example_inputs: list[Any]) -> Any:
        inputs.append(example_inputs)
        return graph.forward

    first, second = (torch.compile(compiled.own_code(doubling), backend=backend) for _ in range(2))
    for _ in range(2):
        assert first(numbers=torch.ones(2)).tolist() == [2, 2]
        assert second(numbers=torch.ones(3)).tolist() == [2, 2, 2]
    # Where sizes are dynamic, they are inputs as well.
    assert [len(each) for each in inputs] == [1, 1]
    first(numbers=torch.ones(4))
    assert [len(each) for each in inputs] == [1, 1, 2]


# Outliers


@pytest.fixture
def outliers(script: Any) -> Iterator[Any]:
    known = quantizer_names()
    yield script("outliers")
    # A run registers quantizers that do not smooth keys.
    for name in set(quantizer_names()) - set(known):
        unregister_quantizer(name)


def model_of(family: str) -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tf.AutoConfig.for_model(family, **sizes, head_dim=16, intermediate_size=32, vocab_size=50)
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config).eval()


def states_of(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, and the keys and values of the first layer."""
    cache = tf.DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, use_cache=True).logits
    return logits, cache.layers[0].keys, cache.layers[0].values


@of_transformers
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("heads", ["all", "one"])
@pytest.mark.parametrize("speed", ["slow", "fast"])
@pytest.mark.parametrize("kind", ["constant", "varying"])
def test_outliers_are_in_the_keys_that_they_name_and_a_factor_changes_no_prediction(
    outliers: Any, family: str, heads: str, speed: str, kind: str
) -> None:
    model, ids = model_of(family), torch.randint(50, (1, 20))
    expected, was, _ = states_of(model, ids)
    with outliers.KeyOutliers(kind, 30.0, speed, 2, heads).applied(model):
        seen, keys, _ = states_of(model, ids)
    pairs = torch.zeros(2, 1, 8, dtype=torch.bool)
    pairs[slice(None) if heads == "all" else slice(1), :, slice(2) if speed == "fast" else slice(6, 8)] = True
    changed = pairs.repeat(1, 1, 2)
    torch.testing.assert_close(keys[~changed.expand_as(keys)], was[~changed.expand_as(keys)], rtol=1e-3, atol=1e-4)
    if kind == "varying":
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(keys, was * torch.where(changed, 30.0, 1.0), rtol=1e-3, atol=1e-4)
    else:
        # Both channels of a pair are rotated together.
        lengths = keys.unflatten(-1, (2, 8)).norm(dim=-2)
        assert torch.equal(lengths > 20, pairs.expand_as(lengths))
    assert torch.equal(states_of(model, ids)[0], expected)


@of_transformers
@pytest.mark.parametrize("kind", ["tokens", "varying"])
def test_outliers_are_in_the_values_that_they_name(outliers: Any, kind: str) -> None:
    model, ids = model_of("llama"), torch.arange(40)[None]
    expected, _, was = states_of(model, ids)
    with outliers.ValueOutliers(kind, 30.0).applied(model):
        seen, _, values = states_of(model, ids)
    changed = (ids % 16 == 0)[:, None, :, None] if kind == "tokens" else torch.arange(16) >= 14
    torch.testing.assert_close(values, was * torch.where(changed, 30.0, 1.0), rtol=1e-4, atol=1e-4)
    if kind == "varying":
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@of_transformers
def test_a_quick_run_of_outliers_has_a_row_for_each_kind(outliers: Any, found_by: Any) -> None:
    smoothed = ("native", "turboquant", "nf4")
    caches = ",".join(f"{name},{name} plain" for name in smoothed)
    written = found_by(outliers, "--quick", "--context", "256", "--scored", "64", "--caches", caches)
    found = written["results"]["outliers"]
    assert len(found["rows"]) == 6
    assert found["bytes"]["native"]["bytes"] > 0
    for cells in found["rows"].values():
        for name in smoothed:
            # The limit of issue 56: keys that are smoothed never cost more than that.
            assert 0 < cells[name]["kl"] <= 1.1 * cells[f"{name} plain"]["kl"]


# Tasks


@pytest.fixture
def tasks(script: Any) -> Any:
    return script("tasks")


def test_caches_that_fail_and_tasks_that_are_too_hard_leave_cells_empty(tasks: Any) -> None:
    caches = {"kvlayers dynamic": (0.1, -2.0), "transformers hqq": (None, None)}
    counts = {"kvlayers dynamic": {"samples": 1, "failed": 0}, "transformers hqq": {"samples": 0, "failed": 1}}
    found: dict[str, Any] = {
        "model": "dir/tiny",
        "dtype": "float32",
        "date": "2026-11-23",
        "hardware": {"cpu": "a CPU"},
        "versions": {"torch": "2", "transformers": "5"},
        "tasks": ["needle"],
        "lengths": [256],
        "depths": [0.5],
        "samples": 1,
        "seed": 0,
        "results": {
            "tasks": {
                "reference": "kvlayers dynamic",
                "too_weak_below": 0.25,
                "too_weak": [["needle", 256]],
                "overall": [
                    {"cache": cache, "logprob": logprob, **counts[cache]} for cache, (_, logprob) in caches.items()
                ],
                "comparable": [],
                "by_length": [
                    {"cache": cache, "task": "needle", "length": 256, "score": score}
                    for cache, (score, _) in caches.items()
                ],
            }
        },
    }
    rows = [line for line in tasks.table(found).splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        "| exact (`dynamic`) | (10) |  | -2.00 |",
        "| transformers hqq, 4 bits, failed at 1 of 1 samples | (-) |  | - |",
    ]


def test_each_rule_is_measured_at_each_part_with_budgets_of_heads_and_without(tasks: Any) -> None:
    names = tasks.eviction_names()
    assert len(set(names)) == len(names)
    assert {"snapkv:keep=0.25", "snapkv:keep=0.25,per_head=false", "random:keep=0.75"} <= set(names)
    assert "tova:keep=0.5,per_head=false" not in names
    [run] = tasks.CACHES_OF["eviction"].runs([1024])
    assert run.arguments == tasks.as_arguments(names)
    assert [tasks.label(f"kvlayers {name}", "") for name in names if name.startswith("snapkv:keep=0.5")] == [
        "`snapkv`, 0.5 kept",
        "`snapkv`, 0.5 kept, even heads",
        "`snapkv`, 0.5 kept, 4 bits",
    ]


def test_recall_of_a_part_of_the_pages_is_one_cache_at_all_lengths(tasks: Any) -> None:
    short, long = tasks.recall_runs([1024, 4096])
    assert short.called["recall:recall.pages=4"] == long.called["recall:recall.pages=16"] == "recall:part=1/4"
    assert tasks.label("kvlayers recall:part=1/4", "") == "`recall`, 1/4 of the pages"

    def printed(run: Any, pages: int, length: int, logprob: float) -> dict[str, Any]:
        outcome = {"task": "needle", "length": length, "depth": 0.5, "index": 0, "answer": "", "failure": None}
        caches = {"kvlayers dynamic": -1.0, f"kvlayers recall:recall.pages={pages}": logprob}
        return {
            **dict.fromkeys(tasks.KEPT),
            "caches": [{"name": name, "nbytes": length} for name in caches],
            "outcomes": [
                {**outcome, "cache": name, "score": 1.0, "logprob": logprob} for name, logprob in caches.items()
            ],
            "summary": {"reference": "kvlayers dynamic"},
        }

    runs = [(short, printed(short, 4, 1024, -2.0)), (long, printed(long, 16, 4096, -4.0))]
    found = tasks.merged(runs, [1024, 4096])
    assert found["lengths"] == [1024, 4096]
    assert found["caches"][1] == {"name": "kvlayers recall:part=1/4", "nbytes": 4096}
    _, recall = found["results"]["tasks"]["overall"]
    assert (recall["cache"], recall["samples"], recall["logprob"]) == ("kvlayers recall:part=1/4", 2, -3.0)


# Budgets of memory


@pytest.fixture
def memory(script: Any) -> Any:
    return script("memory")


def filled(cache: Any) -> Any:
    for index in range(3):
        cache.update(torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64), index)
    return cache


@of_transformers
def test_what_a_budget_has_become_is_made_again(memory: Any) -> None:
    config = tf.LlamaConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=2)
    cache = filled(kvlayers.DynamicCache(config=config, max_bytes="40%", length_hint=1000))
    same = filled(memory.as_it_ends(cache)(config))
    assert [layer.bits for layer in same.layers] == [layer.bits for layer in cache.layers]
    assert [layer.exact_from for layer in same.layers] == [layer.exact_from for layer in cache.layers]
    assert 0 < memory.exact_share(cache) < 1


@pytest.mark.slow
@pytest.mark.nightly
@of_transformers
def test_a_quick_run_of_budgets_has_each_section(memory: Any, found_by: Any) -> None:
    found = found_by(memory, "--quick")
    assert found["wrong"] == []
    results = found["results"]
    assert {"int8", "int4", "within 70%", "within 70%, from the start"} <= set(results["loss"])
    assert set(results["time"]) == {"exact", "int8", "int4"}
    for name in ("within 70%", "within 50%"):
        assert results["loss"][name]["bytes"] <= results["loss"][name]["budget"]
