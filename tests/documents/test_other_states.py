"""Caches whose states are not those of their text: they say so, stores refuse them, and positions stay right."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers.documents import recomputing
from kvlayers.errors import ConfigError, OptionError, StateMismatchError
from models import fresh_model, prompt, read, tiny_model

FIRST, SECOND, QUESTION = prompt(1, 9, 0), prompt(1, 14, 1), prompt(1, 4, 2)
WHOLE = torch.cat([FIRST, SECOND], dim=1)
TOLERANCE = {"rtol": 0, "atol": 1e-4}
"""What the issue allows in float32: the same sums in another order."""


def joined(model: Any, recompute: int | str) -> Any:
    documents = [read(model, ids)[0] for ids in (FIRST, SECOND)]
    return kvlayers.concatenate(documents, model, recompute=recompute, ids=[FIRST, SECOND])


@pytest.mark.parametrize(("recompute", "exact"), [(0, 9), (3, 12), ("50%", None), (14, None), ("100%", None)])
def test_a_cache_knows_how_many_tokens_are_exact_and_a_store_takes_no_others(recompute: Any, exact: int | None) -> None:
    model = tiny_model("llama")
    cache, whole = joined(model, recompute), read(model, WHOLE)[0]
    if recompute == "50%":
        # Which tokens change most is known to the model alone.
        values = zip(cache.layers, whole.layers, strict=True)
        differs = [(own.values - other.values).abs().amax((0, 1, 3)) > 1e-4 for own, other in values]
        exact = int(torch.stack(differs).any(0).nonzero()[0])
        assert 9 <= cache.exact_tokens <= exact
        exact = cache.exact_tokens
    assert cache.exact_tokens == exact
    store = kvlayers.PrefixStore("1MiB")
    if exact is None:
        assert store.insert(WHOLE[0], cache, model.config)
        return
    with pytest.raises(StateMismatchError, match="insert its documents instead"):
        store.insert(WHOLE[0], cache, model.config)
    assert len(store) == 0
    fork = cache.fork()
    fork.crop(exact)
    assert (cache.exact_tokens, fork.exact_tokens) == (exact, None)
    assert store.insert(WHOLE[0, :exact], fork, model.config)
    hit = store.lookup(torch.cat([WHOLE[:, :exact], QUESTION], dim=1), model.config)
    assert hit.covered == exact
    expected = read(model, torch.cat([WHOLE[:, :exact], QUESTION], dim=1))[1][:, -4:]
    torch.testing.assert_close(read(model, QUESTION, hit.cache)[1], expected, **TOLERANCE)
    cache.reset()
    assert cache.exact_tokens is None


def test_a_changed_middle_and_decoding_stay_inexact(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache, _ = read(model, WHOLE)
    kvlayers.replace_tokens(cache, 5, 7, QUESTION[0], model, recompute=0)
    assert cache.exact_tokens == 9
    read(model, QUESTION, cache)
    assert cache.exact_tokens == 9
    kvlayers.save_cache(cache, tmp_path / "cache.safetensors")
    assert kvlayers.load_cache(tmp_path / "cache.safetensors").exact_tokens == 9
    exact, _ = read(model, WHOLE)
    kvlayers.replace_tokens(exact, 5, 7, QUESTION[0], model, known_ids=WHOLE)
    assert exact.exact_tokens is None


def test_a_moved_cache_knows_where_it_begins() -> None:
    model = tiny_model("llama")
    cache, _ = read(model, FIRST)
    moved = kvlayers.moved(cache, 30, model)
    assert (cache.first_position, moved.first_position, moved.exact_tokens) == (0, 30, 0)
    back = kvlayers.moved(moved, 0, model)
    for own, other in zip(back.layers, cache.layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys, **TOLERANCE)
    further = kvlayers.moved(moved, 50, model)
    for own, other in zip(further.layers, kvlayers.moved(cache, 50, model).layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys, **TOLERANCE)
    second, _ = read(model, SECOND)
    together = kvlayers.concatenate(
        [moved, kvlayers.moved(second, 3, model)], model, recompute="100%", ids=[FIRST, SECOND]
    )
    # The first document's states are taken as they are: at its first position, they are those of the text.
    torch.testing.assert_close(
        read(model, QUESTION, together)[1], read(model, QUESTION, joined(model, "100%"))[1], **TOLERANCE
    )
    with pytest.raises(StateMismatchError, match="must begin at position 0"):
        kvlayers.replace_tokens(moved, 2, 3, QUESTION[0], model, known_ids=FIRST)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("recompute", ["40%", "100%"])
def test_many_tokens_are_recomputed_in_parts(family: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model(family)
    expected = read(model, QUESTION, joined(model, recompute))[1]
    passes: list[int] = []
    monkeypatch.setattr(recomputing, "MOST_IN_MASK", 3 * WHOLE.shape[1])
    with model.register_forward_pre_hook(lambda module, args: passes.append(args[0].shape[1])):
        cache = joined(model, recompute)
    assert max(passes) <= max(FIRST.shape[1], SECOND.shape[1])
    assert passes.count(3) >= 14 * int(recompute[:-1]) // 100 // 3
    torch.testing.assert_close(read(model, QUESTION, cache)[1], expected, **TOLERANCE)


def test_what_contradicts_the_caches_is_named() -> None:
    model, other = tiny_model("llama"), fresh_model("llama", num_hidden_layers=3)
    first, second = read(model, FIRST)[0], read(model, SECOND)[0]
    with kvlayers.installed():
        known = [read(model, ids)[0] for ids in (FIRST, SECOND)]
    assert known[0].known_ids is not None
    with pytest.raises(StateMismatchError, match="`ids` must be the tokens that the cache has seen"):
        kvlayers.concatenate(known, model, ids=[SECOND[:, :9], SECOND])
    with pytest.raises(StateMismatchError, match="`known_ids` must be the tokens that the cache has seen"):
        kvlayers.replace_tokens(known[0], 2, 3, [5], model, known_ids=SECOND[:, :9])
    with pytest.raises(StateMismatchError, match="`beginning_tokens` must be tokens that all caches begin with"):
        kvlayers.concatenate(known, model, beginning_tokens=3)
    read(model, QUESTION, known[0])
    with pytest.raises(StateMismatchError, match="knows 9 of its 13 tokens"):
        kvlayers.replace_tokens(known[0], 2, 3, [5], model)
    for recompute in (0, "100%"):
        with pytest.raises(StateMismatchError, match="the 3 layers of `model`, got 2"):
            kvlayers.concatenate([first, second], other, recompute=recompute, ids=[FIRST, SECOND])
    for wrong in (5, None, ["a", "b"]):
        with pytest.raises(OptionError, match="ids"):
            kvlayers.concatenate([first, second], model, ids=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`ids` must be whole numbers"):
        kvlayers.replace_tokens(first, 0, 1, None, model, known_ids=FIRST)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`model` must be a model"):
        kvlayers.concatenate([first, second], model.config, ids=[FIRST, SECOND])
    assert (first.get_seq_length(), second.get_seq_length()) == (9, 14)


def test_states_of_another_dtype_and_dropout_are_named() -> None:
    half = fresh_model("llama").to(torch.bfloat16)
    documents = [read(half, ids)[0] for ids in (FIRST, SECOND)]
    model = fresh_model("llama")
    with pytest.raises(StateMismatchError, match=r"needs states in torch\.float32.*got torch\.bfloat16"):
        kvlayers.concatenate(documents, model, ids=[FIRST, SECOND])
    assert kvlayers.concatenate(documents, model, recompute=0).get_seq_length() == 23
    dropping = fresh_model("llama", attention_dropout=0.5)
    documents = [read(dropping, ids)[0] for ids in (FIRST, SECOND)]
    dropping.train()
    with pytest.raises(ConfigError, match="needs a model in eval mode"):
        kvlayers.concatenate(documents, dropping, ids=[FIRST, SECOND])
