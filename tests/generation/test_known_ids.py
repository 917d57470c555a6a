"""Prompts that do not go on from what a cache has seen: errors without `install()`, and warnings under it."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import families
import kvlayers
import versions
from kvlayers.errors import PromptMismatchError, RegistryError, StateMismatchError
from kvlayers.generation.prefix_reuse import eligibility
from kvlayers.upstream import compat
from matrix import once
from models import fresh_model, prompt, read, tiny_model

MAKERS: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: kvlayers.DynamicCache(config=model.config),
    "static": lambda model: kvlayers.StaticCache(model.config, max_cache_len=96, max_batch_size=12),
    "int4": lambda model: kvlayers.QuantizedCache(config=model.config),
}
RETURNED = {"return_dict_in_generate": True}


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


def padded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A mask that leaves out three tokens of the first sequence."""
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"attention_mask": mask}


def refused(ids: torch.Tensor, cache: Any, words: str, **how: Any) -> None:
    with pytest.raises(PromptMismatchError, match=words):
        generate(ids, cache, **how)


def knows_what_it_has_seen(cache: Any, ids: torch.Tensor) -> bool:
    return torch.equal(cache.known_ids, ids[:, : cache.get_seq_length()])


# Without install()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("length", "tokens"), [(4, 20), (12, 1), (30, 20)])
def test_a_prompt_that_the_cache_holds_already_is_an_error_without_install(kind: str, length: int, tokens: int) -> None:
    # transformers would pass it no token, all of them again, or some of them again.
    cache, ids = MAKERS[kind](tiny_model("llama")), prompt(1, length)
    longer, held = behind(generate(ids, cache, tokens)), cache.get_seq_length()
    # Before 5.4 transformers fails by itself, as it looks for the position of a first new token.
    with pytest.raises(StateMismatchError if compat.PREFILL_SUBTRACTS_LENGTHS else IndexError):
        generate(ids, cache, tokens)
    assert cache.get_seq_length() == held
    assert cache.known_ids is None
    assert torch.equal(generate(longer, cache), generate(longer, MAKERS[kind](tiny_model("llama"))))
    # Nor is anything compared.
    generate(changed(behind(longer, 9), 2), cache)


def test_lengths_are_plain_numbers_to_everybody_else() -> None:
    cache, _ = read(tiny_model("llama"), prompt(1, 5))
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


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_goes_on_with_its_model_or_an_equal_one_alone(family: str, strict: None) -> None:
    model, how = tiny_model(family), {"do_sample": False, "max_new_tokens": 3}
    equal, other = copy.deepcopy(model), copy.deepcopy(model)
    other.get_input_embeddings().weight.data += 1
    cache = kvlayers.DynamicCache(config=model.config)
    begun = behind(model.generate(prompt(1, 9), past_key_values=cache, **how))
    output = equal.generate(begun, past_key_values=cache, **how)
    assert torch.equal(output, model.generate(begun, **how))
    longer = behind(output)
    for _ in range(2):
        with pytest.raises(PromptMismatchError, match="another model"):
            other.generate(longer, past_key_values=cache, **how)
    cache.reset()
    assert torch.equal(other.generate(longer, past_key_values=cache, **how), other.generate(longer, **how))


@pytest.mark.parametrize("kind", MAKERS)
def test_the_ids_follow_the_operations_of_the_cache(kind: str, strict: None) -> None:
    cache, others = MAKERS[kind](tiny_model("llama")), prompt(3, 40)[:, 20:]
    ids = generate(prompt(3, 8), cache)
    assert knows_what_it_has_seen(cache, ids)
    fork = cache.fork()
    refused(changed(behind(ids), 9, row=1), cache, r"token 9 of sequence 1 is .*: crop\(9\) the cache")
    assert knows_what_it_has_seen(cache, ids)
    cache.batch_select_indices([2, 0])
    ids = generate(behind(ids[[2, 0]]), cache)
    for repeat in (cache.batch_repeat_interleave, cache.expand):
        repeat(2)
        ids = generate(behind(ids.repeat_interleave(2, dim=0)), cache)
    cache.crop(6)
    generate(changed(ids, 6), cache)
    refused(behind(ids, 12), cache, "token 6 of sequence 0")
    state = fork.state()
    cache.reset()
    generate(prompt(4, 20), cache)
    refused(others, fork, "token 0 of sequence 0 is")
    # Of a state nobody says what it is of.
    fork.load_state(state)
    refused(others, fork, "with 12 of the 12 tokens that the cache has seen")
    with kvlayers.installed(strict_prompts=False):
        generate(others, fork)


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
    ids = behind(generate(ids, cache, **padded(ids)))
    # Nobody attends to padding, whatever its ids.
    generate(changed(ids, 1), cache, **padded(ids))
    cache = kvlayers.DynamicCache()
    generate(behind(generate(prompt(2, 8), cache, num_return_sequences=2, do_sample=True)), cache)


def test_drafts_and_new_tokens_alone_are_known(strict: None) -> None:
    cache, ids = kvlayers.DynamicCache(), torch.cat([prompt(1, 8)] * 2, dim=1)
    ids = generate(ids, cache, prompt_lookup_num_tokens=3)
    assert knows_what_it_has_seen(cache, ids)
    if compat.LOOPS_COUNT_CACHE_POSITION:
        return
    whole, held = behind(ids), cache.get_seq_length()
    new = generate(whole[:, held:], cache, attention_mask=torch.ones_like(whole))
    assert knows_what_it_has_seen(cache, torch.cat([whole[:, :held], new], dim=1))


def test_a_loop_of_ones_own_leaves_its_prompts_behind(strict: None) -> None:
    model, ids = tiny_model("llama"), prompt(1, 9)
    cache, _ = read(model, ids[:, :4])
    with torch.no_grad():
        model(input_ids=ids[:, 4:], past_key_values=cache)
    assert torch.equal(cache.known_ids, ids)
    # One by one they cost nothing, and what comes behind them is not known either.
    for tokens in (1, 3):
        read(model, ids[:, :tokens], cache)
    assert torch.equal(cache.known_ids, ids)
    longer = torch.cat([ids, ids[:, :1], ids[:, :3], prompt(1, 9)], dim=1)
    refused(longer, cache, "with 4 of the 13 tokens that the cache has seen")
    with kvlayers.installed(strict_prompts=False):
        generate(longer, cache.fork())
    refused(torch.cat([changed(ids, 8), prompt(1, 40)], dim=1), cache, "token 8")
    cache.known_ids = longer[:, :13]
    generate(longer, cache)


# Beams


@pytest.mark.parametrize(("tokens", "kind", "length"), once([1, 2, 6], MAKERS, [8, 40], times=2))
def test_after_a_beam_search_the_ids_are_those_of_the_beams(kind: str, length: int, tokens: int, strict: None) -> None:
    model, ids = tiny_model("llama"), prompt(2, length)
    cache, again = MAKERS[kind](model), MAKERS[kind](model)
    returned = generate(ids, cache, tokens, num_beams=3, num_return_sequences=3)
    known = cache.known_ids
    assert known.shape == (6, cache.get_seq_length())
    for part in (known[:, :length], *known.split(1, dim=1)[length:]):
        read(model, part, again)
    for layer, own in zip(cache.layers, again.layers, strict=True):
        torch.testing.assert_close(layer.keys, own.keys)
    # A beam goes on as from a new cache. What was returned may be something else, and is then refused.
    fork, first, longer = cache.fork(), cache.fork(), behind(known)
    assert torch.equal(generate(longer, cache), generate(longer, MAKERS[kind](model)))
    if torch.equal(returned[:, : known.shape[1]], known):
        generate(behind(returned), fork)
    else:
        refused(behind(returned), fork, r"token \d+ of sequence")
    first.batch_select_indices([0])
    refused(behind(changed(known[:1], length - 1)), first, "token", num_beams=1)


# Calls that fail, and other wrong caches


def test_a_call_that_fails_leaves_what_was_known(strict: None) -> None:
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 20:
            raise ZeroDivisionError
        return scores

    cache = kvlayers.DynamicCache()
    ids = generate(prompt(1, 8), cache)
    known, longer = cache.known_ids, behind(ids)
    with pytest.raises(ZeroDivisionError):
        generate(behind(ids, 4), cache, tokens=20, logits_processor=[fail])
    assert torch.equal(cache.known_ids, known)
    assert cache.get_seq_length() > known.shape[1]
    cache.crop(known.shape[1])
    assert torch.equal(generate(longer, cache), generate(longer, kvlayers.DynamicCache()))


@pytest.mark.parametrize("length", [3, 30] if compat.PREFILL_SUBTRACTS_LENGTHS else [30])
def test_two_prompts_on_the_cache_of_one_are_refused_as_that(length: int, installed: None) -> None:
    cache = kvlayers.DynamicCache()
    ids = generate(prompt(1, 8), cache)
    with pytest.raises(StateMismatchError, match="a prompt for each of the 1 sequences.* got 2"):
        generate(prompt(2, length), cache)
    generate(behind(ids), cache)


def test_states_of_a_model_with_other_layers_are_one_error(installed: None) -> None:
    model, other = tiny_model("llama"), fresh_model("llama", num_key_value_heads=1)
    cache = kvlayers.DynamicCache(config=model.config)
    ids = generate(prompt(1, 8), cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kvlayers.PromptMismatchWarning)
        for _ in range(2):
            with pytest.raises(StateMismatchError, match="another model, .* with other layers"):
                other.generate(behind(ids), past_key_values=cache, max_new_tokens=2)
    generate(behind(ids), cache)


def test_a_returned_cache_knows_its_sequences(installed: None) -> None:
    output: Any = generate(prompt(2, 6), None, **RETURNED)
    assert torch.equal(output.past_key_values.known_ids, output.sequences[:, :-1])


def test_options_stay_until_something_else_is_said() -> None:
    try:
        kvlayers.install(strict_prompts=True, cache="int4")
        kvlayers.install()
        cache = kvlayers.DynamicCache()
        ids = changed(behind(generate(prompt(1, 8), cache)), 2)
        refused(ids, cache, "token 2")
        with kvlayers.installed(strict_prompts=False), pytest.warns(kvlayers.PromptMismatchWarning):
            generate(ids, cache.fork())
        refused(ids, cache, "token 2")
        assert type(generate(ids, None, **RETURNED).past_key_values) is kvlayers.QuantizedCache
    finally:
        kvlayers.uninstall()
    with kvlayers.installed():
        with pytest.warns(kvlayers.PromptMismatchWarning):
            generate(ids, cache)
        assert type(generate(ids, None, **RETURNED).past_key_values) is kvlayers.DynamicCache


def test_a_pass_takes_a_name_in_the_place_of_a_cache(installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(1, 6)
    generate(ids, "int4", cache_implementation="int4")
    assert type(model(ids, past_key_values="int8").past_key_values) is kvlayers.QuantizedCache
    for call in (model, model.generate):
        with pytest.raises(RegistryError, match="did you mean 'int4'"):
            call(ids, past_key_values="int44")


@pytest.mark.parametrize("seen", [5, 10])
def test_embeddings_of_new_tokens_alone_are_refused_with_what_to_pass_instead(seen: int) -> None:
    """transformers would take the last of them for the new ones, and generate other tokens."""
    model, ids, new = tiny_model("llama"), prompt(1, 16), 16 - seen
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **how)[:, 16:]
    embeddings = model.get_input_embeddings()(ids)
    cache, _ = read(model, ids[:, :seen])
    with kvlayers.installed():
        with pytest.raises(StateMismatchError, match=rf"inputs_embeds.*seen {seen} .*{new} of its 16.*all tokens"):
            model.generate(inputs_embeds=embeddings[:, seen:], past_key_values=cache, **how)
        # What the message says: embeddings of all, of which those of seen tokens are not read.
        unread = torch.cat([torch.full_like(embeddings[:, :seen], torch.nan), embeddings[:, seen:]], dim=1)
        assert torch.equal(model.generate(inputs_embeds=unread, past_key_values=cache, **how), expected)
    if compat.PREFILL_SUBTRACTS_LENGTHS and seen > new:
        # Without install() only the numbers of tokens are known.
        cache, _ = read(model, ids[:, :seen])
        with pytest.raises(StateMismatchError, match="with the new tokens at its end"):
            model.generate(inputs_embeds=embeddings[:, seen:], past_key_values=cache, **how)


@versions.kvlayers_recurrent_layers
def test_embeddings_of_all_tokens_are_read_once_by_recurrent_states_too() -> None:
    """transformers does not ask a cache of recurrent states alone what it has seen."""
    model, ids = families.model_of("mamba2"), prompt(2, 12)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "output_logits": True}
    expected = model.generate(ids, **how, **RETURNED)
    embeddings = model.get_input_embeddings()(ids)
    for given_ids, embeds in ((None, embeddings), (ids, embeddings), (None, embeddings[:, 7:])):
        with kvlayers.installed():
            cache, _ = read(model, ids[:, :7], kvlayers.DynamicCache(config=model.config))
            seen = model.generate(given_ids, inputs_embeds=embeds, past_key_values=cache, **how, **RETURNED)
        torch.testing.assert_close(torch.stack(seen.logits), torch.stack(expected.logits), rtol=0, atol=1e-5)
        assert cache.get_seq_length() == 16


@versions.kvlayers_recurrent_layers
def test_a_prompt_that_recurrent_states_alone_have_seen_in_full_is_refused(installed: None) -> None:
    """As a call is made again that was interrupted: the text would be read once more behind itself."""
    model, ids = families.model_of("mamba2"), prompt(1, 12)
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    cache, _ = read(model, ids, kvlayers.DynamicCache(config=model.config))
    for given in (ids, ids[:, :7]):
        with pytest.raises(StateMismatchError, match="has no new ones"):
            model.generate(given, attention_mask=torch.ones_like(given), past_key_values=cache, **how)
    assert cache.get_seq_length() == 12
    longer = torch.cat([ids, prompt(1, 1, 5)], dim=1)
    how["attention_mask"] = torch.ones_like(longer)
    expected = model.generate(longer, **how)
    assert torch.equal(model.generate(longer, past_key_values=cache, **how), expected)


@versions.kvlayers_recurrent_layers
@pytest.mark.parametrize("seen", [4, 9])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba"])
def test_new_tokens_alone_go_on_behind_recurrent_states_however_many_they_are(
    family: str, seen: int, installed: None
) -> None:
    """transformers leaves out a mask of ones, which says how many tokens there are."""
    versions.need_since("5.4", "new tokens alone behind a cache")
    model, ids = families.model_of(family), prompt(1, 13)
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, output_logits=True, **how, **RETURNED)
    cache, _ = read(model, ids[:, :seen], kvlayers.DynamicCache(config=model.config))
    found = model.generate(ids[:, seen:], past_key_values=cache, output_logits=True, **how, **RETURNED)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=1e-4)
    assert cache.get_seq_length() == 17


@versions.prefills_apart
def test_embeddings_are_read_whole_whatever_the_chunks(installed: None) -> None:
    """transformers would pass all of them with the positions of a part, which torch refuses."""
    model, ids, how = tiny_model("llama"), prompt(1, 16), {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **how)
    embeddings = model.get_input_embeddings()(ids)
    for beside in ({}, {"input_ids": ids}):
        seen = model.generate(inputs_embeds=embeddings, prefill_chunk_size=5, **how, **beside)
        assert torch.equal(seen[:, -5:], expected[:, -5:])


# What tells one model's states from another's: whatever changes them is noticed, and nothing else is.


def identity(model: Any) -> str:
    return eligibility.model_identity(model, kvlayers.weights_id(model), model.device)


def test_adapters_that_are_switched_or_merged_are_noticed() -> None:
    peft, model = pytest.importorskip("peft", reason="PEFT is not installed"), fresh_model("llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    seen = [identity(model)]
    wrapped = peft.get_peft_model(model, config, adapter_name="one")
    for change in (
        lambda: wrapped.set_adapter("one"),
        lambda: wrapped.add_adapter("two", config),
        lambda: wrapped.set_adapter("two"),
        wrapped.base_model.disable_adapter_layers,
        wrapped.base_model.enable_adapter_layers,
        wrapped.merge_adapter,
        wrapped.merge_and_unload,
    ):
        change()
        seen.append(identity(model))
    # With the second one, before and after all were disabled.
    assert seen.pop(3) == seen[4]
    assert len(set(seen)) == len(seen)


def test_weights_written_to_in_inference_mode_are_noticed() -> None:
    with torch.inference_mode():
        model = fresh_model("llama")
        before = identity(model)
        model.model.embed_tokens.weight.mul_(1.5)
        assert identity(model) != before


def test_other_weights_in_the_place_of_those_that_were_read_are_noticed() -> None:
    model = fresh_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    first, seen = layer.weight.detach().clone(), [identity(model)]
    layer.weight.data.copy_(torch.randn_like(first))
    seen.append(identity(model))
    # Those that were swapped back are the ones they were.
    layer.weight.data.copy_(first)
    assert identity(model) == seen[0]
    for _ in range(6):
        layer.weight = None
        layer.weight = torch.nn.Parameter(torch.randn_like(first))
        seen.append(identity(model))
    assert len(set(seen)) == len(seen)
