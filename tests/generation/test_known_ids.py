"""Prompts that do not go on from what a cache has seen: errors without `install()`, and warnings under it."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers.upstream import compat
from matrix import once
from models import prompt, tiny_model

MAKERS: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: kvlayers.DynamicCache(config=model.config),
    "static": lambda model: kvlayers.StaticCache(model.config, max_cache_len=96, max_batch_size=12),
    "int4": lambda model: kvlayers.QuantizedCache(config=model.config),
}


def generate(ids: torch.Tensor, cache: Any, tokens: int = 5, **how: Any) -> torch.Tensor:
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, **how}
    return tiny_model("llama").generate(ids, max_new_tokens=tokens, past_key_values=cache, **given)


def behind(ids: torch.Tensor, tokens: int = 3) -> torch.Tensor:
    """`ids`, and more of them."""
    return torch.cat([ids, prompt(ids.shape[0], tokens)], dim=1)


def changed(ids: torch.Tensor, at: int, row: int = 0) -> torch.Tensor:
    """`ids` with another token in one place."""
    other = ids.clone()
    other[row, at] = 3 + (other[row, at] - 2) % 90
    return other


# Without install()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("length", "tokens"), [(4, 20), (12, 1), (30, 20)])
def test_a_prompt_that_the_cache_holds_already_is_an_error_without_install(kind: str, length: int, tokens: int) -> None:
    # transformers would pass it no token, all of them again, or some of them again.
    cache, ids = MAKERS[kind](tiny_model("llama")), prompt(1, length)
    output = generate(ids, cache, tokens)
    held = cache.get_seq_length()
    # Before 5.4 transformers fails by itself, as it looks for the position of a first new token.
    named = kvlayers.errors.StateMismatchError if compat.PREFILL_SUBTRACTS_LENGTHS else IndexError
    with pytest.raises(named):
        generate(ids, cache, tokens)
    assert cache.get_seq_length() == held
    longer = behind(output)
    assert torch.equal(generate(longer, cache), generate(longer, MAKERS[kind](tiny_model("llama"))))


def test_lengths_are_plain_numbers_to_everybody_else() -> None:
    cache = kvlayers.DynamicCache()
    tiny_model("llama")(prompt(1, 5), past_key_values=cache)
    if compat.MARKS_GIVEN_CACHES or not compat.PREFILL_SUBTRACTS_LENGTHS:
        assert type(cache.get_seq_length()) is int
    # Versions between them do not say that generate() is asking, but the number is one for everybody.
    assert torch.equal(torch.arange(cache.get_seq_length()), torch.arange(5))
    assert pickle.loads(pickle.dumps(5 - cache.get_seq_length())) == 0
    assert (5 - cache.get_seq_length(), 3 - cache.get_seq_length()) == (0, -2)


# Under install()


@pytest.fixture
def strict() -> Any:
    """Where a prompt that differs is an error, so that a false alarm is one too."""
    with kvlayers.installed(strict_prompts=True):
        yield


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_goes_on_with_its_model_or_an_equal_one_alone(family: str) -> None:
    model, how = tiny_model(family), {"do_sample": False, "max_new_tokens": 3}
    equal, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        other.get_input_embeddings().weight += 1
    cache = kvlayers.DynamicCache(config=model.config)
    begun = behind(model.generate(prompt(1, 9), past_key_values=cache, **how))
    output = equal.generate(begun, past_key_values=cache, **how)
    assert torch.equal(output, model.generate(begun, **how))
    longer = behind(output)
    for _ in range(2):
        with pytest.raises(kvlayers.errors.PromptMismatchError, match="another model"):
            other.generate(longer, past_key_values=cache, **how)
    cache.reset()
    assert torch.equal(other.generate(longer, past_key_values=cache, **how), other.generate(longer, **how))


@pytest.mark.parametrize("kind", MAKERS)
def test_the_ids_follow_the_operations_of_the_cache(kind: str, strict: None) -> None:
    cache = MAKERS[kind](tiny_model("llama"))
    ids = generate(prompt(3, 8), cache)
    assert torch.equal(cache.known_ids, ids[:, : cache.get_seq_length()])
    fork = cache.fork()
    with pytest.raises(kvlayers.errors.PromptMismatchError, match=r"token 9 of sequence 1 is .*: crop\(9\) the cache"):
        generate(changed(behind(ids), 9, row=1), cache)
    assert torch.equal(cache.known_ids, ids[:, : cache.get_seq_length()])
    cache.batch_select_indices([2, 0])
    ids = generate(behind(ids[[2, 0]]), cache)
    cache.batch_repeat_interleave(2)
    ids = generate(behind(ids.repeat_interleave(2, dim=0)), cache)
    cache.expand(2)
    ids = generate(behind(ids.repeat_interleave(2, dim=0)), cache)
    other = changed(ids, 6)
    cache.crop(6)
    generate(other, cache)
    with pytest.raises(kvlayers.errors.PromptMismatchError, match="token 6 of sequence 0"):
        generate(behind(ids, 12), cache)
    state = fork.state()
    cache.reset()
    generate(prompt(4, 20), cache)
    with pytest.raises(kvlayers.errors.PromptMismatchError, match="token 0 of sequence 0 is"):
        generate(prompt(3, 40)[:, 20:], fork)
    # Of a state nobody says what it is of.
    fork.load_state(state)
    with pytest.raises(kvlayers.errors.PromptMismatchError, match="with 12 of the 12 tokens that the cache has seen"):
        generate(prompt(3, 40)[:, 20:], fork)
    with kvlayers.installed(strict_prompts=False):
        generate(prompt(3, 40)[:, 20:], fork)


def test_a_warning_comes_once_for_each_cache_and_points_at_the_call(installed: None) -> None:
    cache = kvlayers.DynamicCache()
    ids = generate(prompt(1, 8), cache)
    with pytest.warns(kvlayers.PromptMismatchWarning, match="token 3 of sequence 0") as caught:
        ids = generate(behind(changed(ids, 3)), cache)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(behind(ids), cache)


def test_padding_and_samples_are_no_cause_for_alarm(strict: None) -> None:
    cache, ids = kvlayers.DynamicCache(), prompt(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ids = behind(generate(ids, cache, attention_mask=mask))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    # Nobody attends to padding, whatever its ids.
    generate(changed(ids, 1), cache, attention_mask=mask)

    cache, ids = kvlayers.DynamicCache(), prompt(2, 8)
    samples = generate(ids, cache, num_return_sequences=2, do_sample=True)
    generate(behind(samples), cache)


def test_drafts_and_new_tokens_alone_are_known(strict: None) -> None:
    cache, ids = kvlayers.DynamicCache(), torch.cat([prompt(1, 8)] * 2, dim=1)
    ids = generate(ids, cache, prompt_lookup_num_tokens=3)
    assert torch.equal(cache.known_ids, ids[:, : cache.get_seq_length()])
    if compat.LOOPS_COUNT_CACHE_POSITION:
        return
    whole, held = behind(ids), cache.get_seq_length()
    new = generate(whole[:, held:], cache, attention_mask=torch.ones_like(whole))
    whole = torch.cat([whole[:, :held], new], dim=1)
    assert torch.equal(cache.known_ids, whole[:, : cache.get_seq_length()])


def test_a_loop_of_ones_own_leaves_its_prompts_behind(strict: None) -> None:
    model, cache, ids = tiny_model("llama"), kvlayers.DynamicCache(), prompt(1, 9)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        model(input_ids=ids[:, 4:], past_key_values=cache)
        assert torch.equal(cache.known_ids, ids)
        # One by one they cost nothing, and what comes behind them is not known either.
        model(ids[:, :1], past_key_values=cache)
        model(ids[:, :3], past_key_values=cache)
    assert torch.equal(cache.known_ids, ids)
    longer = torch.cat([ids, ids[:, :1], ids[:, :3], prompt(1, 9)], dim=1)
    with pytest.raises(kvlayers.errors.PromptMismatchError, match="with 4 of the 13 tokens that the cache has seen"):
        generate(longer, cache)
    with kvlayers.installed(strict_prompts=False):
        generate(longer, cache.fork())
    with pytest.raises(kvlayers.errors.PromptMismatchError, match="token 8"):
        generate(torch.cat([changed(ids, 8), prompt(1, 40)], dim=1), cache)
    cache.known_ids = longer[:, :13]
    generate(longer, cache)


# Beams


@pytest.mark.parametrize(("tokens", "kind", "length"), once([1, 2, 6], MAKERS, [8, 40], times=2))
def test_after_a_beam_search_the_ids_are_those_of_the_beams(kind: str, length: int, tokens: int, strict: None) -> None:
    model, ids = tiny_model("llama"), prompt(2, length)
    cache = MAKERS[kind](model)
    returned = generate(ids, cache, tokens, num_beams=3, num_return_sequences=3)
    known = cache.known_ids
    assert known.shape == (6, cache.get_seq_length())
    again = MAKERS[kind](model)
    with torch.no_grad():
        model(known[:, :length], past_key_values=again)
        for place in range(length, known.shape[1]):
            model(known[:, place : place + 1], past_key_values=again)
    for layer, own in zip(cache.layers, again.layers, strict=True):
        torch.testing.assert_close(layer.keys, own.keys)
    # A beam goes on as from a new cache. What was returned may be something else, and is then refused.
    fork, first = cache.fork(), cache.fork()
    longer = behind(known)
    assert torch.equal(generate(longer, cache), generate(longer, MAKERS[kind](model)))
    if torch.equal(returned[:, : known.shape[1]], known):
        generate(behind(returned), fork)
    else:
        with pytest.raises(kvlayers.errors.PromptMismatchError, match=r"token \d+ of sequence"):
            generate(behind(returned), fork)
    first.batch_select_indices([0])
    with pytest.raises(kvlayers.errors.PromptMismatchError, match="token"):
        generate(behind(changed(known[:1], length - 1)), first, num_beams=1)


# Calls that fail, and other wrong caches


def test_a_call_that_fails_leaves_what_was_known(strict: None) -> None:
    class Stop(Exception):
        pass

    def stop(ids: torch.Tensor, scores: Any) -> Any:
        if ids.shape[1] > 20:
            raise Stop
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    cache = kvlayers.DynamicCache()
    ids = generate(prompt(1, 8), cache)
    known = cache.known_ids
    with pytest.raises(Stop):
        generate(behind(ids, 4), cache, tokens=20, stopping_criteria=[stop])
    assert torch.equal(cache.known_ids, known)
    assert cache.get_seq_length() > known.shape[1]
    cache.crop(known.shape[1])
    longer = behind(ids)
    assert torch.equal(generate(longer, cache), generate(longer, kvlayers.DynamicCache()))


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(
            3,
            marks=pytest.mark.skipif(
                not compat.PREFILL_SUBTRACTS_LENGTHS,
                reason="before 5.4 its length is refused",
            ),
        ),
        30,
    ],
)
def test_two_prompts_on_the_cache_of_one_are_refused_as_that(length: int, installed: None) -> None:
    cache = kvlayers.DynamicCache()
    ids = generate(prompt(1, 8), cache)
    with pytest.raises(kvlayers.errors.StateMismatchError, match="a prompt for each of the 1 sequences.* got 2"):
        generate(prompt(2, length), cache)
    generate(behind(ids), cache)


def test_states_of_a_model_with_other_layers_are_one_error(installed: None) -> None:
    model = tiny_model("llama")
    other = type(model)(type(model.config)(**{**model.config.to_dict(), "num_key_value_heads": 1})).eval()
    cache = kvlayers.DynamicCache(config=model.config)
    ids = generate(prompt(1, 8), cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kvlayers.PromptMismatchWarning)
        for _ in range(2):
            with pytest.raises(kvlayers.errors.StateMismatchError, match="another model, .* with other layers"):
                other.generate(behind(ids), past_key_values=cache, max_new_tokens=2)
    generate(behind(ids), cache)


def test_a_returned_cache_knows_its_sequences(installed: None) -> None:
    ids = prompt(2, 6)
    output = generate(ids, None, return_dict_in_generate=True)
    assert torch.equal(output.past_key_values.known_ids, output.sequences[:, :-1])  # type: ignore[attr-defined]


def test_nothing_is_compared_without_install() -> None:
    cache = kvlayers.DynamicCache()
    ids = generate(prompt(1, 8), cache)
    assert cache.known_ids is None
    generate(changed(behind(ids), 2), cache)


def test_options_stay_until_something_else_is_said() -> None:
    try:
        kvlayers.install(strict_prompts=True)
        kvlayers.install()
        cache = kvlayers.DynamicCache()
        ids = changed(behind(generate(prompt(1, 8), cache)), 2)
        with pytest.raises(kvlayers.errors.PromptMismatchError):
            generate(ids, cache)
        with kvlayers.installed(strict_prompts=False), pytest.warns(kvlayers.PromptMismatchWarning):
            generate(ids, cache.fork())
        with pytest.raises(kvlayers.errors.PromptMismatchError):
            generate(ids, cache)
    finally:
        kvlayers.uninstall()
    with kvlayers.installed(), pytest.warns(kvlayers.PromptMismatchWarning):
        generate(ids, cache)


def test_a_pass_takes_a_name_in_the_place_of_a_cache(installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(1, 6)
    generate(ids, "int4", cache_implementation="int4")
    assert type(model(ids, past_key_values="int8").past_key_values) is kvlayers.QuantizedCache
    for call in (model, model.generate):
        with pytest.raises(kvlayers.errors.RegistryError, match="did you mean 'int4'"):
            call(ids, past_key_values="int44")
