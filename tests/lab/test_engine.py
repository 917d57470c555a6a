"""score_tokens gives the scores of each request alone, and computes what requests share once."""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers

import kvlayers
import versions
from families import model_of
from kvlayers.errors import CapacityError
from kvlayers.generation.prefix_reuse.active_store import required_store
from kvlayers.generation.prefix_reuse.eligibility import StorePart
from kvlayers_lab.evaluation import caches, passes
from kvlayers_lab.evaluation.engine import score_tokens
from kvlayers_lab.evaluation.requests import ScoringRequest
from matrix import once
from models import fresh_model, passes_of, tiny_model, tokens_passed
from score_reference import alone, difference, in_chunks

EXACT = 1e-5
"""Rounding of float32, in sums of a few tens of terms."""
RECURRENT = 1e-3
"""How far a scan over all tokens and a scan behind a state are apart in these models (bamba), whatever the cache."""
ROUNDED = 1e-4
"""The same, where a rounded state may have gone into the next sum."""
LONG = 84
"""Tokens of contexts of which quantized caches pack a block, which has 64 tokens."""


def requests_of(seed: int = 0, contexts: int = 5, longest: int = 70) -> list[ScoringRequest]:
    """Contexts that share prefixes of several lengths, some of which continue others, and several continuations."""
    random_ids = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(random_ids.randrange(3, 97) for _ in range(count))

    text, found = ids(longest), []
    for number in range(contexts):
        context = text[: (longest, 12, 40)[number % 3]] + ids((0, 3, 9)[number // 3 % 3])
        found += [ScoringRequest(context, ids(count)) for count in (1, 1, 6, 9)]
    tail = ScoringRequest(text[:12], text[12:20])
    return [*found, tail, found[3], ScoringRequest(ids(1), ids(30))]


def dynamic(model: Any) -> Any:
    return kvlayers.make_cache("dynamic", model)


def int2(model: Any) -> Any:
    return kvlayers.QuantizedCache(config=model.config, nbits=2, **SHORT)


def of_transformers(backend: str, model: Any, **options: Any) -> Any:
    pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend])
    return transformers.QuantizedCache(backend, model.config, 4, q_group_size=8, residual_length=8, **options)


EXACT_CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": dynamic,
    "static": lambda model: kvlayers.make_cache("static", model, length_hint=128),
    "offloaded": lambda model: kvlayers.make_cache("offloaded", model),
    "transformers' dynamic": lambda model: transformers.DynamicCache(config=model.config),
    "transformers' dynamic without a config": lambda model: transformers.DynamicCache(),
    "transformers' static": lambda model: transformers.StaticCache(model.config, max_cache_len=128),
}
SHORT = {"q_group_size": 8, "residual_length": 8, "sink_tokens": 2}
LOSSY_CACHES: dict[str, Callable[[Any], Any]] = {
    "int2": int2,
    "fp8": lambda model: kvlayers.QuantizedCache("fp8", config=model.config, residual_length=8, sink_tokens=2),
    "int4, offloaded": lambda model: kvlayers.QuantizedCache(config=model.config, nbits=4, offloading=True, **SHORT),
    "sink": lambda model: kvlayers.SinkCache(window_length=24, num_sink_tokens=2, config=model.config),
    "transformers' fp8": lambda model: transformers.QuantizedCache("fp8", model.config),
    "quanto": lambda model: of_transformers("quanto", model, axis_key=0, axis_value=0),
    "hqq": lambda model: of_transformers("hqq", model, axis_key=1, axis_value=1),
}


def scores_alone(model: Any, requests: Sequence[ScoringRequest]) -> Any:
    return [alone(model, request) for request in requests]


@functools.cache
def known_scores(family: str, **which: int) -> Any:
    """What `scores_alone` gives for `requests_of(**which)`."""
    return scores_alone(model_of(family), requests_of(**which))


FAMILIES_OF_SCORES = (
    "llama", "mistral", "gemma3", "gpt2", "llama4", "mamba", "jamba", "mamba2", "bamba", "qwen3_next", "bloom", "opt",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name", "pass_cost", "chunk"),
    [
        *once([(family, "dynamic") for family in FAMILIES_OF_SCORES], [(1, 3), (32, None)]),
        # Even the shortest shared prefixes are read once.
        *((family, name, 1, None) for family in ("llama", "gemma3") for name in EXACT_CACHES),
    ],
)
def test_an_exact_cache_gives_the_scores_of_one_pass_over_each_request(
    family: str, name: str, pass_cost: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "PASS_COST_ON_CPU", pass_cost)
    model, requests = model_of(family), requests_of()
    found = score_tokens(model, requests, lambda: EXACT_CACHES[name](model), batch_size=4, chunk=chunk)
    expected = known_scores(family)
    assert difference(found, expected) < (RECURRENT if family in versions.RECURRENT_FAMILIES else EXACT)
    assert [score.token_is_greedy for score in found] == [score.token_is_greedy for score in expected]


@pytest.mark.parametrize(
    ("family", "name", "chunk"),
    [
        *once([("llama", name) for name in LOSSY_CACHES], [None, 16]),
        *((family, "int2", chunk) for family in ("gemma3", "gpt2", "qwen3_next") for chunk in (None, 16)),
        # A model that cannot scan tokens behind others reads them one by one.
        ("jamba", "int2", None),
    ],
)
def test_a_lossy_cache_takes_part_in_every_score(family: str, name: str, chunk: int | None) -> None:
    if name == "transformers' fp8":
        versions.need_since("5.23", "transformers' fp8 cache")
    model, make, requests = model_of(family), LOSSY_CACHES[name], requests_of(contexts=2, longest=LONG)
    found = score_tokens(model, requests, lambda: make(model), batch_size=3, chunk=chunk)
    expected = [in_chunks(model, each, make(model), chunk or len(each.context), chunk or 1) for each in requests]
    assert difference(found, expected) < ROUNDED
    if family == "llama":
        assert difference(found, known_scores("llama", contexts=2, longest=LONG)) > 10 * ROUNDED


DOCUMENT = tuple(range(3, 93))
PAIR_OF_CONTEXTS = [ScoringRequest((*range(3, 33), token), (8, 9)) for token in (40, 41)] * 2
ENDINGS = [ScoringRequest((5, 6, 7), continuation) for continuation in ((8, 9), (8, 10, 11), (9, 10, 11))]
PASSES: dict[str, tuple[list[ScoringRequest], Callable[[Any], Any], dict[str, int], list[tuple[int, int]]]] = {
    # Eight requests read the same three tokens, and three read one token, padded to three.
    "a context is computed once": (
        [ScoringRequest(DOCUMENT, (5, 6, 7, token)) for token in range(3, 11)]
        + [ScoringRequest(DOCUMENT, (40 + token, 6)) for token in range(3)],
        dynamic,
        {},
        [(1, 90), (4, 3)],
    ),
    "tokens that are predicted from a context take no pass of their own": (
        [ScoringRequest(DOCUMENT, (token,)) for token in range(3, 11)],
        dynamic,
        {},
        [(1, 90)],
    ),
    "questions about one document are read behind it": (
        [ScoringRequest((*DOCUMENT, 5 + number, 6, 7), (8, 9)) for number in range(6)],
        dynamic,
        {"batch_size": 4},
        [(1, 90), (4, 4), (2, 4)],
    ),
    "contexts that share too little are read together": (
        [ScoringRequest((3, 4, 5 + number), (8, 9)) for number in range(6)],
        dynamic,
        {},
        [(6, 4)],
    ),
    "a lossy cache shares identical contexts": (PAIR_OF_CONTEXTS, int2, {}, [(1, 31), (1, 1)] * 2),
    "a lossy cache shares whole chunks": (
        PAIR_OF_CONTEXTS,
        int2,
        {"chunk": 8},
        [*[(1, 8)] * 3, *[(1, 7), (1, 1)] * 2],
    ),
    "rows of a lossy cache are padded behind single tokens": (ENDINGS, int2, {}, [(1, 3), (3, 1), (3, 1)]),
    "rows of a lossy cache are not padded within chunks": (ENDINGS, int2, {"chunk": 4}, [(1, 3), (2, 2), (1, 1)]),
    "a lossy cache reads one by one what jamba cannot scan behind others": (
        requests_of(contexts=2, longest=LONG)[:1],
        int2,
        {"chunk": 80},
        [(1, 80), *[(1, 1)] * (LONG - 80)],
    ),
}
"""The requests, the cache, further options, and rows and tokens of each forward pass."""


@pytest.mark.parametrize("what", PASSES)
def test_what_requests_share_is_computed_once(what: str) -> None:
    requests, cache, options, expected = PASSES[what]
    model = tiny_model("jamba" if "jamba" in what else "llama")
    with passes_of(model) as passes:
        score_tokens(model, requests, functools.partial(cache, model), **options)
    assert passes == expected


def test_contexts_that_continue_one_another_do_not_recurse() -> None:
    model, text = tiny_model("llama"), tuple(range(3, 97)) * 2
    requests = [ScoringRequest(text[:length], (5,)) for length in range(1, 180)]
    with tokens_passed(model) as passes:
        found = score_tokens(model, requests, lambda: dynamic(model))
    # Alone they are 16,110 tokens. Every few contexts, a prefix is worth a pass.
    assert sum(passes) < 5000
    assert difference(found[-20:], scores_alone(model, requests[-20:])) < EXACT


def test_logits_of_long_continuations_are_computed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlayers_lab.evaluation.engine.LOGITS_AT_ONCE", 97 * 20)
    model, requests = tiny_model("llama"), requests_of()
    with passes_of(model) as passes:
        found = score_tokens(model, requests, lambda: dynamic(model))
    assert difference(found, scores_alone(model, requests)) < EXACT
    assert (1, 20) in passes
    assert max(rows for rows, _ in passes) < 5


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_models_whose_rotation_depends_on_the_length_read_each_request_by_itself(scaling: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4} if scaling == "longrope" else {}
    parameters = {"rope_type": scaling, "factor": 4.0, "rope_theta": 10000.0, **factors}
    if versions.compat.ROPE_HAS_ONE_DICT:
        rope = {"rope_parameters": {**parameters, "original_max_position_embeddings": 32}}
    else:
        rope = {"rope_scaling": parameters, "original_max_position_embeddings": 32}
    model, requests = fresh_model("llama", **rope), requests_of()
    found = score_tokens(model, requests, lambda: dynamic(model))
    assert difference(found, scores_alone(model, requests)) < EXACT


def test_half_precision_is_normalized_in_float32() -> None:
    model, requests = fresh_model("llama").bfloat16(), requests_of()
    found = score_tokens(model, requests, lambda: dynamic(model), batch_size=1)
    assert difference(found, scores_alone(model, requests)) < 0.5
    probability = sum(
        torch.tensor(score.token_logprobs[0]).exp()
        for score in score_tokens(
            model,
            [ScoringRequest((5, 6, 7), (token,)) for token in range(97)],
            lambda: dynamic(model),
        )
    )
    assert abs(float(probability) - 1) < 1e-5


def test_a_request_of_more_tokens_than_positions_is_refused_before_anything_is_computed() -> None:
    model, requests = tiny_model("llama"), [ScoringRequest((5, 6), (7,)), ScoringRequest((5,) * 250, (6,) * 8)]
    message = r"`requests\[1\]` must have 257 tokens at most.*got 258"
    with passes_of(model) as passes, pytest.raises(CapacityError, match=message):
        score_tokens(model, requests, functools.partial(dynamic, model))
    assert passes == []


def test_classes_of_other_packages_are_not_taken_for_exact() -> None:
    class OtherLayer(transformers.cache_utils.DynamicLayer):
        pass

    class OtherCache(transformers.DynamicCache):
        pass

    model, requests = tiny_model("llama"), requests_of(contexts=2)
    other = transformers.DynamicCache(config=model.config)
    other.layers = [OtherLayer() for _ in other.layers]
    for make in (lambda: caches.fork(other), lambda: OtherCache(config=model.config)):
        with passes_of(model) as passes:
            found = score_tokens(model, requests, make)
        assert difference(found, scores_alone(model, requests)) < EXACT
        assert max(rows for rows, _ in passes) == 1


# With a store

STORED = [ScoringRequest((*DOCUMENT[:87], 3 + number, 7, 8), (9, token)) for number in range(3) for token in (5, 6)]


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "dynamic"), ("llama", "static"), ("gemma3", "dynamic"), ("mamba2", "dynamic"), ("jamba", "dynamic")],
)
def test_stored_contexts_are_not_computed_again(family: str, name: str) -> None:
    model, store = model_of(family), kvlayers.PrefixStore("1GiB")
    contexts = StorePart.if_usable(model, required_store(store, ""), name, {})
    make = functools.partial(kvlayers.make_cache, name, model, length_hint=128)
    expected, computed = scores_alone(model, STORED), []
    for _ in range(2):
        with tokens_passed(model) as passes:
            assert difference(score_tokens(model, STORED, make, store=contexts), expected) < 1e-4
        computed.append(sum(passes))
    assert computed[0] >= 87
    # The last token of each context, and the one token that each pair of continuations has in common.
    assert computed[1] <= 3 * 3 + 3


def test_entries_of_lossy_caches_serve_the_same_chunks_alone() -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore("1GiB")
    make = functools.partial(kvlayers.make_cache, "int2", model, **SHORT)
    contexts = StorePart.if_usable(model, required_store(store, ""), "int2", SHORT)
    expected = [in_chunks(model, request, make(), 8, 8) for request in STORED]
    longer = [ScoringRequest((*context, *range(20, 40)), continuation) for context, continuation in STORED]
    # The entries of these are longer, and must not be rolled back for others.
    score_tokens(model, longer, make, store=contexts, chunk=8)
    computed = []
    for _ in range(2):
        with tokens_passed(model) as passes:
            assert difference(score_tokens(model, STORED, make, store=contexts, chunk=8), expected) < 1e-4
        computed.append(sum(passes))
    # All contexts share ten chunks, and each goes on with ten tokens of its own: one chunk, and two tokens more.
    assert computed == [3 * 10 + 3, 3 * 2 + 3]
    with tokens_passed(model) as passes:
        score_tokens(model, STORED, make, store=contexts, chunk=16)
    assert sum(passes) > 87
