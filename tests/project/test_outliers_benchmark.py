"""The outliers of `lab/benchmarks/outliers.py` are what they are called."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf

import versions
from kvlayers.quantizers import quantizer_names, unregister_quantizer

pytestmark = versions.benchmarks_of_transformers


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


def states_of(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and the keys and values of the first layer."""
    cache = tf.DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, use_cache=True).logits
    return logits, cache.layers[0].keys, cache.layers[0].values


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
def test_a_quick_run_has_a_row_for_each_kind(outliers: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "found.json"
    smoothed = ("native", "turboquant", "nf4")
    caches = ",".join(f"{name},{name} plain" for name in smoothed)
    sizes = ("--context", "256", "--scored", "64")
    assert outliers.main(["--quick", *sizes, "--caches", caches, "--output", str(output)]) == 0
    found = json.loads(output.read_text())["results"]["outliers"]
    assert len(found["rows"]) == 6
    assert found["bytes"]["native"]["bytes"] > 0
    for cells in found["rows"].values():
        for name in smoothed:
            # The limit of issue 56: keys that are smoothed never cost more than that.
            assert 0 < cells[name]["kl"] <= 1.1 * cells[f"{name} plain"]["kl"]
