"""`kvlayers_lab.score`: what it returns, and what it leaves as it was."""

from typing import Any

import pytest
import torch
import transformers

import kvlayers
import kvlayers_lab
from kvlayers_lab.evaluation import engine as module
from kvlayers_lab.evaluation.requests import ContinuationScore, ScoringRequest
from model_directories import random_text, word_tokenizer
from models import fresh_model, prompt, tiny_model
from score_reference import alone, passes_of

CONTEXTS = [prompt(tokens=20, seed=seed)[0].tolist() for seed in range(3)]
DOCUMENTS = [prompt(tokens=64, seed=seed)[0].tolist() for seed in range(3)]
CONTINUATIONS = [[[5, 8, 13], [21]], [], [[34, 55], [34, 56, 7, 8], [90]]]


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


def logprobs(scores: list[list[ContinuationScore]]) -> list[float]:
    return [score.logprob for group in scores for score in group]


def test_scores_are_those_of_each_pair_alone(model: Any) -> None:
    scores = kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS)
    assert [len(group) for group in scores] == [2, 0, 3]
    for context, group, found in zip(CONTEXTS, CONTINUATIONS, scores, strict=True):
        for continuation, score in zip(group, found, strict=True):
            reference = alone(model, ScoringRequest(tuple(context), tuple(continuation)))
            expected = reference.token_logprobs
            assert score.token_logprobs == pytest.approx(expected, abs=1e-5)
            assert score.logprob == pytest.approx(sum(expected), abs=1e-5)
            assert score.mean_logprob == pytest.approx(sum(expected) / len(expected), abs=1e-5)
            assert score.token_is_greedy == reference.token_is_greedy


def test_nothing_to_score(model: Any) -> None:
    assert kvlayers_lab.score(model, [], []) == []
    assert kvlayers_lab.score(model, [CONTEXTS[0]], [[]]) == [[]]


def test_texts_score_as_their_ids(model: Any) -> None:
    tokenizer = word_tokenizer()
    text, continuations = random_text(12), [" the sea", " a"]
    scores = kvlayers_lab.score(model, [text], [continuations], tokenizer=tokenizer)
    ids = [tokenizer.encode(continuation) for continuation in continuations]
    expected = kvlayers_lab.score(model, [tokenizer.encode(text)], [ids])
    assert scores == expected


def test_ids_may_be_tensors_and_tuples(model: Any) -> None:
    context, continuation = CONTEXTS[0], CONTINUATIONS[0][0]
    expected = kvlayers_lab.score(model, [context], [[continuation]])
    assert (
        kvlayers_lab.score(model, [torch.tensor(context)], [[torch.tensor(continuation, dtype=torch.int32)]])
        == expected
    )
    assert kvlayers_lab.score(model, (tuple(context),), ((tuple(continuation),),)) == expected


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_name_and_an_instance_give_the_same_scores(model: Any, chunk: int | None) -> None:
    long, options = [prompt(tokens=100)[0].tolist()], {"nbits": 2, "residual_length": 16}
    by_name = kvlayers_lab.score(model, long, [[[5, 8, 13]]], "quantized", cache_config=options, chunk=chunk)
    cache = kvlayers.QuantizedCache(config=model.config, **options)
    by_instance = kvlayers_lab.score(model, long, [[[5, 8, 13]]], cache, chunk=chunk)
    assert by_name == by_instance
    assert logprobs(by_name) != pytest.approx(logprobs(kvlayers_lab.score(model, long, [[[5, 8, 13]]])), abs=1e-4)
    assert cache.get_seq_length() == 0


INSTANCES = {
    "kvlayers dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "kvlayers without a config": lambda config: kvlayers.DynamicCache(),
    "kvlayers static": lambda config: kvlayers.StaticCache(config, max_cache_len=64),
    "kvlayers sink": lambda config: kvlayers.SinkCache(window_length=64, config=config),
    "transformers dynamic": lambda config: transformers.DynamicCache(config=config),
    "transformers without a config": lambda config: transformers.DynamicCache(),
    "transformers static": lambda config: transformers.StaticCache(config, max_cache_len=64),
}


@pytest.mark.parametrize("kind", INSTANCES)
def test_an_instance_is_never_changed(model: Any, kind: str) -> None:
    cache = INSTANCES[kind](model.config)
    layers = list(cache.layers)
    expected = logprobs(kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS))
    for _ in range(2):
        assert logprobs(kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS, cache)) == pytest.approx(expected, abs=1e-4)
    assert [id(layer) for layer in cache.layers] == [id(layer) for layer in layers]
    assert cache.get_seq_length() == 0
    # It still works.
    with torch.no_grad():
        model(torch.tensor([CONTEXTS[0]]), past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_a_used_cache_can_score_after_its_reset(model: Any) -> None:
    cache = kvlayers.StaticCache(model.config, max_cache_len=64)
    with torch.no_grad():
        model(torch.tensor([CONTEXTS[0]]), past_key_values=cache)
    cache.reset()
    expected = logprobs(kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS))
    assert logprobs(kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS, cache)) == pytest.approx(expected, abs=1e-4)


def test_a_static_cache_by_name_reserves_the_longest_request(model: Any) -> None:
    contexts = [prompt(tokens=tokens)[0].tolist() for tokens in (5, 30)]
    scores = kvlayers_lab.score(model, contexts, [[[5]] * 2, [[8, 9]]], "static")
    assert logprobs(scores) == pytest.approx(
        logprobs(kvlayers_lab.score(model, contexts, [[[5]] * 2, [[8, 9]]])), abs=1e-5
    )


def test_a_compiled_model_scores(model: Any) -> None:
    wrapped = torch.compile(model, backend="eager", disable=True)
    assert kvlayers_lab.score(wrapped, CONTEXTS, CONTINUATIONS) == kvlayers_lab.score(model, CONTEXTS, CONTINUATIONS)


def test_a_model_with_an_adapter_scores() -> None:
    peft = pytest.importorskip("peft", reason="adapters are in PEFT")
    expected = kvlayers_lab.score(fresh_model("llama"), CONTEXTS, CONTINUATIONS)
    adapted = peft.get_peft_model(fresh_model("llama"), peft.LoraConfig(task_type="CAUSAL_LM")).eval()
    # A new adapter changes nothing.
    assert logprobs(kvlayers_lab.score(adapted, CONTEXTS, CONTINUATIONS)) == pytest.approx(logprobs(expected), abs=1e-5)


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


def test_caches_with_other_options_share_no_entries() -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore(max_bytes=2**24)
    arguments: dict[str, Any] = {"cache": "quantized", "chunk": 16, "prefix_store": store}
    for bits in (2, 4, 2):
        before = store.statistics.hits
        kvlayers_lab.score(model, DOCUMENTS[:1], [[[5]]], cache_config={"nbits": bits}, **arguments)
    assert (before, store.statistics.hits) == (0, 1)


def test_generate_finds_a_scored_context() -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore(max_bytes=2**24)
    kvlayers_lab.score(model, DOCUMENTS[:1], [[[5, 8]]], prefix_store=store, namespace="one")
    question = torch.tensor([[*DOCUMENTS[0], 7]])
    for namespace, covered in (("one", len(DOCUMENTS[0])), ("two", 0)):
        before = store.statistics.tokens_covered
        kvlayers.generate(model, question, prefix_store=store, namespace=namespace, max_new_tokens=2)
        assert store.statistics.tokens_covered - before == covered


def test_a_document_that_generate_has_read_is_not_computed_again() -> None:
    model = fresh_model("llama")
    store = kvlayers.PrefixStore(max_bytes=2**24)
    document = prompt(tokens=100)
    kvlayers.generate(model, document, prefix_store=store, max_new_tokens=2)
    with passes_of(model) as passes:
        kvlayers_lab.score(model, [[*document[0].tolist(), 7]], [[[5], [8]]], prefix_store=store)
    assert sum(rows * tokens for rows, tokens in passes) <= 8
