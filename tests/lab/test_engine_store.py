"""score_tokens with a prefix store: stored contexts are not computed again, and change no score."""

import functools
from typing import Any

import pytest

import kvlayers
from families import model_and_inputs
from kvlayers.errors import OptionError
from kvlayers.generation.prefix_reuse.active_store import optional_store, required_store
from kvlayers.generation.prefix_reuse.eligibility import StorePart
from kvlayers_lab.evaluation.engine import score_tokens
from kvlayers_lab.evaluation.requests import ScoringRequest
from models import fresh_model, tiny_model
from score_reference import alone, difference, in_chunks, passes_of

OPTIONS = {"q_group_size": 8, "residual_length": 8, "sink_tokens": 2}
DOCUMENT = tuple(range(3, 90))
REQUESTS = [ScoringRequest((*DOCUMENT, 3 + number, 7, 8), (9, token)) for number in range(3) for token in (5, 6)]


def tokens_of(passes: list[tuple[int, int]]) -> int:
    return sum(rows * tokens for rows, tokens in passes)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "dynamic"), ("llama", "static"), ("gemma3", "dynamic"), ("mamba2", "dynamic"), ("jamba", "dynamic")],
)
def test_stored_contexts_are_not_computed_again(family: str, name: str) -> None:
    model: Any = model_and_inputs(family)[0] if family == "mamba2" else tiny_model(family)
    store = kvlayers.PrefixStore("1GiB")
    contexts = StorePart.if_usable(model, optional_store(store, ""), name, {})
    make = functools.partial(kvlayers.make_cache, name, model, length_hint=128)
    found = []
    computed = []
    for _ in range(2):
        with passes_of(model) as passes:
            found.append(score_tokens(model, REQUESTS, make, store=contexts))
        computed.append(tokens_of(passes))
    expected = [alone(model, request) for request in REQUESTS]
    assert difference(found[0], expected) < 1e-4
    assert difference(found[1], expected) < 1e-4
    assert computed[0] >= len(DOCUMENT)
    # The last token of each context, and the one token that each pair of continuations has in common.
    assert computed[1] <= 3 * 3 + 3
    assert store.statistics.bypassed == 0


def test_entries_of_lossy_caches_serve_the_same_chunks_alone() -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore("1GiB")
    make = functools.partial(kvlayers.make_cache, "int2", model, **OPTIONS)
    contexts = StorePart.if_usable(model, optional_store(store, ""), "int2", OPTIONS)
    expected = [in_chunks(model, request, make(), 8, 8) for request in REQUESTS]
    longer = [ScoringRequest((*context, *range(20, 40)), continuation) for context, continuation in REQUESTS]
    # The entries of these are longer, and must not be rolled back for others.
    score_tokens(model, longer, make, store=contexts, chunk=8)
    computed = []
    for _ in range(2):
        with passes_of(model) as passes:
            assert difference(score_tokens(model, REQUESTS, make, store=contexts, chunk=8), expected) < 1e-4
        computed.append(tokens_of(passes))
    # All contexts share ten chunks, and each goes on with ten tokens of its own: one chunk, and two tokens more.
    assert computed == [3 * 10 + 3, 3 * 2 + 3]
    with passes_of(model) as passes:
        score_tokens(model, REQUESTS, make, store=contexts, chunk=16)
    assert tokens_of(passes) > len(DOCUMENT)
    assert store.statistics.bypassed == 0


def test_a_lossy_cache_without_chunks_bypasses_the_store() -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore("1GiB")
    make = functools.partial(kvlayers.make_cache, "int2", model, **OPTIONS)
    contexts = StorePart.if_usable(model, optional_store(store, ""), "int2", OPTIONS)
    score_tokens(model, REQUESTS, make, store=contexts)
    assert store.statistics.bypassed == 1
    strict = StorePart.if_usable(model, required_store(store, ""), "int2", OPTIONS)
    with passes_of(model) as passes, pytest.raises(OptionError, match="unless `chunk` is given"):
        score_tokens(model, REQUESTS, make, store=strict)
    assert passes == []


def test_a_model_whose_states_depend_on_more_than_tokens_bypasses_the_store() -> None:
    model, store = fresh_model("llama").train(), kvlayers.PrefixStore("1GiB")
    model.model.layers[0].self_attn.attention_dropout = 0.1
    assert StorePart.if_usable(model, optional_store(store, ""), "dynamic", {}) is None
    assert store.statistics.bypassed == 1
    with pytest.raises(OptionError, match="training mode"):
        StorePart.if_usable(model, required_store(store, ""), "dynamic", {})
    assert StorePart.if_usable(model, None, "dynamic", {}) is None


def test_scores_are_computed_even_if_the_store_has_no_room() -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore(1000)
    contexts = StorePart.if_usable(model, optional_store(store, ""), "dynamic", {})
    found = score_tokens(model, REQUESTS, lambda: kvlayers.make_cache("dynamic", model), store=contexts)
    assert difference(found, [alone(model, request) for request in REQUESTS]) < 1e-5
    assert store.statistics.refused > 0
