"""A call of `generate()` that is going to need more tokens than are reserved says so before it begins."""

import logging
from typing import Any

import pytest
import torch
import transformers as tf

import kvlayers
from kvlayers.upstream import compat
from models import fresh_model, prompt, tiny_model

NEEDED = r"room for 31 tokens.*reservation of 16.*max_cache_len.*max_new_tokens.*grow=True"
TOO_SMALL = {"cache_implementation": "static", "cache_config": {"max_cache_len": 16}}


def generated(model: Any, tokens: int = 20, **how: Any) -> torch.Tensor:
    """12 tokens of a prompt and 20 new ones, of which the last is never passed: 31 tokens."""
    with kvlayers.installed():
        output: torch.Tensor = model.generate(prompt(1, 12), max_new_tokens=tokens, do_sample=False, **how)
    return output


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("name", ["static", "hybrid", pytest.param("offloaded_static", id="offloaded")])
def test_a_name_with_too_small_a_reservation_is_refused_before_the_first_pass(family: str, name: str) -> None:
    model, passes = fresh_model(family), []
    model.register_forward_hook(lambda *_: passes.append(1))
    # Layers of mistral keep a window of 8 tokens, for which 16 are enough.
    fits = family == "mistral"
    options = {**TOO_SMALL, "cache_implementation": name}
    if fits:
        assert generated(model, **options).shape == (1, 32)
        return
    with pytest.raises(kvlayers.CapacityError, match=NEEDED):
        generated(model, **options, min_new_tokens=20)
    assert not passes


def test_a_reservation_that_is_just_large_enough_is_used() -> None:
    model = tiny_model("llama")
    expected = model.generate(prompt(1, 12), max_new_tokens=20, do_sample=False)
    enough = {**TOO_SMALL, "cache_config": {"max_cache_len": 31}}
    assert torch.equal(generated(model, **enough), expected)
    grows = {**TOO_SMALL, "cache_config": {"max_cache_len": 16, "grow": True}}
    assert torch.equal(generated(model, **grows), expected)


def test_a_cache_that_is_passed_is_checked_as_well() -> None:
    model, ids = tiny_model("llama"), prompt(1, 12)
    with pytest.raises(kvlayers.CapacityError, match=NEEDED):
        generated(model, min_new_tokens=20, past_key_values=kvlayers.StaticCache(model.config, max_cache_len=16))
    # The second turn, of which the cache has seen 8 tokens: as a whole, and as new tokens with a mask for all.
    for begin in (0,) if compat.LOOPS_COUNT_CACHE_POSITION else (0, 8):
        cache = kvlayers.StaticCache(model.config, max_cache_len=16)
        with torch.no_grad():
            model(ids[:, :8], past_key_values=cache)
        with kvlayers.installed(), pytest.raises(kvlayers.CapacityError, match=NEEDED):
            model.generate(
                ids[:, begin:],
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=20,
                min_new_tokens=20,
            )
        assert cache.get_seq_length() == 8


def stop_at_once(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    return torch.ones(ids.shape[0], dtype=torch.bool)


def test_a_call_that_may_end_earlier_goes_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    first = int(generated(model, 1)[0, -1])
    ways: tuple[dict[str, Any], ...] = (
        {"eos_token_id": first},
        {"stopping_criteria": tf.StoppingCriteriaList([stop_at_once])},
        {"max_time": 1e-9},
    )
    for way in ways:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="kvlayers"):
            assert generated(model, **TOO_SMALL, **way).shape == (1, 13)
        assert "room for 16 tokens" in caplog.text
        assert "may need 31" in caplog.text


def test_tokens_that_a_call_must_generate_count_even_if_it_may_end_then() -> None:
    model = tiny_model("llama")
    with pytest.raises(kvlayers.CapacityError, match=NEEDED):
        generated(model, **TOO_SMALL, eos_token_id=5, min_new_tokens=10)


def test_a_call_that_fits_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvlayers"):
        generated(tiny_model("llama"), 5, **TOO_SMALL, eos_token_id=5)
    assert not caplog.records
