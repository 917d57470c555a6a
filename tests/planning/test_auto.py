"""`cache_implementation="auto"`: the cache that a plan recommends, for the memory that there is."""

import logging
from typing import Any

import pytest
import torch
import transformers as tf

import kvlayers
from kvlayers.planning import auto
from models import COMMON, prompt, tiny_model

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
