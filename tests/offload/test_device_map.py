"""accelerate keeps some of a model's weights on disk and brings them for each forward pass: the caches are the same."""

import pathlib
from typing import Any

import pytest
import torch
import transformers

import kvlayers
from kvlayers.upstream.model_layers import layer_devices
from matrix import once
from models import fresh_model, prompt

pytest.importorskip("accelerate", reason="accelerate is not installed")

FAMILIES = ("llama", "gemma3")
RESERVED = {"max_cache_len": 64}
NAMES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("dynamic", "quantized", "int8", "offloaded", "offloaded_quantized")},
    **dict.fromkeys(("static", "hybrid", "offloaded_static"), RESERVED),
    "sink": {"window_length": 8, "num_sink_tokens": 2},
}
"""What a cache is made with, by its name. `generate()` knows how much to reserve."""


def continuation(model: Any, **options: Any) -> torch.Tensor:
    ids = prompt(2)
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **options)


# Neighbours that ask for the same family share its models.
@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model in memory, and the same one with every other layer on disk."""
    directory, whole = tmp_path_factory.mktemp(request.param), fresh_model(request.param)
    whole.save_pretrained(directory)
    places: dict[str, str] = {
        f"model.layers.{index}": ("cpu", "disk")[index % 2] for index in range(whole.config.num_hidden_layers)
    }
    places |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    split = transformers.AutoModelForCausalLM.from_pretrained(
        directory, device_map=places, offload_folder=directory / "offloaded"
    )
    assert {weight.device.type for weight in split.model.layers[0].parameters()} == {"cpu"}
    assert {weight.device.type for weight in split.model.layers[1].parameters()} == {"meta"}
    return whole, split


@pytest.mark.parametrize(("models", "name"), once(FAMILIES, NAMES), indirect=["models"])
def test_tokens_by_name_and_from_a_cache_that_is_given(models: tuple[Any, Any], name: str) -> None:
    whole, split = models
    by_name = {"cache_implementation": name, "cache_config": None if NAMES[name] is RESERVED else NAMES[name] or None}
    with kvlayers.installed():
        expected = continuation(whole, **by_name)
        assert torch.equal(continuation(split, **by_name), expected)
    cache = kvlayers.make_cache(name, split, **NAMES[name])
    assert torch.equal(continuation(split, past_key_values=cache), expected)


def test_tokens_from_states_on_disk_behind_weights_on_disk(models: tuple[Any, Any], tmp_path: pathlib.Path) -> None:
    whole, split = models
    cache = kvlayers.OffloadedCache(config=split.config, offload_device="disk", offload_directory=tmp_path)
    expected = continuation(whole, past_key_values=transformers.DynamicCache(config=whole.config))
    assert torch.equal(continuation(split, past_key_values=cache), expected)


@pytest.mark.parametrize("name", ["dynamic", "offloaded_static", "quantized", "auto"])
def test_a_model_whose_first_weights_are_on_disk_has_the_device_of_the_others(
    name: str, installed: None, tmp_path: pathlib.Path
) -> None:
    whole = fresh_model("llama")
    whole.save_pretrained(tmp_path)
    places = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    split = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map={**places, "model.rotary_emb": "cpu"}, offload_folder=tmp_path / "offloaded"
    )
    assert split.device.type == "meta"
    assert layer_devices(split) == ()
    expected = continuation(whole, cache_implementation=name)
    assert torch.equal(continuation(split, cache_implementation=name), expected)


def test_weights_on_disk_are_not_on_another_device_but_cannot_be_identified(models: tuple[Any, Any]) -> None:
    _, split = models
    with pytest.raises(kvlayers.OptionError, match=r"weights cannot be identified.*meta tensor"):
        kvlayers.generate(split, prompt(1), prefix_store=kvlayers.PrefixStore(2**20), max_new_tokens=2)
    with pytest.raises(kvlayers.OptionError, match=r"weights cannot be identified.*meta tensor"):
        list(kvlayers.generate_many(split, list(prompt(1)), prefix_store=kvlayers.PrefixStore(2**20), max_new_tokens=2))
