"""install(cache=...): a cache for calls that name none, and pass none."""

import logging
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers import OptionError, PrefixStore
from kvlayers.errors import RegistryError
from models import fresh_model, given, prompt, tiny_model

OPTIONS: dict[str, Any] = {
    "max_new_tokens": 5,
    "min_new_tokens": 5,
    "do_sample": False,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
}


def cache_of(model: Any, **options: Any) -> str:
    return repr(model.generate(prompt(tokens=40), **OPTIONS, **options).past_key_values).partition(",")[0]


def test_a_model_whose_rotations_were_rounded_goes_on_without_sinks(caplog: pytest.LogCaptureFixture) -> None:
    model = fresh_model("llama").to(torch.bfloat16)
    with kvlayers.installed(cache="sink:window_length=16"), caplog.at_level(logging.WARNING):
        assert cache_of(model).startswith("DynamicCache")
    assert any("go on without the cache 'sink'" in message for message in caplog.messages)


def test_a_call_with_options_of_a_cache_does_not_get_the_default_with_them() -> None:
    with kvlayers.installed(cache="sink:window_length=16"), pytest.raises(Exception, match="nbits") as raised:
        cache_of(tiny_model("llama"), cache_config={"nbits": 4})
    assert "sink" not in str(raised.value).lower()


def test_a_call_that_says_nothing_gets_the_default_and_any_other_what_it_says() -> None:
    model = tiny_model("llama")
    with kvlayers.installed():
        expected = model.generate(prompt(tokens=40), **OPTIONS, cache_implementation="int4").sequences
    with kvlayers.installed(cache="int4"):
        assert cache_of(model) == "QuantizedCache(2 x QuantizedLayer of 4 bits"
        assert torch.equal(model.generate(prompt(tokens=40), **OPTIONS).sequences, expected)
        assert cache_of(model, cache_implementation="dynamic") == "DynamicCache(2 x DynamicLayer"
        assert cache_of(model, **given(kvlayers.DynamicCache())) == "DynamicCache(2 x DynamicLayer"
        with kvlayers.installed(cache="quantized:nbits=2"):
            assert cache_of(model) == "QuantizedCache(2 x QuantizedLayer of 2 bits"
        model.generate(prompt(tokens=4), **OPTIONS, use_cache=False)
        saved = fresh_model("llama")
        saved.generation_config.cache_implementation = "int8"
        assert cache_of(saved) == "QuantizedCache(2 x QuantizedLayer of 8 bits"
    with kvlayers.installed():
        assert cache_of(model) == "DynamicCache(2 x DynamicLayer"
    try:
        kvlayers.install(cache="int4")
        assert cache_of(model).startswith("Quantized")
        # Another call of install() keeps it.
        kvlayers.install(strict_prompts=False)
        assert cache_of(model).startswith("Quantized")
        kvlayers.uninstall()
        kvlayers.install()
        assert cache_of(model).startswith("Dynamic")
    finally:
        kvlayers.uninstall()


def test_a_model_that_cannot_have_it_goes_on_without_it_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, store = fresh_model("gpt2"), PrefixStore("1GiB")
    with kvlayers.installed():
        expected = model.generate(prompt(tokens=40), **OPTIONS).sequences
    with (
        caplog.at_level(logging.WARNING, logger="kvlayers"),
        kvlayers.installed(cache="sink:window_length=30", prefix_store=store),
    ):
        for covered in (0, 39):
            output = model.generate(prompt(tokens=40), **OPTIONS)
            assert torch.equal(output.sequences, expected)
            assert output.cached_tokens == (covered,)
        assert cache_of(tiny_model("llama")).startswith("SinkCache")
    (said,) = caplog.messages
    assert "GPT2LMHeadModel go on without the cache 'sink'" in said


def test_entries_of_the_default_are_those_of_the_name() -> None:
    model, store = tiny_model("llama"), PrefixStore("1GiB")
    kvlayers.generate(model, prompt(tokens=40), prefix_store=store, **OPTIONS, cache_implementation="int4")
    with kvlayers.installed(cache="int4", prefix_store=store):
        assert model.generate(prompt(tokens=40), **OPTIONS).cached_tokens == (39,)


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        ("int9", RegistryError, "int9"),
        ("dynamo", RegistryError, "dynamic"),
        ("sink:windows=3", OptionError, "windows"),
        ("int4:", OptionError, "behind the colon"),
        (4, OptionError, "`cache` must be the name"),
    ],
)
def test_a_wrong_default_changes_nothing(cache: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kvlayers.install(cache=cache)
    assert not kvlayers.is_installed()
