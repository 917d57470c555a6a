"""Drafts for models with recurrent states: tokens are those without assistance, and the cache is whole afterwards."""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers

import kvlayers
import versions
from drafts import draft_of, spread
from kvlayers.errors import OptionError, RollbackError
from kvlayers.generation import assisted
from kvlayers.generation.call_cache import RollbackCache
from kvlayers.upstream import compat
from matrix import some
from models import continued, fresh_model, prompt, read
from spies import spy

FAMILIES = ("bamba", "granitemoehybrid", "lfm2", "qwen3_next", "qwen3_5", "zamba2", "falcon_h1", "nemotron_h")


def repetitive() -> torch.Tensor:
    return torch.cat([prompt(1, 6)] * 4, dim=1)


def generated(model: Any, **how: Any) -> Any:
    return continued(model, repetitive(), 16, return_dict_in_generate=True, **how)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many drafts were accepted whole, and how many were taken back in part."""
    seen = Counter[str]()
    spy(monkeypatch, RollbackCache, "crop", lambda cache, tokens: seen.update(["rejected" if tokens else "accepted"]))
    return seen


@pytest.mark.parametrize("family", some(FAMILIES, FAMILIES[::3]))
def test_assistance_changes_no_token_of_a_recurrent_model(installed: None, rounds: Counter[str], family: str) -> None:
    model, step = spread(family), prompt(1, 1, seed=3)
    alone = generated(model)
    expected = alone.sequences
    _, logits = read(model, step, alone.past_key_values)
    look_up, draft = {"prompt_lookup_num_tokens": 4}, {"assistant_model": draft_of(model)}
    for how, name in ((look_up, "dynamic"), (draft, "dynamic"), (draft, "quantized"), (draft, "static")):
        # These are no options of the draft model's cache.
        ahead = {"cache_config": {"residual_length": 64}} if name == "quantized" else {}
        output = generated(model, cache_implementation=name, **how, **ahead)
        assert torch.equal(output.sequences, expected), (name, *how)
        assert output.past_key_values.get_seq_length() == expected.shape[1] - 1
        assert not any(layer.is_recording for layer in output.past_key_values.adapted_layers())
        assert not isinstance(output.past_key_values, RollbackCache)
        if name != "quantized":
            # bamba clips its time steps over several tokens, and not over one.
            _, seen = read(model, step, output.past_key_values)
            torch.testing.assert_close(seen, logits, rtol=0, atol=0.05 if family == "bamba" else 1e-4)
    assert len(rounds) == 2, "some are accepted, and some are not"


@pytest.mark.parametrize("family", ["granitemoehybrid", "lfm2", "zamba2"])
def test_a_cache_that_is_passed_comes_back_whole(installed: None, family: str) -> None:
    model = spread(family)
    expected = generated(model).sequences
    cache, _ = read(model, repetitive()[:, :9], kvlayers.DynamicCache(config=model.config))
    seen = generated(model, past_key_values=cache, prompt_lookup_num_tokens=4)
    assert seen.past_key_values is cache
    assert torch.equal(seen.sequences, expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("most", [0, 3])
def test_a_replay_may_be_a_pass_of_its_own(
    installed: None, monkeypatch: pytest.MonkeyPatch, rounds: Counter[str], most: int
) -> None:
    model = spread("qwen3_next")
    monkeypatch.setattr(assisted, "MAX_REPLAYED_WITH_DRAFT", most)
    expected = generated(model).sequences
    for how in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": draft_of(model)}):
        assert torch.equal(generated(model, **how).sequences, expected)
    assert rounds["rejected"] > 3


def test_hidden_states_are_those_of_each_token(installed: None) -> None:
    model = spread("qwen3_next")
    alone = generated(model, output_hidden_states=True)
    helped = generated(model, output_hidden_states=True, prompt_lookup_num_tokens=4)
    assert torch.equal(helped.sequences, alone.sequences)
    assert len(helped.hidden_states) == len(alone.hidden_states)
    for mine, theirs in zip(helped.hidden_states, alone.hidden_states, strict=True):
        torch.testing.assert_close(mine[-1], theirs[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("draft", ["jamba", "granitemoehybrid"])
def test_a_recurrent_model_may_draft_for_another_and_for_itself(
    installed: None, draft: str, rounds: Counter[str]
) -> None:
    """A draft that is wrong is taken back all the time, and replayed: one by one where its scan begins from zero."""
    models = {family: spread(family) for family in ("llama", "granitemoehybrid", draft)}
    for family in ("llama", "granitemoehybrid"):
        model = models[family]
        seen = generated(model, assistant_model=models[draft]).sequences
        assert torch.equal(seen, generated(model).sequences), family
    assert draft == "jamba" or rounds["accepted"] > 0


@pytest.mark.parametrize("family", ["jamba", "mamba", "mamba2", "recurrent_gemma"])
def test_models_whose_drafts_cannot_be_taken_back_are_refused_by_name(installed: None, family: str) -> None:
    if family == "recurrent_gemma":
        versions.need_since("5.17", "drafts for recurrent_gemma up to where they are refused")
    if family == "mamba2":
        versions.need_until("5.24", "drafts of which the model does not get its cache")
    model = spread(family)
    with pytest.raises(kvlayers.errors.RollbackError, match="leave out the assistance|cannot be assisted"):
        generated(model, prompt_lookup_num_tokens=4)
    assert model._is_stateful


def test_a_cache_of_transformers_is_refused_as_transformers_refuses_it(installed: None) -> None:
    model = spread("qwen3_next")
    cache = transformers.DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="must be a cache of kvlayers that holds"):
        generated(model, prompt_lookup_num_tokens=4, past_key_values=cache)


@pytest.mark.parametrize("kind", [kvlayers.DynamicCache, transformers.DynamicCache])
@pytest.mark.parametrize("way", ["draft model", "prompt look-up"])
def test_a_chat_goes_on_with_drafts(way: str, kind: Any, installed: None) -> None:
    # From 5.4 on transformers alone passes the whole sequence again, behind what the cache holds of it.
    model, cache, ids = fresh_model("llama"), kind(), repetitive()
    how = {"assistant_model": draft_of(model)} if way == "draft model" else {"prompt_lookup_num_tokens": 3}
    for turn in range(3):
        seen = continued(model, ids, 6, past_key_values=cache, **how)
        assert torch.equal(seen, continued(model, ids, 6))
        assert cache.get_seq_length() == seen.shape[1] - 1
        ids = torch.cat([seen, prompt(1, 3, seed=turn)], dim=1)
    if compat.LOOPS_COUNT_CACHE_POSITION:
        return
    # New tokens alone, more than are held.
    cache.crop(-(cache.get_seq_length() - 2))
    seen = continued(model, ids[:, 2:], 6, attention_mask=torch.ones_like(ids), past_key_values=cache, **how)
    assert torch.equal(seen, continued(model, ids, 6)[:, 2:])


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_new_tokens_alone_go_on_with_drafts_where_they_go_on_without(family: str, installed: None) -> None:
    """Fewer than the cache has seen. transformers leaves out a mask of ones, which says how many there are in all."""
    versions.need_since("5.18", "a call that leaves out a mask of ones")
    model, how = spread(family), {"max_new_tokens": 8, "do_sample": False}
    ids = repetitive()
    whole = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=whole, **how)
    cache, _ = read(model, ids[:, :15], kvlayers.DynamicCache(config=model.config))
    for draft in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": draft_of(model)}):
        fork = cache.fork()
        seen = model.generate(ids[:, 15:], attention_mask=whole, past_key_values=fork, **how, **draft)
        assert torch.equal(seen, expected[:, 15:])
        assert fork.get_seq_length() == expected.shape[1] - 1
    padded = whole.clone()
    padded[0, 0] = 0
    for new, mask in ((ids[:, 15:], padded), (ids[:, 15:].repeat(2, 1), whole.repeat(2, 1))):
        rows = cache.fork()
        rows.batch_repeat_interleave(len(new))
        with pytest.raises((OptionError, RollbackError)):
            model.generate(new, attention_mask=mask, past_key_values=rows, prompt_lookup_num_tokens=3, **how)
        assert rows.get_seq_length() == 15
