"""Contexts put together from parts: each result is compared with the same tokens computed at once."""

from typing import Any

import pytest
import torch
import transformers

import kvlayers
import versions
from kvlayers.errors import (
    CapacityError,
    ConfigError,
    KVLayersError,
    OptionError,
    RollbackError,
    StateMismatchError,
    UnsupportedLayerError,
)
from models import fresh_model, prompt, read, tiny_model, tokens_passed
from vision_models import any_seeing_model

DOCUMENTS = [prompt(1, tokens, tokens) for tokens in (9, 14, 11)]
WHOLE = torch.cat(DOCUMENTS, dim=1)
QUESTION = prompt(1, 4, 99)
NO_TOKENS = torch.empty(1, 0, dtype=torch.int64)
FAMILIES = ("llama", "qwen2", "mistral", "gemma3")
EXACT = {"rtol": 0, "atol": 1e-4}
"""The bound of what is exact in float32: keys that are rotated twice and sums in another order are off by rounding."""


def caches_of(model: Any, documents: Any = DOCUMENTS) -> list[Any]:
    return [read(model, ids)[0] for ids in documents]


def continued(model: Any, cache: Any, ids: torch.Tensor = QUESTION) -> torch.Tensor:
    """Logits of a question behind a cache, and of three greedy tokens."""
    found = []
    for _ in range(4):
        cache, logits = read(model, ids, cache)
        found.append(logits)
        ids = logits[:, -1:].argmax(-1)
    return torch.cat(found, dim=1)


def states(cache: Any) -> torch.Tensor:
    """A copy of all keys and values."""
    return torch.stack([torch.cat([layer.keys, layer.values]) for layer in cache.layers])


def scaled(kind: str) -> Any:
    """A model whose rotation is not the usual one."""
    if kind == "partial":
        versions.need_since("5.6", "StableLM with a cache")
        torch.manual_seed(0)
        config = transformers.StableLmConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            partial_rotary_factor=0.25,
        )
        return transformers.StableLmForCausalLM(config).eval()
    scaling = {"original_max_position_embeddings": 512} if kind == "yarn" else {}
    return fresh_model("llama", **versions.rope(rope_type=kind, factor=4.0, rope_theta=10000.0, **scaling))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3", "partial", "yarn", "linear"])
@pytest.mark.parametrize("to", [0, 40, 1000])
def test_moved_states_are_those_that_are_computed_there(kind: str, to: int) -> None:
    model, ids = fresh_model(kind) if kind in FAMILIES else scaled(kind), DOCUMENTS[1]
    model.config.max_position_embeddings = 2048
    expected, _ = read(model, ids, position_ids=torch.arange(to, to + ids.shape[1])[None])
    cache, _ = read(model, ids)
    before = states(cache)
    found = kvlayers.moved(cache, to, model)
    torch.testing.assert_close(states(found), states(expected), **EXACT)
    assert not to or ((states(found) - before).abs().amax((1, 2, 3, 4)) > 0.01).all()
    # The other one does not change, and the moved one goes on.
    assert torch.equal(states(cache), before)
    positions = torch.arange(to + ids.shape[1], to + ids.shape[1] + 4)[None]
    logits = [read(model, QUESTION, each, position_ids=positions)[1] for each in (found, expected)]
    torch.testing.assert_close(*logits, **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_documents_that_are_recomputed_are_the_whole_text(family: str, how: str) -> None:
    model = fresh_model(family)
    model.set_attn_implementation(how)
    expected = continued(model, read(model, WHOLE)[0])
    documents = caches_of(model)
    for recompute in ("100%", 14):
        joined = kvlayers.concatenate(documents, model, recompute=recompute, ids=DOCUMENTS)
        torch.testing.assert_close(continued(model, joined), expected, **EXACT)
    difference = continued(model, kvlayers.concatenate(documents, model, recompute=0)) - expected
    assert difference.abs().max() > 0.01
    # The documents are as they were.
    again, first = (continued(model, own[1], WHOLE[:, :3]) for own in (documents, caches_of(model)))
    torch.testing.assert_close(again, first, **EXACT)


def test_those_that_change_most_are_recomputed_and_only_those() -> None:
    model, documents = tiny_model("llama"), caches_of(tiny_model("llama"))
    whole = read(model, WHOLE)[0].layers[1]
    plain = kvlayers.concatenate(documents, model, recompute=0).layers[1]
    mixed = kvlayers.concatenate(documents, model, recompute="40%", ids=DOCUMENTS).layers[1]
    # The first layer sees what it would see in the whole text, so the second one's new states are right.
    is_right = ((mixed.values - whole.values).abs().amax((0, 1, 3)) < 1e-5)[9:]
    is_old = (mixed.values == plain.values).all(3).all(1).all(0)[9:]
    assert (int(is_right.sum()), is_right.tolist()) == (10, (~is_old).tolist())

    def change(own: Any) -> torch.Tensor:
        sides = ((whole.keys, own.keys), (whole.values, own.values))
        return sum(((new - old).square().sum((0, 1, 3)) / old.square().sum((0, 1, 3)).mean())[9:] for new, old in sides)

    assert change(plain)[is_right].min() >= change(plain)[is_old].max() - 1e-6


def test_a_slow_reference_computes_the_chosen_tokens_one_by_one() -> None:
    model, documents = tiny_model("llama"), caches_of(tiny_model("llama"))
    joined = kvlayers.concatenate(documents, model, recompute=3, ids=DOCUMENTS)
    expected = states(kvlayers.concatenate(documents, model, recompute=0))
    for position in (*range(9, 12), *range(23, 26)):
        seen = kvlayers.DynamicCache()
        for index, layer in enumerate(expected[..., :position, :]):
            seen.update(*layer.split(1), index)
        read(model, WHOLE[:, position : position + 1], seen)
        expected[..., position, :] = states(seen)[..., -1, :]
    torch.testing.assert_close(states(joined), expected, **EXACT)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_are_those_of_caches_that_keep_all(family: str) -> None:
    model = tiny_model(family)
    documents = [prompt(1, tokens, tokens) for tokens in (30, 4, 3)]
    windows = [read(model, ids, kvlayers.DynamicCache(config=model.config))[0] for ids in documents]
    joined = kvlayers.concatenate(windows, model, recompute=0)
    assert [type(layer) for layer in joined.layers] == [type(layer) for layer in windows[0].layers]
    expected = continued(model, kvlayers.concatenate(caches_of(model, documents), model, recompute=0))
    torch.testing.assert_close(continued(model, joined), expected, **EXACT)


@pytest.mark.parametrize("name", ["int8", "static", "offloaded", "fp8"])
def test_other_caches_keep_their_kind(name: str) -> None:
    model = tiny_model("llama")

    def empty() -> Any:
        return kvlayers.make_cache(name, model, length_hint=80)

    documents = [read(model, ids, empty())[0] for ids in DOCUMENTS]
    joined = kvlayers.concatenate(documents, model, recompute="100%", ids=DOCUMENTS)
    assert joined.layers[0].kind == documents[0].layers[0].kind
    expected = continued(model, read(model, WHOLE, empty())[0])
    # The codes of the first document are rounded twice, each time by 0.4 % (int8) or 6 % (fp8) of a key at most.
    bound = {**EXACT, "atol": 0.1} if name in ("int8", "fp8") else EXACT
    torch.testing.assert_close(continued(model, joined), expected, **bound)


def test_a_batch_of_documents() -> None:
    model = tiny_model("llama")
    batch = [torch.cat([own, own.flip(1)]) for own in DOCUMENTS]
    assert kvlayers.concatenate(caches_of(model, batch), model, recompute="50%", ids=batch).batch_size == 2
    whole = kvlayers.concatenate(caches_of(model, batch), model, recompute="100%", ids=batch)
    expected, _ = read(model, torch.cat(batch, dim=1))
    torch.testing.assert_close(whole.layers[1].values, expected.layers[1].values, **EXACT)


@pytest.mark.parametrize(
    ("start", "stop", "new"), [(5, 9, 7), (5, 9, 0), (5, 5, 3), (0, 9, 4), (20, 34, 2), (0, 34, 3), (0, 34, 0)]
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_another_middle_is_that_of_the_whole_text(family: str, start: int, stop: int, new: int) -> None:
    model, ids = tiny_model(family), prompt(1, new, 7) if new else NO_TOKENS
    cache, _ = read(model, WHOLE)
    cache.known_ids = WHOLE
    kvlayers.replace_tokens(cache, start, stop, ids, model)
    whole = torch.cat([WHOLE[:, :start], ids, WHOLE[:, stop:]], dim=1)
    assert cache.get_seq_length() == whole.shape[1]
    assert new + start == 0 or torch.equal(cache.known_ids, whole)
    expected = read(model, whole)[0] if whole.numel() else kvlayers.DynamicCache()
    torch.testing.assert_close(continued(model, cache), continued(model, expected), **EXACT)


def test_without_recomputing_only_keys_behind_the_middle_turn() -> None:
    model = tiny_model("llama")
    cache, _ = read(model, WHOLE)
    other = cache.fork()
    kvlayers.replace_tokens(other, 5, 9, prompt(1, 7, 7), model, recompute=0)
    for own, old in zip(other.layers, cache.layers, strict=True):
        assert torch.equal(own.values[:, :, 12:], old.values[:, :, 9:])
        torch.testing.assert_close(own.keys[:, :, 12:].norm(dim=-1), old.keys[:, :, 9:].norm(dim=-1))
        assert not torch.equal(own.keys[:, :, 12:], old.keys[:, :, 9:])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda model, caches: kvlayers.concatenate([], model), OptionError),
        (lambda model, caches: kvlayers.concatenate([1], model), OptionError),
        (lambda model, caches: kvlayers.concatenate([kvlayers.DynamicCache()], model), StateMismatchError),
        (lambda model, caches: kvlayers.concatenate([caches[0], kvlayers.DynamicCache()], model), StateMismatchError),
        (
            lambda model, caches: kvlayers.concatenate([caches[0], caches_of(fresh_model("gemma3"))[0]], model),
            StateMismatchError,
        ),
        (lambda model, caches: kvlayers.concatenate(caches, model), OptionError),
        (lambda model, caches: kvlayers.concatenate(caches, model, recompute=-1), OptionError),
        (lambda model, caches: kvlayers.concatenate(caches, model, recompute=0.15), OptionError),
        (lambda model, caches: kvlayers.concatenate(caches, model, recompute="150%"), OptionError),
        (lambda model, caches: kvlayers.concatenate(caches, model, recompute="15%"), OptionError),
        (lambda model, caches: kvlayers.concatenate(caches, model, recompute=1, ids=DOCUMENTS[:2]), OptionError),
        (
            lambda model, caches: kvlayers.concatenate(caches, model, recompute=1, ids=DOCUMENTS[::-1]),
            StateMismatchError,
        ),
        (lambda model, caches: kvlayers.concatenate(caches, model, beginning_tokens=9, recompute=0), OptionError),
        (lambda model, caches: kvlayers.concatenate(caches * 200, model, recompute=0), CapacityError),
        (lambda model, caches: kvlayers.moved(caches[0], -1, model), OptionError),
        (lambda model, caches: kvlayers.moved(caches[0], 10**6, model), CapacityError),
        (lambda model, caches: kvlayers.replace_tokens(caches[0], 5, 3, DOCUMENTS[0], model), OptionError),
        (lambda model, caches: kvlayers.replace_tokens(caches[0], 0, 10, DOCUMENTS[0], model), OptionError),
        (lambda model, caches: kvlayers.replace_tokens(caches[0], 0, 1, DOCUMENTS[0] > 9, model), OptionError),
        (lambda model, caches: kvlayers.replace_tokens(caches[0], 0, 1, DOCUMENTS[0].to("meta"), model), OptionError),
        (lambda model, caches: kvlayers.replace_tokens(caches[0], 0, 1, DOCUMENTS[0].to_sparse(), model), OptionError),
        (lambda model, caches: kvlayers.replace_tokens(caches[0], 0, 3, torch.zeros(1, 2), model), OptionError),
        (lambda model, caches: kvlayers.moved(kvlayers.merge(caches), 5, model), UnsupportedLayerError),
    ],
)
def test_what_cannot_be_put_together_is_named_and_nothing_changes(call: Any, error: type[KVLayersError]) -> None:
    model = tiny_model("llama")
    caches = caches_of(model)
    before = states(caches[0])
    with pytest.raises(error, match="`"):
        call(model, caches)
    assert torch.equal(states(caches[0]), before)


@pytest.mark.parametrize(
    ("family", "name", "error"),
    [
        ("deepseek_v3", "dynamic", ConfigError),
        ("jamba", "dynamic", KVLayersError),
        ("gpt2", "dynamic", ConfigError),
        ("llama", "sink", UnsupportedLayerError),
        ("llama", "evicting", UnsupportedLayerError),
    ],
)
def test_what_cannot_be_moved_is_named(family: str, name: str, error: type[KVLayersError]) -> None:
    model = tiny_model(family)
    options = {"sink": {"window_length": 8, "num_sink_tokens": 2}}.get(name, {})
    cache, _ = read(model, DOCUMENTS[1], kvlayers.make_cache(name, model, **options))
    with pytest.raises(error):
        kvlayers.moved(cache, 5, model)


def test_windows_cannot_be_recomputed_or_cropped() -> None:
    model = tiny_model("mistral")
    caches = [read(model, ids, kvlayers.DynamicCache(config=model.config))[0] for ids in DOCUMENTS]
    with pytest.raises(UnsupportedLayerError, match="`recompute` needs layers that keep every token"):
        kvlayers.concatenate(caches, model, recompute=2, ids=DOCUMENTS)
    whole, _ = read(model, torch.cat([WHOLE] * 3, dim=1), kvlayers.DynamicCache(config=model.config))
    with pytest.raises((RollbackError, UnsupportedLayerError)):
        kvlayers.replace_tokens(whole, 5, 9, QUESTION, model, recompute=0)
    assert whole.get_seq_length() == 102


@pytest.mark.parametrize("empty", [kvlayers.DynamicCache, lambda: kvlayers.DynamicCache(config=tiny_model("llama"))])
def test_windows_are_not_put_into_layers_that_keep_everything(empty: Any) -> None:
    model, into = tiny_model("mistral"), empty()
    caches = [read(model, ids, kvlayers.DynamicCache(config=model.config))[0] for ids in DOCUMENTS]
    with pytest.raises(UnsupportedLayerError, match=r"`into` must not keep more tokens .* window of 8: .* without a"):
        kvlayers.concatenate(caches, model, recompute=0, into=into)
    assert into.get_seq_length() == 0
    # Windows that no token has left yet are all there is.
    short = [own[:, :3] for own in DOCUMENTS[:2]]
    caches = [read(model, ids, kvlayers.DynamicCache(config=model.config))[0] for ids in short]
    found = kvlayers.concatenate(caches, model, recompute=0, into=into)
    expected = kvlayers.concatenate(caches_of(model, short), model, recompute=0)
    for cache in (found, expected):
        cache.crop(-2)
    torch.testing.assert_close(continued(model, found), continued(model, expected), **EXACT)


@pytest.mark.parametrize(("stop", "error"), [(9, CapacityError), (34, CapacityError)])
def test_a_change_that_does_not_fit_computes_nothing(stop: int, error: type[KVLayersError]) -> None:
    model = fresh_model("llama", max_position_embeddings=64)
    cache, _ = read(model, WHOLE)
    with tokens_passed(model) as passed, pytest.raises(error, match="`max_position_embeddings`"):
        kvlayers.replace_tokens(cache, 5, stop, prompt(1, 60, 7), model, known_ids=WHOLE)
    assert (passed, cache.get_seq_length()) == ([], 34)


@pytest.mark.parametrize(
    "call",
    [
        lambda caches, model: kvlayers.concatenate(caches, model, recompute=0),
        lambda caches, model: kvlayers.moved(caches[0], 5, model),
    ],
    ids=["concatenate", "moved"],
)
def test_positions_of_several_axes_are_named_with_what_can_be_done(call: Any) -> None:
    model = any_seeing_model("qwen2_5_vl")
    caches = [read(model, ids)[0] for ids in DOCUMENTS]
    with pytest.raises(ConfigError, match=r"several axes \(mrope_section\).*: compute all tokens as one prompt\.$"):
        call(caches, model)


def test_what_has_nothing_behind_it_needs_nothing_computed_again() -> None:
    model = tiny_model("mistral")
    cache, _ = read(model, DOCUMENTS[0][:, :7], kvlayers.DynamicCache(config=model.config))
    kvlayers.replace_tokens(cache, 5, 7, QUESTION, model)
    assert cache.get_seq_length() == 9
    whole = torch.cat([DOCUMENTS[0][:, :5], QUESTION], dim=1)
    expected = continued(model, read(model, whole)[0], DOCUMENTS[1])
    joined = kvlayers.concatenate([cache], model)
    torch.testing.assert_close(continued(model, joined, DOCUMENTS[1]), expected, **EXACT)
