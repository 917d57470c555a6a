"""`lab/benchmarks/memory.py` measures what it says, in a quick run."""

import json
import pathlib
from typing import Any

import pytest
import torch
import transformers

import kvlayers
import versions

pytestmark = versions.benchmarks_of_transformers


@pytest.fixture
def memory(script: Any) -> Any:
    return script("memory")


def filled(cache: Any) -> Any:
    for index in range(3):
        cache.update(torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64), index)
    return cache


def test_what_a_budget_has_become_is_made_again(memory: Any) -> None:
    config = transformers.LlamaConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=2)
    cache = filled(kvlayers.DynamicCache(config=config, max_bytes="40%", length_hint=1000))
    same = filled(memory.as_it_ends(cache)(config))
    assert [layer.bits for layer in same.layers] == [layer.bits for layer in cache.layers]
    assert [layer.exact_from for layer in same.layers] == [layer.exact_from for layer in cache.layers]
    assert 0 < memory.exact_share(cache) < 1


@pytest.mark.slow
@pytest.mark.nightly
def test_a_quick_run_has_each_section(memory: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "found.json"
    assert memory.main(["--quick", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["wrong"] == []
    results = found["results"]
    assert {"int8", "int4", "within 70%", "within 70%, from the start"} <= set(results["loss"])
    assert set(results["time"]) == {"exact", "int8", "int4"}
    for name in ("within 70%", "within 50%"):
        assert results["loss"][name]["bytes"] <= results["loss"][name]["budget"]
