"""`cache_implementation="auto"`: the cache that a plan recommends, for the memory that there is.

If a model is spread over devices, each must have room for its own layers.
"""

import logging
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import kvlayers
from fake_device import CPU, DEVICE, IS_SUPPORTED
from kvlayers.planning import auto
from kvlayers.upstream import model_layers
from kvlayers.upstream.model_layers import layer_devices
from models import COMMON, fresh_model, prompt, tiny_model

CONFIG = tf.LlamaConfig(**COMMON)
TOKENS = 4000


def device_bytes(name: str, config: Any = CONFIG, tokens: int = TOKENS) -> int:
    return kvlayers.plan(config, tokens, names=[name])[name].device_bytes


def chosen(memory: int, device: str = "cpu", config: Any = CONFIG) -> Any:
    return kvlayers.make_cache("auto", config, length_hint=TOKENS, device=torch.device(device), memory=memory)


def own_levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Levels of the records of kvlayers: transformers logs too, by what other tests have already seen."""
    return [record.levelno for record in caplog.records if record.name.startswith("kvlayers")]


def test_generate_takes_what_the_free_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny_model("llama"), prompt(2, 300)
    arguments = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(ids, **arguments)
    caplog.set_level(logging.INFO, "kvlayers.planning")
    with kvlayers.installed():
        roomy = model.generate(ids, cache_implementation="auto", **arguments)
    assert torch.equal(roomy.sequences, plain.sequences)
    assert type(roomy.past_key_values) is kvlayers.DynamicCache
    assert own_levels(caplog)[-1] == logging.INFO
    assert "'auto' takes 'dynamic' for 307 tokens, batch 2" in caplog.text
    dynamic = kvlayers.plan(model.config, 307, 2, model.dtype)["dynamic"].device_bytes
    monkeypatch.setattr(auto, "free_memory", lambda device: int(dynamic / auto.SHARE_FOR_CACHE) - 2)
    with kvlayers.installed():
        tight = model.generate(ids, cache_implementation="auto", **arguments)
    assert isinstance(tight.past_key_values, kvlayers.QuantizedCache)
    assert own_levels(caplog)[-1] == logging.WARNING
    assert "'auto' takes 'int8'" in caplog.text


def test_the_host_is_for_models_of_other_devices() -> None:
    config = tf.LlamaConfig(**{**COMMON, "num_hidden_layers": 40})
    too_small = device_bytes("int4", config) - 1
    assert chosen(too_small, "meta", config).offloading
    with pytest.raises(kvlayers.CapacityError, match="'int4' takes"):
        chosen(too_small, "cpu", config)


def test_models_that_cannot_be_planned_get_one_that_grows(caplog: pytest.LogCaptureFixture) -> None:
    config = tf.OpenAIGPTConfig()
    assert type(chosen(2**30, config=config)) is kvlayers.DynamicCache
    assert "'auto' takes 'dynamic', since the model cannot be planned" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": 2**30}, "length_hint"),
        ({"length_hint": 10, "memory": "1 gig"}, "memory` must be a number of bytes.*1 gig"),
        ({"length_hint": 10, "memory": 0}, "at least 1, got 0"),
        ({"length_hint": 10, "nbits": 4}, "option `memory`.*nbits"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(kvlayers.OptionError, match=words):
        kvlayers.make_cache("auto", CONFIG, **options)


def test_a_device_that_does_not_tell_is_refused() -> None:
    with pytest.raises(kvlayers.OptionError, match="pass `memory`"):
        auto.free_memory(torch.device("meta"))
    assert 0 < auto.free_memory(torch.device("cpu")) < 2**50


# Models that are spread over devices

needs_devices = pytest.mark.skipif(not IS_SUPPORTED, reason="PyTorch has no devices that are written in Python")


def spread(layers: int, on_device: int, family: str = "llama") -> Any:
    """A model with its last layers on another device."""
    model = fresh_model(family, num_hidden_layers=layers)
    places = {f"model.layers.{index}": DEVICE if index >= layers - on_device else CPU for index in range(layers)}
    for name, place in places.items():
        model.get_submodule(name).to(place)
    # As accelerate leaves it.
    model.hf_device_map = {"model.embed_tokens": CPU, **places}
    return model


def choice(model: Any, patch: pytest.MonkeyPatch, free: dict[torch.device, int]) -> Any:
    patch.setattr(auto, "free_memory", lambda device: int(free[device] / auto.SHARE_FOR_CACHE) + 1)
    return kvlayers.make_cache("auto", model, length_hint=TOKENS, device=model.device, dtype=model.dtype)


def layer_bytes(model: Any, name: str) -> int:
    planned = kvlayers.plan(model, TOKENS, names=[name])[name]
    return planned.nbytes // model.config.num_hidden_layers


@needs_devices
@pytest.mark.parametrize(("family", "layers"), [("gpt2", "transformer.h"), ("t5", "decoder.block")])
def test_the_layers_of_other_architectures_are_found(family: str, layers: str) -> None:
    model = fresh_model(family)
    count = len(model.get_submodule(layers))
    model.get_submodule(layers)[count - 1].to(DEVICE)
    model.hf_device_map = {"": CPU, f"{layers}.{count - 1}": DEVICE}
    assert layer_devices(model) == (*[CPU] * (count - 1), DEVICE)


@needs_devices
def test_the_devices_of_layers_are_found() -> None:
    assert layer_devices(spread(4, 1)) == (CPU, CPU, CPU, DEVICE)
    model = fresh_model("llama")
    assert layer_devices(model) == layer_devices(model.config) == ()
    model.hf_device_map = {"": CPU}
    assert layer_devices(model) == ()
    # Weights on disk are on no device, and are brought to the device of the model.
    away = spread(4, 0)
    away.model.layers[1].to("meta")
    assert layer_devices(away) == ()
    assert isinstance(away.model.layers, nn.ModuleList)


@needs_devices
@pytest.mark.parametrize("full", [CPU, DEVICE])
def test_each_device_must_have_room_for_its_own_layers(monkeypatch: pytest.MonkeyPatch, full: torch.device) -> None:
    model = spread(4, 1)
    layers = {CPU: 3, DEVICE: 1}
    dynamic = layer_bytes(model, "dynamic")
    free = {device: count * dynamic for device, count in layers.items()}
    assert type(choice(model, monkeypatch, free)) is kvlayers.DynamicCache
    # All free memory together would do: another device has plenty.
    plenty = {device: (100 if device != full else 1) * nbytes for device, nbytes in free.items()}
    assert type(choice(model, monkeypatch, plenty)) is kvlayers.DynamicCache
    plenty[full] -= 10
    assert isinstance(choice(model, monkeypatch, plenty), kvlayers.QuantizedCache)


@needs_devices
def test_layers_of_different_sizes_count_for_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = spread(4, 1, "gemma3")
    planned = kvlayers.plan(model, TOKENS, names=["dynamic"])["dynamic"].nbytes
    cache = kvlayers.DynamicCache(config=model.config)
    whole = [index for index, layer in enumerate(cache.layers) if not layer.is_sliding]
    # The windows are small, so nearly all is needed where the only whole layer is.
    assert whole == [2]
    free = {CPU: planned, DEVICE: planned // 10}
    assert type(choice(model, monkeypatch, free)) is kvlayers.DynamicCache
    free = {CPU: planned // 2, DEVICE: planned}
    assert isinstance(choice(model, monkeypatch, free), kvlayers.QuantizedCache)


@needs_devices
def test_no_layer_is_left_out_if_the_model_lists_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = spread(4, 1)
    monkeypatch.setattr(model_layers, "layer_devices", lambda model: (CPU, DEVICE))
    dynamic = layer_bytes(model, "dynamic")
    free = {CPU: dynamic, DEVICE: 3 * dynamic}
    assert type(choice(model, monkeypatch, free)) is kvlayers.DynamicCache
    free[DEVICE] -= 10
    assert isinstance(choice(model, monkeypatch, free), kvlayers.QuantizedCache)


@needs_devices
def test_two_layers_of_each_device_are_there_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = spread(40, 20)
    dynamic = layer_bytes(model, "offloaded")
    two = {CPU: 2 * dynamic, DEVICE: 2 * dynamic}
    with caplog.at_level(logging.INFO, "kvlayers.planning"):
        assert choice(model, monkeypatch, two).offloading
    assert f"for caches on {CPU}, {DEVICE}" in caplog.text
    with pytest.raises(kvlayers.CapacityError, match=rf"more than the budget of {DEVICE}: allow more there, or plan"):
        choice(model, monkeypatch, {CPU: 100 * dynamic, DEVICE: dynamic})


@needs_devices
def test_an_amount_that_is_given_is_for_all_devices_together() -> None:
    model = spread(4, 1)
    total = 4 * layer_bytes(model, "dynamic")
    for memory, kind in ((total, kvlayers.DynamicCache), (total - 1, kvlayers.QuantizedCache)):
        cache = kvlayers.make_cache("auto", model, length_hint=TOKENS, device=model.device, memory=memory)
        assert type(cache) is kind
