"""What a call of generate() is given in the wrong place, or of the wrong kind, has an error that says what to pass."""

import copy
import inspect
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import kvlayers
import kvlayers_lab
from kvlayers.errors import OptionError, RegistryError, StateMismatchError
from kvlayers.upstream import cache_argument, compat
from models import fresh_model, prompt, tiny_model

IDS = prompt(1, 5)
HOW: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def installed(model: Any, *args: Any, **how: Any) -> Any:
    with kvlayers.installed():
        return model.generate(*args, **how)


WAYS: dict[str, Callable[..., Any]] = {
    "generate": kvlayers.generate,
    "installed": installed,
    "resilient": kvlayers.resilient_generate,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_may_be_what_a_tokenizer_returns(way: str) -> None:
    model, ids = tiny_model("llama"), prompt(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    expected = model.generate(ids, attention_mask=mask, **HOW)
    # The class of what tokenizers return, BatchEncoding, is a UserDict.
    encoded = UserDict(input_ids=ids, attention_mask=mask)
    for seen in (
        WAYS[way](model, encoded, **HOW),
        WAYS[way](model, inputs=dict(encoded), **HOW),
        WAYS[way](model, input_ids=encoded, **HOW),
    ):
        assert torch.equal(seen, expected)
    with pytest.raises(OptionError, match="`attention_mask` must be given once"):
        WAYS[way](model, encoded, attention_mask=mask, **HOW)
    with pytest.raises(OptionError, match="`input_ids` must be in the encoded prompt, got ids"):
        WAYS[way](model, {"ids": ids}, **HOW)


@pytest.mark.parametrize("way", ["generate", "installed"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("a text", "got a str"),
        (["a text"], "got a list"),
        ([[5, 6]], "got a list"),
        (object(), "got a object"),
        (IDS[0], r"got torch.int64 of shape \[5\]: add the dimension"),
        (IDS.float(), "got torch.float32"),
        (IDS > 3, "got torch.bool"),
        (IDS[:, :0], r"of shape \[1, 0\]"),
        (IDS[:0], r"of shape \[0, 5\]"),
        (IDS.to("meta"), "on the meta device"),
        (torch.tensor([[5, 10**6]]), "must be ids from 0 to .*, the vocabulary of the model, got 1000000"),
        (torch.tensor([[5, -100]]), "the vocabulary of the model, got -100: pass those of the model's own tokenizer"),
    ],
)
def test_a_prompt_that_is_none_is_refused(way: str, given: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        WAYS[way](tiny_model("llama"), given, **HOW)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"attention_mask": [[1] * 5]}, "`attention_mask` must be a tensor"),
        ({"attention_mask": torch.ones(1, 3)}, "`attention_mask` must have an entry for each of the 5 tokens"),
        ({"attention_mask": torch.ones(2, 5)}, r"the 5 tokens of `inputs`, in 1 rows, got \[2, 5\]"),
        ({"generation_config": IDS}, "`generation_config` must be a GenerationConfig, got a Tensor"),
        ({"max_new_tokens": "2"}, "`max_new_tokens` must be a whole number, got '2'"),
        ({"past_key_values": kvlayers.QuantizedCache}, "or the name of one, got the class QuantizedCache"),
        ({"max_new_token": 2}, "`max_new_token` is no option of generate.*did you mean 'max_new_tokens'"),
        ({"temprature": 0.5}, "did you mean 'temperature'"),
        ({"past_key_values": {}}, "or the name of one, got a dict"),
        ({"cache_implementation": kvlayers.DynamicCache}, "got the class DynamicCache"),
        ({"cache_implementation": "int4", "cache_config": "nbits=4"}, "`cache_config` must be a mapping"),
        ({"cache_implementation": "dynamic", "cache_config": {"config": 3}}, "from names to values"),
        ({"cache_implementation": "dynamic", "cache_config": {1: 2}}, "from names to values"),
        ({"cache_implementation": "sink:window=1", "past_key_values": "int4"}, "ask for different caches"),
        ({"nbits": 2}, r"`nbits` is no option of generate\(\), but one of a cache: pass cache_config=\{'nbits': 2\}"),
        ({"past_key_values": "int4", "length_hint": 24}, r"pass cache_config=\{'length_hint': 24\}"),
    ],
)
def test_another_argument_of_the_wrong_kind_is_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        kvlayers.generate(tiny_model("llama"), IDS, **{**HOW, **how})


def _config(**options: Any) -> dict[str, Any]:
    return {"generation_config": transformers.GenerationConfig(**options)}


@pytest.mark.parametrize("option", [{"cache_config": {"nbits": 2}}, _config(cache_config={"nbits": 2})])
@pytest.mark.parametrize("make", [transformers.DynamicCache, kvlayers.DynamicCache])
def test_options_of_a_name_beside_a_cache_are_refused(make: Any, option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="`cache_config` must be left out beside a cache .* a DynamicCache"):
        kvlayers.generate(tiny_model("llama"), IDS, past_key_values=make(), **option, **HOW)


@pytest.mark.parametrize("option", [{"use_cache": False}, _config(use_cache=False)])
@pytest.mark.parametrize(
    "asked",
    [
        {"past_key_values": "int4"},
        {"cache_implementation": "int4"},
        {"past_key_values": kvlayers.DynamicCache()},
        {"past_key_values": transformers.DynamicCache()},
        {"cache_config": {"nbits": 2}},
    ],
    ids=["a name", "an implementation", "a cache", "a cache of transformers", "options"],
)
def test_a_cache_that_is_not_to_be_used_is_refused(asked: dict[str, Any], option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="`use_cache` must not be False beside a cache or its options"):
        kvlayers.generate(tiny_model("llama"), IDS, **asked, **option, **HOW)


def test_what_the_model_says_by_itself_is_no_wish_of_the_call() -> None:
    model = fresh_model("llama")
    expected = model.generate(IDS, **HOW)
    model.generation_config.use_cache, model.generation_config.cache_config = False, {"length_hint": 9}
    for cache in (kvlayers.DynamicCache(), transformers.DynamicCache()):
        config = copy.deepcopy(model.generation_config)
        found = kvlayers.generate(model, IDS, past_key_values=cache, generation_config=config, **HOW)
        assert torch.equal(found, expected)


def test_an_argument_that_is_given_twice_is_refused_as_by_python() -> None:
    with kvlayers.installed(), pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        tiny_model("llama").generate(IDS, inputs=IDS, **HOW)


def test_a_prompt_of_many_with_other_ids_is_its_own_error() -> None:
    answers = list(kvlayers.generate_many(tiny_model("llama"), [[5, 10**6], [5, 6]], max_new_tokens=2, in_order=True))
    assert isinstance(answers[0].error, OptionError)
    assert "the vocabulary of the model, got 1000000" in str(answers[0].error)
    assert (answers[1].error, len(answers[1].ids)) == (None, 2)


@pytest.mark.skipif(not compat.MARKS_GIVEN_CACHES, reason="an older transformers marks nothing")
def test_a_class_in_the_place_of_a_cache_is_refused_and_not_marked() -> None:
    model = tiny_model("llama")
    cache, name = kvlayers.DynamicCache(config=model.config), cache_argument.name_in_generate(model)
    with pytest.raises(OptionError, match="got the class DynamicCache: pass one that it makes"):
        model.generate(IDS, **{name: kvlayers.DynamicCache}, **HOW)
    model.generate(IDS, **{name: cache}, **HOW)
    # Whoever reads the length beside the call is not taken for the call.
    assert cache.length == IDS.shape[1] + 2
    # The mark would have hidden from the cache that it is given to a call.
    with pytest.raises(StateMismatchError, match="has no new ones"):
        model.generate(IDS, **{name: cache}, **HOW)


@pytest.mark.parametrize("given", ["a name", IDS, None])
def test_what_is_no_model_is_refused(given: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: kvlayers.generate(given, IDS),
        lambda: kvlayers.resilient_generate(given, IDS),
        lambda: kvlayers.generate_many(given, [IDS]),
    ]
    for call in calls:
        with pytest.raises(OptionError, match="`model` must be a model of transformers, got a"):
            call()


def test_options_may_stand_behind_a_name_wherever_a_cache_is_named() -> None:
    model, text = tiny_model("llama"), "sink:window_length=8,num_sink_tokens=2"
    options = {"window_length": 8, "num_sink_tokens": 2}
    ids = prompt(1, 20)
    expected = kvlayers.generate(model, ids, cache_implementation="sink", cache_config=options, **HOW)
    for name in ("cache_implementation", "past_key_values"):
        assert torch.equal(kvlayers.generate(model, ids, **{name: text}, **HOW), expected)
    assert repr(kvlayers.make_cache(text, model)) == repr(kvlayers.make_cache("sink", model, **options))
    scores = [
        kvlayers_lab.score(model, [ids[0]], [[[5, 6]]], **how, progress=False)[0][0].token_logprobs
        for how in ({"cache": text}, {"cache_implementation": text}, {"cache": "sink", "cache_config": options})
    ]
    assert scores[0] == scores[1] == scores[2]


def test_the_default_cache_may_be_named_by_either_argument() -> None:
    with kvlayers.installed(cache_implementation="int8"):
        output = tiny_model("llama").generate(IDS, return_dict_in_generate=True, **HOW)
    assert type(output.past_key_values).__name__ == "QuantizedCache"
    with pytest.raises(OptionError, match="ask for different caches"):
        kvlayers.install(cache="int4", cache_implementation="int8")
    with pytest.raises(RegistryError, match="did you mean 'int4'"):
        kvlayers.install(cache_implementation="int44")
    assert not kvlayers.is_installed()


def test_options_of_kvlayers_are_in_the_signature() -> None:
    parameters = inspect.signature(kvlayers.generate).parameters
    own = ("cache", "cache_config", "prefix_store", "namespace", "documents", "question", "beginning", "recompute")
    assert tuple(name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY) == own


@pytest.mark.parametrize("cache_config", [None, {"nbits": 2}])
def test_the_named_options_reach_the_cache(cache_config: dict[str, int] | None) -> None:
    options: dict[str, Any] = {"max_new_tokens": 2, "return_dict_in_generate": True, "cache_config": cache_config}
    made = kvlayers.generate(tiny_model("llama"), prompt(1), cache="quantized", **options).to_tuple()[-1]
    assert isinstance(made, kvlayers.QuantizedCache)
    assert made.layers[0].nbits == (4 if cache_config is None else 2)
