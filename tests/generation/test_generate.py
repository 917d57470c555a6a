"""generate() returns the tokens that it returns with transformers' own caches, in every way of decoding."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import kvlayers
import versions
from kvlayers.generation import prefill
from kvlayers.upstream import cache_argument, generate_calls
from matrix import once, some
from models import (
    ATTENDING,
    CONFIGS,
    ENCODER_DECODERS,
    RECURRENT,
    continued,
    fresh_model,
    prompt,
    tiny_model,
    tokens_passed,
    under_install,
    with_larger_weights,
)

NEW_TOKENS = 14
LONG = 40
"""Tokens of a prompt that is computed once for its beams and samples."""
PADDED = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])

Arguments = dict[str, Any]
WAYS: dict[str, Arguments] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "sampled beams and several sequences": {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
    "chunked prefill": {"prefill_chunk_size": 5},
    "without a cache": {"use_cache": False},
}
NAMES = ("dynamic", "static", "hybrid_chunked")


def generate(family: str, ids: torch.Tensor, **arguments: Any) -> Any:
    # Made first: weights are random numbers too.
    model = tiny_model(family)
    torch.manual_seed(3)
    return continued(model, ids, NEW_TOKENS, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way"), once(CONFIGS, WAYS))
def test_tokens_are_those_of_transformers_in_every_way_of_decoding(family: str, way: str) -> None:
    if way == "chunked prefill" and family in (*ENCODER_DECODERS, *RECURRENT):
        pytest.skip("transformers prefills decoders of attention in chunks, and no others")
    ids = prompt(2, LONG)
    apart = versions.LEAVES_THE_CACHE_TO_MODELS and way == "chunked prefill"
    if apart and family in ("mistral", "gemma2", "gemma3", "llama4"):
        pytest.skip(f"transformers {versions.TRANSFORMERS} masks chunks of models with windows in a wrong way")
    expected = generate(family, ids, **WAYS["greedy" if apart else way])
    with kvlayers.installed():
        for name in ("hybrid", *NAMES) if WAYS[way].get("use_cache", True) else (None,):
            assert torch.equal(generate(family, ids, cache_implementation=name, **WAYS[way]), expected), name


PADDINGS: dict[str, tuple[torch.Tensor, Arguments]] = {
    # Twice the window, so that padding leaves it on the way.
    "of a few tokens": (PADDED, {}),
    "beams": (torch.nn.functional.pad(PADDED, (0, LONG - 12), value=1), {"num_beams": 2}),
    **{
        f"{padding} tokens": (torch.tensor([[0] * padding + [1] * (12 - padding), [1] * 12]), {}) for padding in (6, 10)
    },
}


@pytest.mark.parametrize(("family", "padding"), once(ATTENDING, PADDINGS))
def test_left_padding_stays_masked_in_full_windows_too(family: str, padding: str) -> None:
    mask, extra = PADDINGS[padding]
    ids = torch.where(mask == 1, prompt(2, mask.shape[1]), 0)
    expected = generate(family, ids, attention_mask=mask, **extra)
    with kvlayers.installed():
        for name in NAMES:
            seen = generate(family, ids, attention_mask=mask, cache_implementation=name, **extra)
            assert torch.equal(seen, expected), name


def caches_for(family: str) -> dict[str, Callable[[], kvlayers.Cache]]:
    config = tiny_model(family).config
    if family in ENCODER_DECODERS:
        return {
            "dynamic": lambda: kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache()),
            "static": lambda: kvlayers.EncoderDecoderCache(
                kvlayers.StaticCache(config, max_cache_len=64), kvlayers.DynamicCache()
            ),
        }
    return {
        "dynamic": lambda: kvlayers.DynamicCache(config=config),
        "dynamic without a config": lambda: kvlayers.DynamicCache(),
        "static": lambda: kvlayers.StaticCache(config, max_cache_len=80),
    }


@pytest.mark.parametrize("family", [*ATTENDING, *ENCODER_DECODERS])
def test_a_conversation_goes_on_from_the_cache_that_is_passed(family: str) -> None:
    ids = prompt(2)
    first = generate(family, ids)
    longer = torch.cat([first, prompt(2, 5, seed=9)], dim=1)
    expected = generate(family, longer) if family in ATTENDING else None
    for kind, make in caches_for(family).items():
        cache = make()
        output = generate(family, ids, past_key_values=cache, return_dict_in_generate=True)
        assert torch.equal(output.sequences, first), kind
        assert output.past_key_values is cache
        decoded = NEW_TOKENS if family in ENCODER_DECODERS else ids.shape[1] + NEW_TOKENS - 1
        assert cache.get_seq_length() == decoded
        if expected is not None:
            assert torch.equal(generate(family, longer, past_key_values=cache), expected), kind


# With full attention and windows, with chunks, with latents, and with positions of their own.
@pytest.mark.parametrize("family", some(ATTENDING, ["gemma3", "llama4", "deepseek_v3", "gpt2"]))
def test_prompt_lookup_and_a_draft_model_change_no_token(family: str) -> None:
    # A prompt that repeats itself, so that look-up finds drafts, and a draft that is wrong often enough to roll back.
    ids = torch.cat([prompt(1, 6)] * 4, dim=1)
    expected = generate(family, ids)

    def checked(**how: Any) -> Any:
        output = generate(family, ids, return_dict_in_generate=True, **how)
        # Until 5.13, look-up may go on beyond the length that is asked for.
        assert torch.equal(output.sequences[:, : expected.shape[1]], expected)
        cache = output.past_key_values
        assert type(cache).__module__.startswith("kvlayers")
        assert cache.get_seq_length() == output.sequences.shape[1] - 1
        return cache

    look_up = {"prompt_lookup_num_tokens": 4}
    with kvlayers.installed():
        for name, drafting in itertools.product(NAMES, (look_up, {"assistant_model": tiny_model(family, seed=1)})):
            cache = checked(cache_implementation=name, **drafting)
            assert not any(layer.is_recording for layer in cache.adapted_layers())
    with versions.recording():
        for make in caches_for(family).values():
            checked(past_key_values=make(), **look_up)


@pytest.mark.parametrize(("made_for", "given_to"), [("gemma3", "llama"), ("mistral", "qwen2"), ("gemma3", "gemma2")])
def test_a_cache_with_windows_of_another_model_is_refused(made_for: str, given_to: str) -> None:
    """Its windows would forget what the model attends to, and the tokens would be others, without a word."""
    cache = kvlayers.DynamicCache(config=tiny_model(made_for).config)
    model = tiny_model(given_to)
    with kvlayers.installed(), pytest.raises(kvlayers.errors.ConfigError, match="made for another model"):
        model.generate(prompt(), past_key_values=cache, max_new_tokens=4)
    assert cache.get_seq_length() == 0


SPECIAL = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": versions.NO_END}


def test_a_cache_that_is_given_is_used_though_the_config_says_otherwise() -> None:
    # As that of MPT does. transformers then passes the whole sequence to the cache at every step.
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "expansion_ratio": 2}
    model, ids = (
        with_larger_weights(transformers.MptForCausalLM(transformers.MptConfig(**sizes, **SPECIAL)).eval()),
        prompt(2, 12),
    )
    how = {"return_dict_in_generate": True, "output_logits": True}
    expected = continued(model, ids, 4, use_cache=False, **how)
    assert model.generation_config.use_cache is False
    for cache in (kvlayers.DynamicCache(config=model.config), kvlayers.QuantizedCache(config=model.config)):
        output = under_install(continued, model, ids, 4, past_key_values=cache, **how)
        assert cache.get_seq_length() == 15
        torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-5)
    assert model.generation_config.use_cache is False


def test_a_static_cache_that_a_model_is_given_masks_of_all_slots_for_is_refused_by_name() -> None:
    config = transformers.BloomConfig(hidden_size=32, n_head=4, n_layer=2, **SPECIAL)
    model = with_larger_weights(transformers.BloomForCausalLM(config).eval())
    ids, cache = prompt(2, 12), kvlayers.StaticCache(model.config, max_cache_len=32)
    expected = continued(model, ids, 4, use_cache=False)
    with kvlayers.installed():
        # Nor is it compiled around.
        for more in ({}, {"compile_config": transformers.CompileConfig(backend="eager")}):
            assert torch.equal(continued(model, ids, 4, cache_implementation="static", **more), expected)
        if generate_calls.masks_the_whole_reservation(model):
            with pytest.raises(kvlayers.errors.ConfigError, match="cache_implementation='static'"):
                continued(model, ids, 4, past_key_values=cache)
        else:
            assert torch.equal(continued(model, ids, 4, past_key_values=cache), expected)


# A prompt is computed and held once for all of its beams or samples.

REPEATING: dict[str, Arguments] = {
    "beams": {"num_beams": 4},
    "several beams returned": {"num_beams": 4, "num_return_sequences": 3},
    "samples": {"num_return_sequences": 5, "do_sample": True},
    "sampled beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
}


def repeated(model: Any, ids: torch.Tensor, **how: Any) -> Any:
    torch.manual_seed(0)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return continued(model, ids, 20, attention_mask=mask, pad_token_id=0, return_dict_in_generate=True, **how)


@versions.prefills_apart
@pytest.mark.parametrize("way", REPEATING)
def test_the_model_reads_each_prompt_once_and_the_cache_holds_it_once(way: str) -> None:
    model, ids, how = tiny_model("llama"), prompt(2, LONG), REPEATING[way]
    with kvlayers.installed(), tokens_passed(model) as passed:
        output = repeated(model, ids, **how)
    repeats = max(how.get("num_beams", 1), how.get("num_return_sequences", 1))
    assert passed == [2 * LONG, *[2 * repeats] * (len(passed) - 1)]
    assert all(layer.store.pieces(LONG + 1)[0].rows is not None for layer in output.past_key_values.layers)
    assert torch.equal(output.sequences, repeated(model, ids, **how).sequences)


KINDS: dict[str, tuple[str, Arguments, Arguments]] = {
    "packed": ("llama", {}, {"cache_implementation": "quantized", "cache_config": {"nbits": 4, "residual_length": 8}}),
    "sinks": (
        "llama",
        {},
        {"cache_implementation": "sink", "cache_config": {"window_length": 100, "num_sink_tokens": 4}},
    ),
    # Longer than the prompt.
    "windows": ("mistral", {"sliding_window": 150}, {}),
}


@versions.prefills_apart
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["beams", "samples"])
def test_other_caches_hold_a_prompt_once_too(
    kind: str, way: str, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes, options = KINDS[kind]
    model, ids = fresh_model(family, **changes), prompt(2, 120)
    held_once = repeated(model, ids, **options, **REPEATING[way])
    monkeypatch.setattr(prefill, "MIN_TOKENS", 1000)
    held_by_each = repeated(model, ids, **options, **REPEATING[way])
    assert torch.equal(held_once.sequences, held_by_each.sequences)
    # Less than half of the tokens are those of the prompts.
    assert held_once.past_key_values.nbytes < 0.6 * held_by_each.past_key_values.nbytes


@pytest.mark.parametrize(
    ("tokens", "how"),
    [(12, {}), (LONG, {"cache_implementation": "static"}), (LONG, {"output_hidden_states": True})],
    ids=["short", "static", "hidden states"],
)
def test_other_prompts_are_left_to_transformers(tokens: int, how: Arguments, installed: None) -> None:
    model = tiny_model("llama")
    with tokens_passed(model) as passed:
        repeated(model, prompt(1, tokens), num_beams=3, **how)
    assert passed[0] == 3 * tokens


# A model that speaks: its loop asks for the hidden states of a prompt by itself.


def speaking_model() -> Any:
    """A random model that speaks (CSM): its loop asks for the hidden states of a prompt, for a decoder of codes."""
    versions.need_since("5.4", "CSM with the caches of generate()")
    attends = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    codes = {"num_codebooks": 4, "vocab_size": 32, "num_key_value_heads": 2}
    mimi = {
        "num_filters": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "upsample_groups": 16,
        "intermediate_size": 16, "codebook_size": 32, "model_type": "mimi", "vector_quantization_hidden_dimension": 8,
        "upsampling_ratios": [2, 2], "num_quantizers": 4, "num_semantic_quantizers": 1,
    }  # fmt: skip
    config = transformers.CsmConfig(
        **attends, **codes, text_vocab_size=97, pad_token_id=0, codebook_pad_token_id=31, audio_token_id=90,
        audio_eos_token_id=91, depth_decoder_config={**attends, **codes, "backbone_hidden_size": 32}, codec_config=mimi,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.CsmForConditionalGeneration(config).eval()
    model.depth_decoder.generation_config.update(min_new_tokens=3, max_new_tokens=3)
    return model


def test_a_loop_that_asks_for_hidden_states_reads_a_prompt_for_each_of_its_samples() -> None:
    model, ids = speaking_model(), prompt(2, 40)
    for prompts, how in ((ids, {"num_return_sequences": 2, "do_sample": True}), (ids[[0, 0, 1, 1]], {})):
        torch.manual_seed(0)
        expected = continued(model, prompts, 3, **how)
        torch.manual_seed(0)
        assert torch.equal(under_install(continued, model, prompts, 3, **how), expected)


# Decoders that are given the output of an encoder: their cache is a pair, whatever its name or class.
# Some make a pair of transformers' DynamicCache alone, by its class (BLIP, Whisper), and some of no cache (BERT): the
# states of the encoder then came behind those of the text.

ENCODED = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[1, 5, 6, 7], [1, 8, 9, 4]])
TEXT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
DECODER = {
    "vocab_size": 99, "d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "max_position_embeddings": 64,
    "eos_token_id": None, "pad_token_id": 0, "forced_eos_token_id": None, "begin_suppress_tokens": None,
}  # fmt: skip
CROSSING = {"is_decoder": True, "add_cross_attention": True}
DECODERS: dict[str, tuple[type, type, Arguments]] = {
    "bert": (transformers.BertLMHeadModel, transformers.BertConfig, {**TEXT, **CROSSING}),
    "rembert": (transformers.RemBertForCausalLM, transformers.RemBertConfig, {**TEXT, **CROSSING}),
    "bart": (transformers.BartForCausalLM, transformers.BartConfig, DECODER),
    "whisper": (transformers.WhisperForCausalLM, transformers.WhisperConfig, DECODER),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, **CROSSING},
    ),
}


def decoder_of(family: str) -> Any:
    versions.need_since("5.23" if family == "rembert" else "5.0", "decoders that are given the output of an encoder")
    model_class, config_class, options = DECODERS[family]
    return with_larger_weights(model_class(config_class(**options)).eval())


@torch.no_grad()
def by_full_passes(model: Any, encoded: Arguments, tokens: int = 8) -> torch.Tensor:
    ids = IDS
    for _ in range(tokens):
        logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False, **encoded).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids


ASKED: dict[str, Callable[[Any], Arguments]] = {
    "no name": lambda config: {},
    "dynamic_full": lambda config: {"cache_implementation": "dynamic_full"},
    "int8": lambda config: {"cache_implementation": "int8"},
    "static": lambda config: {"cache_implementation": "static"},
    "passed dynamic": lambda config: {"past_key_values": kvlayers.DynamicCache(config=config)},
    "passed int8": lambda config: {"past_key_values": kvlayers.QuantizedCache(config=config, nbits=8)},
    "passed transformers' static": lambda config: {
        "past_key_values": transformers.StaticCache(config=config, max_cache_len=40)
    },
}


@pytest.mark.parametrize(("how", "family"), once(ASKED, DECODERS, times=2))
def test_a_decoder_with_the_output_of_an_encoder(how: str, family: str) -> None:
    model, encoded = decoder_of(family), {"encoder_hidden_states": ENCODED}
    if family == "whisper":
        encoded = {"encoder_outputs": ENCODED}
    found = under_install(continued, model, IDS, **encoded, **ASKED[how](model.config))
    assert torch.equal(found, by_full_passes(model, encoded))


def blip() -> tuple[Any, Arguments]:
    """A model that describes images, and a call of it."""
    versions.need_since("5.0", "BLIP with caches")
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**TEXT, "encoder_hidden_size": 32, "eos_token_id": 2, "sep_token_id": 2}
    config = transformers.BlipConfig(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, projection_dim=32
    )
    images = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(3))
    model = with_larger_weights(transformers.BlipForConditionalGeneration(config).eval())
    asked = {"input_ids": torch.tensor([[1, 5, 6, 2]]), "pixel_values": images}
    return model, {**asked, "max_new_tokens": 10, "do_sample": False}


@pytest.mark.parametrize(("cache", "beams"), once([None, "int8", "dynamic_full", "static", "offloaded"], [1, 2]))
def test_captions(cache: str | None, beams: int) -> None:
    """By the name of a call, and by the name for programs that give none."""
    model, asked = blip()
    asked = {**asked, "num_beams": beams}
    expected = model.generate(**asked, use_cache=False)
    with kvlayers.installed():
        assert torch.equal(model.generate(**asked, cache_implementation=cache), expected)
    with kvlayers.installed(cache=cache):
        assert torch.equal(model.generate(**asked), expected)


@pytest.mark.skipif(not versions.compat.MARKS_GIVEN_CACHES, reason="before 5.17 nothing says that a cache was given")
@pytest.mark.parametrize("kind", [kvlayers.QuantizedCache, kvlayers.EvictingCache])
def test_a_cache_that_is_no_pair_is_refused_without_install(kind: type[kvlayers.Cache]) -> None:
    """The model makes a pair of transformers' DynamicCache alone; any other would hold the image behind the text."""
    model, asked = blip()
    config = model.config.text_config
    with pytest.raises(kvlayers.errors.UnsupportedLayerError, match="must be given a pair of caches"):
        model.generate(**asked, past_key_values=kind(config=config))
    expected = model.generate(**asked, use_cache=False)
    assert torch.equal(model.generate(**asked, past_key_values=kvlayers.DynamicCache(config=config)), expected)


def test_text_alone_needs_no_pair() -> None:
    """The decoder of BART without an encoder's output reads a plain cache."""
    model = decoder_of("bart")
    cache = kvlayers.DynamicCache(config=model.config)
    found = under_install(continued, model, IDS, 4, past_key_values=cache, return_dict_in_generate=True)
    assert cache_argument.in_output(found) is cache
