"""What a call of generate() is given in the wrong place, or of the wrong kind, has an error that says what to pass."""

import copy
import inspect
import logging
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
from models import fresh_model, given, prompt, read, tiny_model, tokens_passed

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
    ("wrong", "words"),
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
def test_a_prompt_that_is_none_is_refused(way: str, wrong: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        WAYS[way](tiny_model("llama"), wrong, **HOW)


def said(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options as arguments of a call, and in its config."""
    return options, {"generation_config": transformers.GenerationConfig(**options)}


REFUSED: list[tuple[dict[str, Any], str]] = [
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
    *(
        (
            {"past_key_values": cache, **options},
            "`cache_config` must be left out beside a cache .* a DynamicCache",
        )
        for cache in (transformers.DynamicCache(), kvlayers.DynamicCache())
        for options in said(cache_config={"nbits": 2})
    ),
    *(
        ({**asked, **options}, "`use_cache` must not be False beside a cache or its options")
        for asked in (
            {"past_key_values": "int4"},
            {"cache_implementation": "int4"},
            {"past_key_values": kvlayers.DynamicCache()},
            {"past_key_values": transformers.DynamicCache()},
            {"cache_config": {"nbits": 2}},
        )
        for options in said(use_cache=False)
    ),
]


@pytest.mark.parametrize(("how", "words"), REFUSED)
def test_another_argument_that_is_wrong_is_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        kvlayers.generate(tiny_model("llama"), IDS, **{**HOW, **how})


def test_what_the_model_says_by_itself_is_no_wish_of_the_call() -> None:
    model = fresh_model("llama")
    expected = model.generate(IDS, **HOW)
    model.generation_config.use_cache, model.generation_config.cache_config = False, {"length_hint": 9}
    for cache in (kvlayers.DynamicCache(), transformers.DynamicCache()):
        config = copy.deepcopy(model.generation_config)
        found = kvlayers.generate(model, IDS, past_key_values=cache, generation_config=config, **HOW)
        assert torch.equal(found, expected)


def test_an_argument_that_is_given_twice_is_refused_as_by_python() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        installed(tiny_model("llama"), IDS, inputs=IDS, **HOW)


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


@pytest.mark.parametrize("call", [kvlayers.generate, kvlayers.resilient_generate, kvlayers.generate_many])
@pytest.mark.parametrize("wrong", ["a name", IDS, None])
def test_what_is_no_model_is_refused(wrong: Any, call: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="`model` must be a model of transformers, got a"):
        call(wrong, [IDS] if call is kvlayers.generate_many else IDS)


def test_options_of_kvlayers_are_in_the_signature() -> None:
    parameters = inspect.signature(kvlayers.generate).parameters
    own = ("cache", "cache_config", "prefix_store", "namespace", "documents", "question", "beginning", "recompute")
    assert tuple(name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY) == own


def test_options_may_stand_behind_a_name_wherever_a_cache_is_named() -> None:
    model, ids, text = tiny_model("llama"), prompt(1, 20), "sink:window_length=8,num_sink_tokens=2"
    options = {"cache_config": {"window_length": 8, "num_sink_tokens": 2}}
    expected = kvlayers.generate(model, ids, cache="sink", return_dict_in_generate=True, **options, **HOW).to_tuple()
    assert expected[-1].layers[0].describe() == kvlayers.make_cache(text, model).layers[0].describe()
    for how in (
        {"cache_implementation": "sink", **options},
        *({name: text} for name in ("cache", "cache_implementation", "past_key_values")),
    ):
        assert torch.equal(kvlayers.generate(model, ids, **how, **HOW), expected[0])
    scores = [
        kvlayers_lab.score(model, [ids[0]], [[[5, 6]]], **how, progress=False)[0][0].token_logprobs
        for how in ({"cache": text}, {"cache_implementation": text}, {"cache": "sink", **options})
    ]
    assert scores[0] == scores[1] == scores[2]


# install(cache=...): a cache for calls that name none, and pass none.

OPTIONS: dict[str, Any] = {**HOW, "max_new_tokens": 5, "min_new_tokens": 5, "return_dict_in_generate": True}


def cache_of(model: Any, **options: Any) -> str:
    return repr(model.generate(prompt(tokens=40), **OPTIONS, **options).past_key_values).partition(",")[0]


def test_a_call_that_says_nothing_gets_the_default_and_any_other_what_it_says() -> None:
    model, saved, dynamic = tiny_model("llama"), fresh_model("llama"), "DynamicCache(2 x DynamicLayer"
    saved.generation_config.cache_implementation = "int8"
    expected = installed(model, prompt(tokens=40), **OPTIONS, cache_implementation="int4").sequences
    with kvlayers.installed(cache="int4"):
        assert cache_of(model) == "QuantizedCache(2 x QuantizedLayer of 4 bits"
        assert torch.equal(model.generate(prompt(tokens=40), **OPTIONS).sequences, expected)
        assert cache_of(model, cache_implementation="dynamic") == dynamic
        assert cache_of(model, **given(kvlayers.DynamicCache())) == dynamic
        with kvlayers.installed(cache="quantized:nbits=2"):
            assert cache_of(model) == "QuantizedCache(2 x QuantizedLayer of 2 bits"
        model.generate(prompt(tokens=4), **OPTIONS, use_cache=False)
        assert cache_of(saved) == "QuantizedCache(2 x QuantizedLayer of 8 bits"
    with kvlayers.installed():
        assert cache_of(model) == dynamic
    # Options of a call are not those of the default.
    with kvlayers.installed(cache="sink:window_length=16"), pytest.raises(Exception, match="nbits") as raised:
        cache_of(model, cache_config={"nbits": 4})
    assert "sink" not in str(raised.value).lower()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("gpt2", torch.float32), ("llama", torch.bfloat16)],
    ids=["learned positions", "rounded rotations"],
)
def test_a_model_that_cannot_have_it_goes_on_without_it_and_the_log_says_so_once(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model, store = fresh_model(family).to(dtype), kvlayers.PrefixStore("1GiB")
    expected = installed(model, prompt(tokens=40), **OPTIONS).sequences
    with (
        caplog.at_level(logging.WARNING, logger="kvlayers"),
        kvlayers.installed(cache="sink:window_length=30", prefix_store=store),
    ):
        for covered in (0, 39):
            output = model.generate(prompt(tokens=40), **OPTIONS)
            assert torch.equal(output.sequences, expected)
            assert output.cached_tokens == (covered,)
        assert cache_of(tiny_model("llama")).startswith("SinkCache")
    (message,) = caplog.messages
    assert f"{type(model).__name__} go on without the cache 'sink'" in message


def test_entries_of_the_default_are_those_of_the_name() -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore("1GiB")
    kvlayers.generate(model, prompt(tokens=40), prefix_store=store, **OPTIONS, cache_implementation="int4")
    with kvlayers.installed(cache="int4", prefix_store=store):
        assert model.generate(prompt(tokens=40), **OPTIONS).cached_tokens == (39,)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache": "int9"}, RegistryError, "int9"),
        ({"cache": "dynamo"}, RegistryError, "dynamic"),
        ({"cache": "sink:windows=3"}, OptionError, "windows"),
        ({"cache": "int4:"}, OptionError, "behind the colon"),
        ({"cache": 4}, OptionError, "`cache` must be the name"),
        ({"cache": "int4", "cache_implementation": "int8"}, OptionError, "ask for different caches"),
        ({"cache_implementation": "int44"}, RegistryError, "did you mean 'int4'"),
    ],
)
def test_a_wrong_default_changes_nothing(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kvlayers.install(**options)
    assert not kvlayers.is_installed()


# A call that is going to need more tokens than are reserved says so before it begins.

NEEDED = r"room for 31 tokens.*reservation of 16.*max_cache_len.*max_new_tokens.*grow=True"
TOO_SMALL: dict[str, Any] = {"cache_implementation": "static", "cache_config": {"max_cache_len": 16}}
LONG = prompt(1, 12)


def long_answer(model: Any, tokens: int = 20, ids: torch.Tensor = LONG, **how: Any) -> torch.Tensor:
    """12 tokens of a prompt and 20 new ones, of which the last is never passed: 31 tokens."""
    output: torch.Tensor = installed(model, ids, max_new_tokens=tokens, do_sample=False, **how)
    return output


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("name", ["static", "hybrid", "offloaded_static"])
def test_a_name_with_too_small_a_reservation_is_refused(family: str, name: str) -> None:
    model, options = tiny_model(family), {**TOO_SMALL, "cache_implementation": name}
    if family == "mistral":
        # Its layers keep a window of 8 tokens, for which 16 are enough.
        assert long_answer(model, **options).shape == (1, 32)
        return
    # Tokens that it must generate count even if it may end then.
    for ends in ({"min_new_tokens": 20}, {"min_new_tokens": 10, "eos_token_id": 5}):
        with tokens_passed(model) as passed, pytest.raises(kvlayers.CapacityError, match=NEEDED):
            long_answer(model, **options, **ends)
        assert not passed


@pytest.mark.parametrize("options", [{"max_cache_len": 31}, {"max_cache_len": 16, "grow": True}], ids=str)
def test_a_reservation_that_is_just_large_enough_or_grows_is_used(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    expected = model.generate(LONG, max_new_tokens=20, do_sample=False)
    assert torch.equal(long_answer(model, cache_implementation="static", cache_config=options), expected)


# The second turn, of which the cache has seen 8 tokens: as a whole, and as new tokens with a mask for all.
@pytest.mark.parametrize(("seen", "begin"), [(0, 0), (8, 0), *([] if compat.LOOPS_COUNT_CACHE_POSITION else [(8, 8)])])
def test_a_cache_that_is_passed_is_checked_as_well(seen: int, begin: int) -> None:
    model = tiny_model("llama")
    cache = kvlayers.StaticCache(model.config, max_cache_len=16)
    if seen:
        read(model, LONG[:, :seen], cache)
    with tokens_passed(model) as passed, pytest.raises(kvlayers.CapacityError, match=NEEDED):
        long_answer(
            model,
            ids=LONG[:, begin:],
            attention_mask=torch.ones_like(LONG),
            past_key_values=cache,
            min_new_tokens=20,
        )
    assert (passed, cache.get_seq_length()) == ([], seen)


def stop_at_once(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    return torch.ones(ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize(
    "way",
    [{"eos_token_id": "the first"}, {"stopping_criteria": [stop_at_once]}, {"max_time": 1e-9}],
    ids=["a token", "a criterion", "the time"],
)
def test_a_call_that_may_end_earlier_goes_on_with_a_warning(
    way: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    if "eos_token_id" in way:
        way = {"eos_token_id": int(long_answer(model, 1)[0, -1])}
    with caplog.at_level(logging.WARNING, logger="kvlayers"):
        # Up to 5 tokens fit.
        long_answer(model, 5, **TOO_SMALL, **way)
        assert not caplog.records
        assert long_answer(model, **TOO_SMALL, **way).shape == (1, 13)
    assert "room for 16 tokens" in caplog.text
    assert "may need 31" in caplog.text
