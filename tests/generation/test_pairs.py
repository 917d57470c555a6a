"""Decoders that are given the output of an encoder: their cache is a pair, whatever its name or class.

Some make a pair of transformers' DynamicCache alone, by its class (BLIP, Whisper), and some of no cache (BERT): the
states of the encoder then came behind those of the text.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
import versions
from kvlayers.upstream import cache_argument
from matrix import once
from models import continued, under_install

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


@pytest.fixture(autouse=True)
def _runs() -> None:
    versions.need_since("5.0", "decoders that are given the output of an encoder")


def with_large_weights(model: Any) -> Any:
    """Random weights of the usual size give nearly the same token everywhere."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "vision" not in name:
                weight.mul_(6)
    return model.eval()


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    text = {**TEXT, "is_decoder": True, "add_cross_attention": True}
    gpt2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "eos_token_id": None}
    model: Any = {
        "bert": lambda: transformers.BertLMHeadModel(transformers.BertConfig(**text)),
        "rembert": lambda: transformers.RemBertForCausalLM(transformers.RemBertConfig(**text)),
        "bart": lambda: transformers.BartForCausalLM(transformers.BartConfig(**DECODER)),
        "whisper": lambda: transformers.WhisperForCausalLM(transformers.WhisperConfig(**DECODER)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2, add_cross_attention=True)),
    }[family]()
    return with_large_weights(model)


def call(family: str) -> dict[str, Any]:
    name = "encoder_outputs" if family == "whisper" else "encoder_hidden_states"
    return {name: ENCODED}


@torch.no_grad()
def by_full_passes(family: str, model: Any, tokens: int = 8) -> Tensor:
    ids = IDS
    for _ in range(tokens):
        logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False, **call(family)).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids


PASSED: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "int8": lambda config: kvlayers.QuantizedCache(config=config, nbits=8),
    "transformers' static": lambda config: transformers.StaticCache(config=config, max_cache_len=40),
}


@pytest.mark.parametrize(
    ("how", "family"),
    once(
        ["no name", "dynamic_full", "int8", "static", *(f"passed {name}" for name in PASSED)],
        ["bert", "rembert", "bart", "whisper", "gpt2"],
        times=2,
    ),
)
def test_a_decoder_with_the_output_of_an_encoder(how: str, family: str) -> None:
    if family == "rembert":
        versions.need_since("5.23", "RemBERT without a cache")
    model = model_of(family)
    asked: dict[str, Any] = {} if how == "no name" else {"cache_implementation": how}
    if how.startswith("passed"):
        asked = {"past_key_values": PASSED[how.removeprefix("passed ")](model.config)}
    found = under_install(continued, model, IDS, **call(family), **asked)
    assert torch.equal(found, by_full_passes(family, model))


def blip() -> tuple[Any, dict[str, Any]]:
    """A model that describes images, and a call of it."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**TEXT, "encoder_hidden_size": 32, "eos_token_id": 2, "sep_token_id": 2}
    config = transformers.BlipConfig(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, projection_dim=32
    )
    torch.manual_seed(0)
    images = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(3))
    model = with_large_weights(transformers.BlipForConditionalGeneration(config))
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
    model = model_of("bart")
    cache = kvlayers.DynamicCache(config=model.config)
    found = under_install(continued, model, IDS, 4, past_key_values=cache, return_dict_in_generate=True)
    assert cache_argument.in_output(found) is cache
