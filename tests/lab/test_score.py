"""`kvlayers_lab.score`: what it returns, how it encodes texts, what it refuses, and what it leaves as it was."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors

import kvlayers
import kvlayers_lab
from families import any_model_and_inputs
from kvlayers.errors import (
    CapacityError,
    ConfigError,
    KVLayersError,
    OptionError,
    RegistryError,
    StateMismatchError,
    UnsupportedLayerError,
)
from kvlayers_lab.evaluation import engine as module
from kvlayers_lab.evaluation.requests import ContinuationScore, ScoringRequest, TextPairs, encoded
from model_directories import random_text, word_tokenizer
from models import fresh_model, passes_of, prompt, tiny_model
from score_reference import alone

CONTEXTS = [prompt(tokens=20, seed=seed)[0].tolist() for seed in range(3)]
DOCUMENT = prompt(tokens=64)[0].tolist()
CONTINUATIONS = [[[5, 8, 13], [21]], [], [[34, 55], [34, 56, 7, 8], [90]]]


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


def logprobs(scores: list[list[ContinuationScore]]) -> list[float]:
    return [score.logprob for group in scores for score in group]


def test_scores_are_those_of_each_pair_alone(model: Any) -> None:
    scores = kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS)
    assert [len(group) for group in scores] == [2, 0, 3]
    assert kvlayers_lab.score(model, [], []) == []
    pairs = [
        (tuple(context), tuple(own)) for context, group in zip(CONTEXTS, CONTINUATIONS, strict=True) for own in group
    ]
    for pair, score in zip(pairs, itertools.chain(*scores), strict=True):
        expected = alone(model, ScoringRequest(*pair))
        assert score.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-5)
        total = sum(expected.token_logprobs)
        assert (score.logprob, score.mean_logprob) == pytest.approx((total, total / len(pair[1])), abs=1e-5)
        assert score.token_is_greedy == expected.token_is_greedy


def test_texts_tensors_and_tuples_score_as_their_ids(model: Any) -> None:
    tokenizer, text, continuation = word_tokenizer(), random_text(12), " the sea"
    context, ids = tokenizer.encode(text), tokenizer.encode(continuation)
    expected = kvlayers_lab.score(model, [context], [[ids]])
    assert kvlayers_lab.score(model, [text], [[continuation]], tokenizer=tokenizer) == expected
    tensors = [torch.tensor(context)], [[torch.tensor(ids, dtype=torch.int32)]]
    for written in (tensors, ((tuple(context),), ((tuple(ids),),))):
        assert kvlayers_lab.score(model, *written) == expected


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_name_and_an_instance_give_the_same_scores(model: Any, chunk: int | None) -> None:
    long, options = [prompt(tokens=100)[0].tolist()], {"nbits": 2, "residual_length": 16}
    by_name = kvlayers_lab.score(model, long, [[[5, 8, 13]]], "quantized", cache_config=options, chunk=chunk)
    cache = kvlayers.QuantizedCache(config=model.config, **options)
    assert kvlayers_lab.score(model, long, [[[5, 8, 13]]], cache, chunk=chunk) == by_name
    assert logprobs(by_name) != pytest.approx(logprobs(kvlayers_lab.score(model, long, [[[5, 8, 13]]])), abs=1e-4)
    assert cache.get_seq_length() == 0


def filled(cache: Any) -> Any:
    with torch.no_grad():
        tiny_model("llama")(torch.tensor([CONTEXTS[0]]), past_key_values=cache)
    return cache


def used_before(config: Any) -> Any:
    cache = filled(kvlayers.StaticCache(config, max_cache_len=64))
    cache.reset()
    return cache


INSTANCES = {
    "kvlayers dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "kvlayers without a config": lambda config: kvlayers.DynamicCache(),
    "kvlayers static": lambda config: kvlayers.StaticCache(config, max_cache_len=64),
    "kvlayers static, used before": used_before,
    "kvlayers sink": lambda config: kvlayers.SinkCache(window_length=64, config=config),
    "transformers dynamic": lambda config: transformers.DynamicCache(config=config),
    "transformers without a config": lambda config: transformers.DynamicCache(),
    "transformers static": lambda config: transformers.StaticCache(config, max_cache_len=64),
}


@pytest.mark.parametrize("kind", INSTANCES)
def test_an_instance_is_never_changed(model: Any, kind: str) -> None:
    cache = INSTANCES[kind](model.config)
    layers, expected = list(cache.layers), logprobs(kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS))
    for _ in range(2):
        assert logprobs(kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS, cache)) == pytest.approx(expected, abs=1e-4)
    assert [id(layer) for layer in cache.layers] == [id(layer) for layer in layers]
    assert cache.get_seq_length() == 0
    # It still works.
    assert filled(cache).get_seq_length() == 20


def test_a_static_cache_by_name_reserves_the_longest_request(model: Any) -> None:
    contexts = [prompt(tokens=tokens)[0].tolist() for tokens in (5, 30)]
    expected, found = (kvlayers_lab.score(model, contexts, [[[5]] * 2, [[8, 9]]], name) for name in (None, "static"))
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-5)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager", disable=True)


def with_an_adapter(model: Any) -> Any:
    """A new adapter changes nothing."""
    peft = pytest.importorskip("peft", reason="adapters are in PEFT")
    return peft.get_peft_model(fresh_model("llama"), peft.LoraConfig(task_type="CAUSAL_LM")).eval()


@pytest.mark.parametrize("wrap", [compiled, with_an_adapter])
def test_a_model_that_is_wrapped_scores(model: Any, wrap: Callable[[Any], Any]) -> None:
    expected, found = (kvlayers_lab.score(each, CONTEXTS, CONTINUATIONS) for each in (model, wrap(model)))
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-5)


def test_the_bar_appears_after_some_seconds_only(
    model: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(module, "BAR_DELAY", 0.0)
    kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS)
    assert "5/5" in capfd.readouterr().err
    kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS, progress=False)
    assert capfd.readouterr().err == ""


# With a store


def test_caches_with_other_options_share_no_entries() -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore(max_bytes=2**24)
    arguments: dict[str, Any] = {"cache": "quantized", "chunk": 16, "prefix_store": store}
    for bits in (2, 4, 2):
        before = store.statistics.hits
        kvlayers_lab.score(model, [DOCUMENT], [[[5]]], cache_config={"nbits": bits}, **arguments)
    assert (before, store.statistics.hits) == (0, 1)


def test_generate_finds_a_scored_context() -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore(max_bytes=2**24)
    kvlayers_lab.score(model, [DOCUMENT], [[[5, 8]]], prefix_store=store, namespace="one")
    for namespace, covered in (("one", len(DOCUMENT)), ("two", 0)):
        before = store.statistics.tokens_covered
        question = torch.tensor([[*DOCUMENT, 7]])
        kvlayers.generate(model, question, prefix_store=store, namespace=namespace, max_new_tokens=2)
        assert store.statistics.tokens_covered - before == covered


# Texts

MERGES = [(" ", "a"), ("a", "b"), ("ab", "a"), (" a", "b"), ("b", "\n"), ("b", " ")]
"""Merges over letters, spaces and line breaks, so that tokens reach over the boundary in many ways."""

SPECIAL = ["<s>", "</s>"]


@functools.cache
def merging_tokenizer(begins_with: tuple[str, ...] = (), **special: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of pairs of bytes, which puts some special tokens before every text."""
    tokens = [*SPECIAL, "a", "b", "c", " ", "\n", *("".join(merge) for merge in MERGES)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    if begins_with:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begins_with, "$A"], special_tokens=[(token, vocabulary[token]) for token in begins_with]
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


KINDS: dict[str, dict[str, Any]] = {
    "bos": {"bos_token": "<s>", "eos_token": "</s>", "begins_with": ("<s>",)},
    "bos that is not added": {"bos_token": "<s>", "eos_token": "</s>"},
    "eos alone": {"eos_token": "</s>"},
}


@functools.cache
def harness(kind: str) -> Any:
    """The class of lm-evaluation-harness, which returns the requests that it would score."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="scores are compared with lm-eval")
    found = huggingface.HFLM(pretrained=tiny_model("llama"), tokenizer=merging_tokenizer(**KINDS[kind]))
    found._loglikelihood_tokens = lambda requests, **_: [(tuple(ids), tuple(own)) for _, ids, own in requests]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_encoded_as_lm_evaluation_harness_does(kind: str) -> None:
    instance = pytest.importorskip("lm_eval.api.instance", reason="scores are compared with lm-eval").Instance
    pairs, text = TextPairs(merging_tokenizer(**KINDS[kind])), st.text("abc \n", max_size=8) | st.just("<s>ab")

    @given(text, text.filter(bool))
    @example("", "<s>ab")
    @example("ab ", "ab")
    @example("<s>", "a")
    @example(" \n", "a")
    def check(context: str, continuation: str) -> None:
        request = instance("loglikelihood", {}, (context, continuation), 0)
        ((context_ids, ids),) = harness(kind).loglikelihood([request], disable_tqdm=True)
        if not ids:
            with pytest.raises(OptionError, match="a token of its own"):
                pairs.request(context, continuation, "this")
            return
        # The harness fails for blanks alone, if the tokenizer begins with nothing.
        assume(context_ids)
        assert tuple(pairs.request(context, continuation, "this")) == (context_ids, ids)

    check()


def test_a_continuation_that_merges_away_is_an_error() -> None:
    model, tokenizer = tiny_model("llama"), merging_tokenizer(**KINDS["eos alone"])
    with (
        passes_of(model) as passes,
        pytest.raises(OptionError, match=r"`continuations\[0\]\[1\]` must"),
    ):
        kvlayers_lab.score(model, ["ab"], [["c", "a"]], tokenizer=tokenizer)
    assert passes == []


def test_an_empty_context_needs_a_special_token() -> None:
    with pytest.raises(OptionError, match="has neither a BOS nor an EOS token"):
        TextPairs(merging_tokenizer()).request("", "ab", "this")


def test_a_context_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, texts = merging_tokenizer(), []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: texts.append(text) or encode(text, **options))
    encoded(["ab", "ba"], [["c", "cc", "ccc"], ["c", "cc"]], tokenizer)
    assert sorted(texts) == sorted(["ab", "abc", "abcc", "abccc", "ba", "bac", "bacc"])


# Bad input: a named error with the place of what is wrong, before anything is computed

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


def test_more_tokens_than_positions() -> None:
    # The model has 256 positions, and the last token of a continuation is not passed to it.
    model, context = tiny_model("gpt2"), prompt(tokens=254)[0].tolist()
    kvlayers_lab.score(model, [[5], context], [[[7]], [[7], [7, 8, 9]]])
    message = r"`contexts\[1\]` with `continuations\[1\]\[1\]` must be within the 256 positions .* got 254 \+ 4"
    continuations = [[[7]], [[7], [7, 8, 9, 10]]]
    refused(model, CapacityError, message, contexts=[[5], context], continuations=continuations)


def test_a_sink_cache_reads_beyond_the_positions(model: Any) -> None:
    kvlayers_lab.score(model, [prompt(tokens=300)[0].tolist()], [[[5]]], "sink", chunk=50)


def recording(config: Any) -> Any:
    cache = kvlayers.DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


class OneOfItsKind(transformers.DynamicCache):  # type: ignore[misc]
    """A cache that cannot be copied."""

    def __deepcopy__(self, memo: object) -> "OneOfItsKind":
        raise UnsupportedLayerError("this layer holds a handle of a device")


TOO_SMALL = "`cache` must have room for 4 tokens, the longest context"


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (RegistryError, "unknown cache name 'in4': did you mean 'int4'", lambda config: {"cache": "in4"}),
        (CapacityError, TOO_SMALL, lambda config: {"cache": "static", "cache_config": {"max_cache_len": 3}}),
        *(
            (CapacityError, TOO_SMALL, lambda config, made=made: {"cache": made(config, max_cache_len=3)})
            for made in (kvlayers.StaticCache, transformers.StaticCache)
        ),
        *(
            (StateMismatchError, "`cache` must be empty", lambda config, made=made: {"cache": filled(made())})
            for made in (kvlayers.DynamicCache, transformers.DynamicCache)
        ),
        (OptionError, "copy.deepcopy can copy, .* handle of a device", lambda config: {"cache": OneOfItsKind()}),
        (
            ConfigError,
            "2 layers .* got 4",
            lambda config: {"cache": kvlayers.DynamicCache(config=fresh_model("gemma3").config)},
        ),
        (
            ConfigError,
            "layer 0 of the cache",
            lambda config: {"cache": kvlayers.DynamicCache(config=fresh_model("mistral").config)},
        ),
        (
            OptionError,
            "unless `chunk` is given",
            lambda config: {"cache": "int4", "prefix_store": kvlayers.PrefixStore(2**20)},
        ),
    ],
)
def test_caches_that_cannot_score(
    model: Any, error: type[KVLayersError], message: str, changes: Callable[[Any], dict[str, Any]]
) -> None:
    refused(model, error, message, **changes(model.config))


def test_a_cache_that_records_cannot_score() -> None:
    model = tiny_model("mistral")
    refused(model, OptionError, "must not record", cache=recording(model.config))


def test_a_store_needs_a_model_without_hooks() -> None:
    model = fresh_model("llama")
    model.model.layers[0].register_forward_hook(lambda *_: None)
    refused(model, OptionError, "has hooks, on which states may depend", prefix_store=kvlayers.PrefixStore(2**20))


def partly_training() -> Any:
    model = fresh_model("llama")
    model.model.layers[1].train()
    return model


def with_a_learned_prompt() -> Any:
    peft = pytest.importorskip("peft", reason="prompt tuning is in PEFT")
    options = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(fresh_model("llama"), options).eval()


SIZES = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 99}
BERT = transformers.BertConfig(num_hidden_layers=1, intermediate_size=32, **SIZES)
RECURRENT = transformers.RecurrentGemmaConfig(num_hidden_layers=3, intermediate_size=48, lru_width=32, **SIZES)
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "training": (lambda: fresh_model("llama").train(), "must be in evaluation mode.*call model.eval"),
    "partly training": (partly_training, "must be in evaluation mode"),
    "with an encoder": (lambda: fresh_model("t5"), "must be a model without an encoder, got T5"),
    "without a cache": (lambda: transformers.BertForMaskedLM(BERT).eval(), "must take a cache, got BertForMaskedLM"),
    "without logits": (
        lambda: transformers.LlamaModel(tiny_model("llama").config).eval(),
        "must predict next tokens, got LlamaModel",
    ),
    "of other logits": (
        lambda: transformers.LlamaForSequenceClassification(tiny_model("llama").config).eval(),
        "must predict next tokens, got LlamaForSequenceClassification",
    ),
    "with states of its own": (
        lambda: transformers.RecurrentGemmaForCausalLM(RECURRENT).eval(),
        "must keep all of its states in the cache|must take a cache",
    ),
    "with a cache of its own": (lambda: any_model_and_inputs("minimax")[0], "must keep all .*, got MiniMaxForCausalLM"),
    "with a learned prompt": (with_a_learned_prompt, "learned prompt"),
    "a name": (lambda: "llama", "must be a model or its config"),
    "nothing": (lambda: None, "must be a model or its config"),
    "a config": (lambda: tiny_model("llama").config, "`model` must be a model, got its config"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_cannot_be_scored(kind: str) -> None:
    make, message = MODELS[kind]
    model = make()
    for call in (
        lambda: kvlayers_lab.score(model, **GOOD),
        lambda: module.score_tokens(model, [ScoringRequest((5,), (6,))], kvlayers.DynamicCache),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
