"""Sink caches through `generate()`: by name, given, in batches, in chats, and where they are refused."""

from typing import Any

import pytest
import torch

import kvlayers
import versions
from families import model_and_inputs
from kvlayers.upstream import compat
from models import fresh_model, prompt, read, tiny_model

pytestmark = pytest.mark.usefixtures("installed")

OPTIONS = {"window_length": 20, "num_sink_tokens": 3}
NARROW: dict[str, Any] = {"cache_implementation": "sink", "cache_config": OPTIONS}
# A window that nothing leaves is no window, and sinks are tokens as all others.
WIDE: dict[str, Any] = {"cache_implementation": "sink", "cache_config": {"window_length": 200}}


def sink_cache(model: Any) -> kvlayers.SinkCache:
    return kvlayers.SinkCache(**OPTIONS, config=model.config)


def generated(model: Any, ids: torch.Tensor, tokens: int = 30, **how: Any) -> Any:
    torch.manual_seed(0)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens, **how}
    return model.generate(ids, return_dict_in_generate=True, **options)


@torch.no_grad()
def decoded(model: Any, ids: torch.Tensor, tokens: int = 30, cache: kvlayers.SinkCache | None = None) -> torch.Tensor:
    """Greedy tokens of a loop that gives the model one token at a time after the prompt, of one sequence."""
    cache = sink_cache(model) if cache is None else cache
    new = ids[:, cache.get_seq_length() :]
    for _ in range(tokens):
        new = model(new, past_key_values=cache).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], dim=1)
    return ids


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3"])
def test_by_name_and_given_it_is_the_same_as_a_loop(family: str) -> None:
    model, ids = tiny_model(family), prompt(1, 30)
    by_name = generated(model, ids, **NARROW)
    assert type(by_name.past_key_values) is kvlayers.SinkCache
    assert by_name.past_key_values.window_length == 20
    # As in transformers 4, where a cache was made without a config.
    given = [generated(model, ids, past_key_values=cache) for cache in (kvlayers.SinkCache(20, 3), sink_cache(model))]
    for output in (by_name, *given):
        assert torch.equal(output.sequences, decoded(model, ids))


@pytest.mark.parametrize("way", ["by name", "given without a config", "given with a config"])
def test_in_a_padded_batch_each_sequence_is_as_it_is_alone(way: str) -> None:
    model, texts = fresh_model("llama").double(), [prompt(1, length, seed=length) for length in (30, 22, 5)]
    ids = torch.cat([torch.nn.functional.pad(text, (30 - text.shape[1], 0)) for text in texts])
    how: dict[str, Any] = {
        "by name": NARROW,
        "given without a config": {"past_key_values": kvlayers.SinkCache(**OPTIONS)},
        "given with a config": {"past_key_values": sink_cache(model)},
    }[way]
    sequences = generated(model, ids, attention_mask=(ids != 0).long(), **how).sequences
    for row, text in zip(sequences, texts, strict=True):
        assert torch.equal(row[30:], decoded(model, text)[0, text.shape[1] :])


def test_beams_and_samples_of_a_sequence_have_its_sinks() -> None:
    model, ids = tiny_model("llama"), prompt(2, 15)
    mask = torch.tensor([[0] * 4 + [1] * 11, [1] * 15])
    beams: dict[str, Any] = {"num_beams": 3, "attention_mask": mask}
    assert torch.equal(generated(model, ids, **beams, **WIDE).sequences, generated(model, ids, **beams).sequences)
    sampled: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "attention_mask": mask}
    for how in (beams, sampled):
        layer = generated(model, ids, **how, **NARROW).past_key_values.layers[0]
        assert layer.left_padding.tolist() == [4] * 3 + [0] * 3


@pytest.mark.parametrize("has_config", [True, False])
def test_the_chat_of_the_documentation_goes_on_beyond_the_window(has_config: bool) -> None:
    """Turn by turn with one cache, as the whole text that grows: each turn pays for its new tokens alone."""
    model, text = fresh_model("llama").double(), prompt(1, 6)
    cache, loop = sink_cache(model) if has_config else kvlayers.SinkCache(**OPTIONS), sink_cache(model)
    assert cache.get_max_length() == OPTIONS["window_length"]
    for turn in range(4):
        expected = decoded(model, text, tokens=9, cache=loop)
        text = generated(model, text, tokens=9, past_key_values=cache).sequences
        assert torch.equal(text, expected)
        text = torch.cat([text, prompt(1, 5, seed=turn)], dim=1)
    assert cache.get_seq_length() == text.shape[1] - 6


@pytest.mark.parametrize("kind", ["sink", "dynamic"])
def test_a_text_that_is_shorter_than_the_cache_is_refused(kind: str) -> None:
    """transformers counts new tokens from the end, and would go on from others than those that are new."""
    model, ids = tiny_model("llama"), prompt(1, 40)
    cache = sink_cache(model) if kind == "sink" else kvlayers.DynamicCache()
    text = generated(model, ids, tokens=5, past_key_values=cache).sequences
    seen = cache.get_seq_length()
    with pytest.raises(kvlayers.errors.StateMismatchError, match="has seen 44 tokens.* 20"):
        generated(model, text[:, -20:], past_key_values=cache)
    assert cache.get_seq_length() == seen
    # New tokens alone, with the mask of all, are another way to say the same.
    more = prompt(1, 3, seed=5)
    if compat.LOOPS_COUNT_CACHE_POSITION:
        with pytest.raises(kvlayers.errors.StateMismatchError, match="does not go on from new tokens alone"):
            generated(model, more, past_key_values=cache, attention_mask=torch.ones(1, 48))
        return
    whole = torch.cat([text, more], dim=1)
    expected = generated(model, whole, past_key_values=cache.fork()).sequences[:, 48:]
    new = torch.cat([text[:, -1:], more], dim=1)
    short = generated(model, new, attention_mask=torch.ones_like(whole), past_key_values=cache).sequences[:, 4:]
    assert torch.equal(short, expected)


def test_chunked_prefill_keeps_every_token_within_the_window() -> None:
    model, ids = tiny_model("llama"), prompt(1, 60)
    cache = sink_cache(model)
    for token in ids.split(1, dim=1):
        _, logits = read(model, token, cache)
    output = generated(model, ids, 1, **NARROW, prefill_chunk_size=1)
    assert torch.equal(output.sequences, torch.cat([ids, logits.argmax(-1)], dim=1))


def test_frequencies_that_were_rounded_with_the_model_are_refused() -> None:
    model = fresh_model("llama").to(torch.bfloat16)
    for how in (NARROW, {"past_key_values": kvlayers.SinkCache(20, config=model.config)}):
        with pytest.raises(kvlayers.errors.ConfigError, match="must be in float32"):
            generated(model, prompt(), **how)


@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "zamba2", "falcon_h1", "lfm2"])
def test_models_with_recurrent_states_keep_them_beside_the_sinks(family: str) -> None:
    model, inputs = model_and_inputs(family)
    ids = inputs["input_ids"][:1]
    expected = generated(model, ids, cache_implementation="dynamic")
    assert torch.equal(generated(model, ids, **WIDE).sequences, expected.sequences)
    narrow = generated(model, ids, cache_implementation="sink", cache_config={"window_length": 8}).past_key_values
    assert any(isinstance(layer.parts[0], kvlayers.SinkLayer) for layer in narrow.layers)
    assert {part.length for part in narrow.recurrent_parts()} == {ids.shape[1] + 29}


@pytest.mark.parametrize("window", [6, 12])
def test_a_window_shorter_than_the_models_own_has_sinks_in_all_layers(window: int) -> None:
    cache = kvlayers.SinkCache(window, 2, config=tiny_model("gemma3").config)
    kinds = [type(layer).__name__ for layer in cache.layers]
    slides = "SinkLayer" if window < 8 else "SlidingLayer"
    assert kinds == [slides, slides, "SinkLayer", slides]
    assert cache.get_max_length() == window
    for token in prompt(1, 30).split(1, dim=1):
        assert read(tiny_model("gemma3"), token, cache)[1].isfinite().all()


HOLES = {"a hole": [1, 0, 1, 1, 1, 1], "on the right": [1, 1, 1, 1, 0, 0], "both sides": [0, 1, 1, 1, 1, 0]}


@pytest.mark.parametrize("case", HOLES)
def test_padding_elsewhere_than_on_the_left_is_refused(case: str) -> None:
    """Masks go by position, and sinks stand at those of other tokens: such padding would be seen, or hide a sink."""
    model, ids, mask = tiny_model("llama"), prompt(1, 6), torch.tensor([HOLES[case]])
    given = kvlayers.SinkCache(20, 3, config=model.config)
    for how in ({"past_key_values": given}, NARROW):
        with pytest.raises(kvlayers.errors.StateMismatchError, match="padding on the left only"):
            generated(model, ids, attention_mask=mask, **how)
    assert given.get_seq_length() == 0
    text = generated(model, ids, past_key_values=given, tokens=4).sequences
    later = torch.cat([torch.ones_like(text), mask], dim=1)
    with pytest.raises(kvlayers.errors.StateMismatchError, match="padding on the left only"):
        generated(model, torch.cat([text, ids], dim=1), attention_mask=later, past_key_values=given)


def test_an_empty_cache_of_another_model_is_prepared_anew() -> None:
    llama, other = tiny_model("llama"), fresh_model("llama", seed=1)
    versions.set_rope_theta(other.config, 50.0)
    other.model.rotary_emb = type(other.model.rotary_emb)(other.config)
    seen = generated(other, prompt(1, 30), past_key_values=sink_cache(llama)).sequences
    assert torch.equal(seen, decoded(other, prompt(1, 30)))
    with pytest.raises(kvlayers.errors.ConfigError):
        generated(tiny_model("gpt2"), prompt(1, 30), past_key_values=sink_cache(llama))


def test_a_reset_forgets_the_padding_and_keeps_what_is_recorded() -> None:
    model, mask = tiny_model("llama"), torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
    cache = kvlayers.SinkCache(8, 2, config=model.config)
    cache.activate_past_recording()
    cache.prepare(model.config, mask)
    layer = cache.layers[0]
    assert (layer.record_past, layer.left_padding.tolist()) == (True, [5, 0])
    cache.reset()
    assert layer.left_padding is None
    cache.prepare(model.config)
    assert cache.layers[0] is layer
    unbound = kvlayers.SinkCache(8, 2, left_padding=[5, 0])
    unbound.reset()
    unbound.prepare(model.config)
    assert unbound.layers[0].left_padding is None


@pytest.mark.parametrize("mask", [torch.ones(3), torch.ones(2, 0), torch.ones(1, 1, 3, 3), "x"], ids=str)
def test_what_is_no_mask_is_refused(mask: Any) -> None:
    cache = kvlayers.SinkCache(8, 2)
    with pytest.raises(kvlayers.errors.StateMismatchError, match="`attention_mask` must be"):
        cache.prepare(tiny_model("llama").config, mask)
    assert not cache.layers
