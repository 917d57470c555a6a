"""Questions change nothing: room is made where tokens are taken in."""

import functools
from typing import Any

import pytest
import torch
import transformers
from transformers.models.mllama.configuration_mllama import MllamaConfig

import kvlayers
import versions
from agreement import same_state
from kvlayers.upstream import compat
from models import WINDOW, prompt, tiny_model

TEXT = 6
IMAGE_TOKENS = 10
"""Two tiles of four patches and a class token each: what cross-attention layers hold from the first pass on."""


ROPE: dict[str, Any] = (
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    if compat.ROPE_HAS_ONE_DICT
    # mllama reads a type, which others may leave out.
    else {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "default"}}
)


@functools.cache
def mllama() -> Any:
    """A small model in which two of four layers hold the tokens of an image."""
    torch.manual_seed(0)
    config = MllamaConfig(
        vision_config={
            "hidden_size": 16, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
            "intermediate_size": 32, "vision_output_dim": 32, "image_size": 28, "patch_size": 14, "max_num_tiles": 2,
            "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        text_config={
            "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 64, "cross_attention_layers": [1, 3], "pad_token_id": 0,
            "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": None,
            **ROPE,
        },
        image_token_index=63,
    )  # fmt: skip
    model = transformers.MllamaForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "gate" in name:
            # Closed at first: no image would be seen.
            torch.nn.init.constant_(parameter, 0.7)
    return model


def with_image(new_tokens: int, **how: Any) -> torch.Tensor:
    """Tokens that follow a prompt of `TEXT` tokens and an image."""
    ids = prompt(1, TEXT) % 60 + 1
    ids[0, 0] = 63
    output: torch.Tensor = mllama().generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=torch.randn(1, 1, 2, 3, 28, 28, generator=torch.Generator().manual_seed(1)),
        aspect_ratio_ids=torch.full((1, 1), 2),
        aspect_ratio_mask=torch.ones(1, 1, 2, dtype=torch.long),
        cross_attention_mask=torch.ones(1, TEXT, 1, 2, dtype=torch.long),
        max_new_tokens=new_tokens,
        do_sample=False,
        **how,
    )
    return output[:, TEXT:]


@pytest.mark.parametrize("options", [{}, {"compiled": True}, {"offloading": True}, {"grow": True}], ids=str)
def test_an_image_that_fills_its_layers_leaves_room_for_text(options: dict[str, Any]) -> None:
    config = mllama().config
    for reserved in (IMAGE_TOKENS, IMAGE_TOKENS + 6):
        fitting = reserved - TEXT + 1
        cache = kvlayers.StaticCache(config, reserved, **options)
        assert torch.equal(with_image(fitting, past_key_values=cache), with_image(fitting))
        assert [layer.length for layer in cache.layers] == [reserved, IMAGE_TOKENS] * 2


def test_an_image_larger_than_the_reservation_is_a_named_error() -> None:
    cache = kvlayers.StaticCache(mllama().config, IMAGE_TOKENS - 1)
    with pytest.raises(kvlayers.CapacityError, match=f"at most {IMAGE_TOKENS - 1} tokens, got 0 held and 10 new"):
        with_image(2, past_key_values=cache)


@pytest.mark.parametrize("name", ["static", "offloaded_static", "offloaded"])
def test_static_names_decode_beside_an_image(name: str, installed: None) -> None:
    if "static" in name:
        versions.need_since("5.23", "static caches that are sized for an image")
    if name == "offloaded_static" and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("transformers' offloading, which the model asks for, makes a stream of a GPU that is not there")
    # The model reserves for its image by itself. Text passes the image's number of tokens on its way.
    for new_tokens in (2, 5, 9):
        expected = with_image(new_tokens)
        assert torch.equal(with_image(new_tokens, cache_implementation=name), expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("capacities", [(8, 4), (8, 8), (4, 4)], ids=str)
@torch.no_grad()
def test_a_question_about_a_layer_with_room_is_answered_beside_a_full_one(
    capacities: tuple[int, int], compiled: bool
) -> None:
    layers = [kvlayers.StaticLayer(capacity) for capacity in capacities]
    cache, held = kvlayers.Cache(layers=layers), [min(capacities[0] - 1, capacities[1]), capacities[1]]
    for index, layer in enumerate(layers):
        layer.reserved.mask_extent.mode.compiled = compiled
        cache.update(*torch.randn(2, 1, 2, held[index], 8), index)
    assert cache.get_mask_sizes(1, 0)[0] >= cache.get_seq_length(0) + 1
    cache.update(*torch.randn(2, 1, 2, 1, 8), 0)
    with pytest.raises(kvlayers.CapacityError, match=f"at most {capacities[1]} tokens"):
        cache.update(*torch.randn(2, 1, 2, 1, 8), 1)
    assert [layer.length for layer in layers] == [held[0] + 1, held[1]]


CACHES: dict[str, Any] = {
    "static": lambda config: kvlayers.StaticCache(config, 64),
    "static that grows": lambda config: kvlayers.StaticCache(config, 9, grow=True),
    "static with buckets": lambda config: kvlayers.StaticCache(config, 64, compiled=True),
    "static, offloaded": lambda config: kvlayers.StaticCache(config, 64, offloading=True),
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "quantized": lambda config: kvlayers.QuantizedCache(config=config),
    "sink": lambda config: kvlayers.SinkCache(config=config, window_length=WINDOW, num_sink_tokens=2),
    "evicting": lambda config: kvlayers.EvictingCache(config=config, budget=16, recent_tokens=4),
}

QUESTIONS: dict[str, Any] = {
    "mask sizes": lambda asked: asked.get_mask_sizes(1, 0),
    "mask sizes of many": lambda asked: asked.get_mask_sizes(5, 0),
    "mask sizes of a layer": lambda asked: [layer.get_mask_sizes(1) for layer in asked.layers],
    "lengths": lambda asked: (asked.get_seq_length(0), asked.get_query_offset(0), asked.get_max_length()),
    "states": lambda asked: [(layer.keys, layer.values) for layer in asked.layers],
    "properties": lambda asked: (
        asked.nbytes, asked.batch_size, asked.is_initialized, asked.is_sliding, asked.is_compileable, repr(asked),
        [(layer.dtype, layer.device, layer.capacity, layer.nbytes) for layer in asked.layers],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in CACHES), *(("gemma3", kind) for kind in CACHES if "static" in kind)],
)
@torch.no_grad()
def test_questions_take_no_memory_and_change_no_state(kind: str, family: str) -> None:
    model = tiny_model(family)
    cache, untouched = CACHES[kind](model.config), CACHES[kind](model.config)
    for tokens in (9, 1, 3, 1):
        for name, ask in QUESTIONS.items():
            before = cache.storages()
            ask(cache)
            assert cache.storages() == before, name
        inputs = prompt(1, tokens, seed=tokens)
        expected = model(inputs, past_key_values=untouched).logits
        assert torch.equal(model(inputs, past_key_values=cache).logits, expected)
    assert all(map(same_state, cache.state().layers, untouched.state().layers))
