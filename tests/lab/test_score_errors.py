"""Bad input of `kvlayers_lab.score`: a named error with the place of what is wrong, before anything is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import kvlayers
import kvlayers_lab
from kvlayers.errors import (
    CapacityError,
    ConfigError,
    KVLayersError,
    OptionError,
    RegistryError,
    StateMismatchError,
    UnsupportedLayerError,
)
from model_directories import word_tokenizer
from models import fresh_model, prompt, tiny_model
from score_reference import passes_of

GOOD: dict[str, Any] = {"contexts": [[5, 8, 13]], "continuations": [[[21], [34, 55]]]}

PAIR = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())


def refused(model: Any, error: type[KVLayersError], message: str, **changes: Any) -> None:
    with passes_of(model) as passes, pytest.raises(error, match=message):
        kvlayers_lab.score(model, **{**GOOD, **changes})
    assert passes == []


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("`contexts` must be a list .* got a str", {"contexts": "the sea", "continuations": [["a"]]}),
        ("`contexts` must be a list .* got a Tensor", {"contexts": torch.tensor([[5, 8]])}),
        ("`continuations` must be a list .* got a str", {"continuations": "a"}),
        (r"`continuations\[0\]` must be the list .* got a str", {"continuations": ["the"]}),
        (r"`continuations\[0\]\[0\]` must be .* got a int", {"continuations": [[21, 34]]}),
        ("`continuations` must have a list for each of the 1 contexts, got 2", {"continuations": [[[1]], [[2]]]}),
        (r"`contexts\[0\]` must have at least one token", {"contexts": [[]]}),
        (r"`continuations\[0\]\[1\]` must have at least one token", {"continuations": [[[21], []]]}),
        (r"`continuations\[0\]\[0\]` must be token ids, as `contexts\[0\]` is, got a str", {"continuations": [["a"]]}),
        (r"`continuations\[0\]\[0\]` must be a text", {"contexts": ["a"], "tokenizer": word_tokenizer()}),
        (r"`contexts\[0\]` must be token ids of shape \[tokens\], got .* \[1, 2\]", {"contexts": [torch.ones(1, 2)]}),
        (r"`contexts\[0\]` must be token ids .* torch.bool", {"contexts": [torch.tensor([True])]}),
        (r"`contexts\[0\]` must be a list of token ids", {"contexts": [[5.0]]}),
        (r"`contexts\[0\]` must be a text, a list .* got a set", {"contexts": [{5}]}),
        (r"`contexts\[0\]` must have token ids from 0 to 96, .* got 5 to 97", {"contexts": [[5, 97]]}),
        (r"`continuations\[0\]\[0\]` .* got -100 to 3: use the tokenizer", {"continuations": [[[3, -100]]]}),
        ("`tokenizer` must be .* got none", {"contexts": ["a"], "continuations": [["b"]]}),
        ("`tokenizer` must be .* a str", {"contexts": ["a"], "continuations": [["b"]], "tokenizer": "gpt2"}),
        ("`batch_size` must be .* 0", {"batch_size": 0}),
        ("`batch_size` must be .* 'auto'", {"batch_size": "auto"}),
        ("`batch_size` must be .* True", {"batch_size": True}),
        ("`chunk` must be .* -1", {"chunk": -1}),
        ("`chunk` must be .* 2.5", {"chunk": 2.5}),
        ("`nbit`.*did you mean 'nbits'", {"cache": "int4", "cache_config": {"nbit": 4}}),
        ("`cache_config` must be a mapping", {"cache": "int4", "cache_config": [4]}),
        ("`cache_config` has options for a cache by name", {"cache": kvlayers.DynamicCache(), "cache_config": {}}),
        ("`cache` must be the name of a cache, .* class DynamicCache", {"cache": kvlayers.DynamicCache}),
        ("`cache` must be the name .* EncoderDecoderCache", {"cache": PAIR}),
        ("`prefix_store` must be", {"prefix_store": {}}),
        ("`namespace` needs a `prefix_store`", {"namespace": "one"}),
        (
            "`prefix_store` needs the name of a cache",
            {"prefix_store": kvlayers.PrefixStore(2**20), "cache": transformers.DynamicCache()},
        ),
    ],
)
def test_bad_arguments(message: str, changes: dict[str, Any]) -> None:
    refused(tiny_model("llama"), OptionError, message, **changes)


def test_calls_that_cannot_use_a_store() -> None:
    store = kvlayers.PrefixStore(2**20)
    refused(tiny_model("llama"), OptionError, "unless `chunk` is given", cache="int4", prefix_store=store)
    model = fresh_model("llama")
    model.model.layers[0].register_forward_hook(lambda *_: None)
    refused(model, OptionError, "has hooks, on which states may depend", prefix_store=store)


def test_an_unknown_name() -> None:
    refused(tiny_model("llama"), RegistryError, "unknown cache name 'in4': did you mean 'int4'", cache="in4")


def test_more_tokens_than_positions() -> None:
    # The model has 256 positions, and the last token of a continuation is not passed to it.
    model, context = tiny_model("gpt2"), prompt(tokens=254)[0].tolist()
    kvlayers_lab.score(model, [[5], context], [[[7]], [[7], [7, 8, 9]]])
    message = r"`contexts\[1\]` with `continuations\[1\]\[1\]` must be within the 256 positions .* got 254 \+ 4"
    continuations = [[[7]], [[7], [7, 8, 9, 10]]]
    refused(model, CapacityError, message, contexts=[[5], context], continuations=continuations)


def test_a_sink_cache_reads_beyond_the_positions() -> None:
    kvlayers_lab.score(tiny_model("llama"), [prompt(tokens=300)[0].tolist()], [[[5]]], "sink", chunk=50)


def test_a_reservation_that_is_too_small() -> None:
    model, message = tiny_model("llama"), "`cache` must have room for 4 tokens, the longest context"
    refused(model, CapacityError, message, cache="static", cache_config={"max_cache_len": 3})
    refused(model, CapacityError, message, cache=kvlayers.StaticCache(model.config, max_cache_len=3))
    refused(model, CapacityError, message, cache=transformers.StaticCache(model.config, max_cache_len=3))


def filled(cache: Any) -> Any:
    with torch.no_grad():
        tiny_model("llama")(prompt(), past_key_values=cache)
    return cache


def recording(cache: Any) -> Any:
    cache.activate_past_recording()
    return cache


class OneOfItsKind(transformers.DynamicCache):  # type: ignore[misc]
    """A cache that cannot be copied."""

    def __deepcopy__(self, memo: object) -> "OneOfItsKind":
        raise UnsupportedLayerError("this layer holds a handle of a device")


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (StateMismatchError, "`cache` must be empty", lambda config: filled(kvlayers.DynamicCache(config=config))),
        (StateMismatchError, "`cache` must be empty", lambda config: filled(transformers.DynamicCache(config=config))),
        (OptionError, "copy.deepcopy can copy, .* handle of a device", lambda config: OneOfItsKind()),
        (ConfigError, "2 layers .* got 4", lambda config: kvlayers.DynamicCache(config=fresh_model("gemma3").config)),
        (
            ConfigError,
            "layer 0 of the cache",
            lambda config: kvlayers.DynamicCache(config=fresh_model("mistral").config),
        ),
    ],
)
def test_instances_that_cannot_score(error: type[KVLayersError], message: str, make: Callable[[Any], Any]) -> None:
    model = tiny_model("llama")
    refused(model, error, message, cache=make(model.config))


def test_a_cache_that_records_cannot_score() -> None:
    model = tiny_model("mistral")
    refused(model, OptionError, "must not record", cache=recording(kvlayers.DynamicCache(config=model.config)))


def test_a_model_in_training_mode() -> None:
    model = fresh_model("llama").train()
    refused(model, ConfigError, "must be in evaluation mode.*call model.eval")
    model.eval().model.layers[1].train()
    refused(model, ConfigError, "must be in evaluation mode")


def test_a_model_with_an_encoder() -> None:
    refused(fresh_model("t5"), ConfigError, "must be a model without an encoder, got T5")


def test_a_model_without_a_cache() -> None:
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99
    )
    refused(transformers.BertForMaskedLM(config).eval(), ConfigError, "must take a cache, got BertForMaskedLM")


def test_a_model_without_logits() -> None:
    config = fresh_model("llama").config
    refused(transformers.LlamaModel(config).eval(), ConfigError, "must predict next tokens, got LlamaModel")
    classifier = transformers.LlamaForSequenceClassification(config).eval()
    refused(classifier, ConfigError, "must predict next tokens, got LlamaForSequenceClassification")


def test_a_model_with_states_of_its_own() -> None:
    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_attention_heads=2, lru_width=32, vocab_size=97
    )
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    refused(model, ConfigError, "must keep all of its states in the cache|must take a cache")


@pytest.mark.parametrize("model", ["llama", None])
def test_what_is_no_model(model: object) -> None:
    with pytest.raises(ConfigError, match="must be a model or its config"):
        kvlayers_lab.score(model, **GOOD)
    with pytest.raises(ConfigError, match="`model` must be a model, got its config"):
        kvlayers_lab.score(tiny_model("llama").config, **GOOD)


def test_a_learned_prompt() -> None:
    peft = pytest.importorskip("peft", reason="prompt tuning is in PEFT")
    options = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    refused(peft.get_peft_model(fresh_model("llama"), options).eval(), ConfigError, "learned prompt")
