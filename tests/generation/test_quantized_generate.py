"""generate() with quantized caches: attention on codes gives the tokens that it gives on the states they stand for.

The reference is the same cache with layers that return their states in full precision, so that all attention is that
of torch. Codes are equal then, and sums differ in their order alone; at 8 bits, tokens are those of no quantization.
"""

import functools
from typing import Any

import pytest
import torch
import transformers

import kvlayers
import versions
from kvlayers.kernels.attention import segments
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.attention.packed_tensor import as_dense
from matrix import once
from models import ATTENDING, ENCODER_DECODERS, fresh_model, prompt, tiny_model, under_install

SMALL: dict[str, Any] = {"residual_length": 16, "sink_tokens": 4}
TOKENS = 140
"""Of a prompt: 4 sinks, one block, and 72 tokens in the residual, which has room for 16 and a block."""
NEW_TOKENS = 14

SEEDS = {
    "llama": 3,
    "qwen2": 15,
    "mistral": 10,
    "gemma2": 15,
    "gemma3": 1,
    "llama4": 12,
    "gpt2": 8,
    "deepseek_v3": 0,
    "jamba": 0,
    "qwen3": 0,
    # transformers 4 draws other weights of it, for which another prompt has no near ties.
    "t5": 4 if versions.TRANSFORMERS.major < 5 else 2,
    "bart": 8,
}
"""Prompts whose greedy tokens are ahead of the others by several times the error of 8 bits."""
DECODERS = (*ATTENDING, "jamba")
WIDE = 100
"""A window with room for blocks: those of the tiny models are shorter than a block."""
WIDE_SEEDS = {"mistral": 3, "gemma2": 13, "gemma3": 0, "llama4": 7}
"""As `SEEDS`, for wide windows."""


class ReadDensely:
    """A layer whose states come in full precision, whoever reads them."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(as_dense(states) for states in super().update(key_states, value_states))

    @property
    def keys(self) -> torch.Tensor | None:
        return as_dense(super().keys)

    @property
    def values(self) -> torch.Tensor | None:
        return as_dense(super().values)


READ_DENSELY = {
    kind: type(f"Dense{kind.__name__}", (ReadDensely, kind), {})
    for kind in (kvlayers.QuantizedLayer, kvlayers.SlidingLayer)
}


def quantized(model: Any, **options: Any) -> Any:
    """A cache for a model, with few tokens in full precision; a pair of them where there is cross-attention."""

    def make() -> kvlayers.QuantizedCache:
        return kvlayers.QuantizedCache(config=model.config, **{"nbits": 4, **SMALL, **options})

    return kvlayers.EncoderDecoderCache(make(), make()) if model.config.is_encoder_decoder else make()


def reference(model: Any, **options: Any) -> Any:
    cache = quantized(model, **options)
    for part in cache.parts() if model.config.is_encoder_decoder else (cache,):
        for index, layer in enumerate(part.layers):
            if type(layer) in READ_DENSELY:
                part.layers[index] = READ_DENSELY[type(layer)].__new__(READ_DENSELY[type(layer)])
                vars(part.layers[index]).update(vars(layer))
    return cache


def inputs(family: str) -> dict[str, torch.Tensor]:
    """Prompts long enough that blocks are packed, of the decoder where there is one."""
    seed = SEEDS[family]
    if family in ENCODER_DECODERS:
        return {"input_ids": prompt(2, 200, seed), "decoder_input_ids": prompt(2, TOKENS, seed + 50)}
    return {"input_ids": prompt(2, TOKENS, seed)}


def generated(model: Any, given: dict[str, torch.Tensor], **arguments: Any) -> Any:
    torch.manual_seed(3)
    defaults: dict[str, Any] = {
        "attention_mask": torch.ones_like(given["input_ids"]),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    return model.generate(**{**defaults, **given, **arguments})


def assert_same_logits(seen: Any, expected: Any) -> None:
    """Compared until the next tokens are packed, 8 later: where states differ by the order of a sum, codes may too."""
    pair = (torch.stack(output.logits)[:8].nan_to_num() for output in (seen, expected))
    # Sums of float32 in another order: logits are a few units, those of T5, which does not scale its scores, about ten.
    torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)


def blocks(layer: Any) -> int:
    """Packed blocks that a layer holds."""
    tensors = layer.state().tensors
    return len(tensors["block_ends"]) - 1 if "block_ends" in tensors else 0


def check_packed(cache: Any, at_least: int = 1) -> None:
    """Every layer of full attention, and no window, holds packed blocks."""
    layers = [layer for layer in cache.layers if layer.traits.attends]
    assert layers
    for layer in layers:
        assert blocks(layer) == 0 if layer.is_sliding else blocks(layer) >= at_least, layer


@functools.cache
def attending_by(implementation: str, family: str) -> Any:
    """The tiny model with an implementation of attention."""
    model = fresh_model(family)
    try:
        model.set_attn_implementation(implementation)
    except ValueError:
        pytest.skip(f"transformers has no {implementation} attention for {type(model).__name__}")
    return model


@functools.cache
def wide_model(family: str) -> Any:
    """The tiny model with windows that blocks fit into."""
    return fresh_model(family, **{"attention_chunk_size" if family == "llama4" else "sliding_window": WIDE})


BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("", {"nbits": 8}),
    "native, 2 bits": ("", {"nbits": 2}),
    "native, 3 bits": ("", {"nbits": 3}),
    "native, keys and values apart": ("", {"key_nbits": 8, "value_nbits": 2, "value_group_size": 4}),
    "quanto": ("optimum.quanto", {"nbits": 4}),
    "quanto, axis -1": ("optimum.quanto", {"nbits": 2, "axis_key": -1, "axis_value": -1, "q_group_size": 16}),
    "hqq": ("hqq", {"nbits": 4}),
    "HQQ, axis 0": ("hqq", {"nbits": 1, "axis_key": 0, "axis_value": 0, "q_group_size": 32}),
}


@pytest.mark.parametrize(("case", "implementation"), once(BACKENDS, ["sdpa", "eager"]))
def test_every_backend_gives_the_tokens_of_its_states_in_full_precision(case: str, implementation: str) -> None:
    package, options = BACKENDS[case]
    if package:
        pytest.importorskip(package, reason=f"{package} computes these codes")
    model, given, backend = attending_by(implementation, "llama"), inputs("llama"), case.split(",")[0]
    options = {"nbits": 4, **SMALL, "backend": backend, **options}
    expected = generated(model, given, past_key_values=reference(model, **options))
    seen = under_install(generated, model, given, cache_implementation="quantized", cache_config=options)
    assert torch.equal(seen.sequences, expected.sequences)
    check_packed(seen.past_key_values, at_least=2)
    assert seen.past_key_values.layers[0].describe()["backend"] == backend.lower()


# Windows


@pytest.mark.parametrize(("packs", "way"), [(False, "greedy"), (True, "greedy"), (True, "look-up")])
@pytest.mark.parametrize("family", WIDE_SEEDS)
def test_windows_stay_in_full_precision_unless_asked(family: str, packs: bool, way: str) -> None:
    model, options = wide_model(family), {"quantize_sliding": packs, "residual_length": 8, "sink_tokens": 4}
    repeating = torch.cat([prompt(1, 35)] * 4, dim=1)
    given = {"input_ids": repeating if way == "look-up" else prompt(2, TOKENS, seed=WIDE_SEEDS[family])}
    with versions.recording():
        expected = generated(model, given, past_key_values=reference(model, **options), **WAYS[way])
        seen = under_install(
            generated, model, given, cache_implementation="quantized", cache_config=options, **WAYS[way]
        )
    packed = {layer.is_sliding: blocks(layer) > 0 for layer in seen.past_key_values.layers}
    assert (packed[True], packed.get(False, True)) == (packs, True)
    windows = [layer.describe() for layer in seen.past_key_values.layers if layer.is_sliding]
    # A window drops its oldest tokens: none of them is a sink.
    assert not any(described.get("sink_tokens") for described in windows)
    assert torch.equal(seen.sequences, expected.sequences)


# Encoders and decoders


@pytest.mark.parametrize(
    ("family", "arguments", "implementation"), once(ENCODER_DECODERS, [{}, {"num_beams": 3}], ["sdpa", "eager"])
)
def test_cross_attention_is_quantized_once(family: str, arguments: dict[str, Any], implementation: str) -> None:
    model, given = attending_by(implementation, family), inputs(family)
    cache, codes = quantized(model), []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        codes.append([layer.state() for layer in cache.cross_attention_cache.layers])
        return scores

    expected = generated(model, given, past_key_values=reference(model), **arguments)
    seen = generated(model, given, past_key_values=cache, logits_processor=[watch], **arguments)
    assert torch.equal(seen.sequences, expected.sequences)
    assert_same_logits(seen, expected)
    assert seen.past_key_values is cache
    assert cache.get_seq_length() == seen.sequences.shape[1] - 1
    assert cache.cross_attention_cache.get_seq_length() == 200
    for part in cache.parts():
        check_packed(part, at_least=2)
    assert len(codes) == NEW_TOKENS
    for step in codes[1:]:
        for layer, first in zip(step, codes[0], strict=True):
            assert {"keys_codes", "values_codes"} < set(layer.tensors) == set(first.tensors)
            # Bit for bit, where beams of one prompt are copies of each other.
            assert [name for name, own in layer.tensors.items() if not torch.equal(own, first.tensors[name])] == []


# Ways of decoding

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams and several sequences": {"num_beams": 4, "num_return_sequences": 2},
    "chunked prefill": {"prefill_chunk_size": 50},
    "left padding": {},
    "beams and left padding": {"num_beams": 2},
    "look-up": {"prompt_lookup_num_tokens": 4},
    "a draft model": {},
}
FOR_ATTENTION = ("left padding", "beams and left padding", "look-up", "a draft model")
"""Ways of models whose layers all attend: no recurrent state is padded, or taken back."""


def padded(family: str) -> dict[str, torch.Tensor]:
    mask = torch.stack([(torch.arange(TOKENS) >= TOKENS - length).long() for length in (TOKENS, 120, 101)])
    return {"input_ids": torch.where(mask == 1, prompt(3, TOKENS, SEEDS[family]), 0), "attention_mask": mask}


def given_and_how(family: str, way: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The prompts and the arguments of a way of decoding."""
    if way == "chunked prefill" and family == "jamba":
        pytest.skip("transformers prefills decoders of attention in chunks, and no others")
    if way not in ("look-up", "a draft model"):
        return padded(family) if "padding" in way else inputs(family), WAYS[way]
    # A prompt that repeats itself, so that look-up finds drafts, some of them wrong.
    given = {"input_ids": torch.cat([prompt(1, 35, SEEDS[family])] * 4, dim=1)}
    if way == "look-up":
        return given, WAYS[way]
    if family == "gemma3":
        versions.need_since("5.23", "a draft of gemma3 behind its window, in a cache of transformers")
    return given, {"assistant_model": tiny_model(family, seed=1)}


DENSE = segments.KVSegments.dense


def dense_alone(held: segments.KVSegments, *args: Any) -> torch.Tensor:
    """In the place of `KVSegments.dense`: attention brings no packed tokens to full precision."""
    assert held.are_dense
    return DENSE(held, *args)


@pytest.mark.parametrize(
    ("family", "implementation", "way"),
    [
        *once([*DECODERS, *ENCODER_DECODERS], ["sdpa", "eager"], ["greedy"]),
        *once(DECODERS, ["sdpa"], [way for way in WAYS if way not in ("greedy", *FOR_ATTENTION)]),
        *once(ATTENDING, ["sdpa"], FOR_ATTENTION),
    ],
)
def test_every_way_of_decoding_gives_the_tokens_of_states_in_full_precision(
    family: str, implementation: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (given, how) = attending_by(implementation, family), given_and_how(family, way)
    with versions.recording():
        expected = generated(model, given, past_key_values=reference(model), **how)
        # Latents are copied for each product of eager attention, and others are read by a kernel.
        if way == "greedy" and (implementation == "sdpa" or (family != "deepseek_v3" and kernel.library() is not None)):
            monkeypatch.setattr(segments.KVSegments, "dense", dense_alone)
        seen = under_install(generated, model, given, cache_implementation="quantized", cache_config=SMALL, **how)
    cache = seen.past_key_values
    assert type(cache.self_attention_cache if family in ENCODER_DECODERS else cache) is kvlayers.QuantizedCache
    assert torch.equal(seen.sequences, expected.sequences)
    check_packed(cache, at_least=2 if way == "greedy" else 1)
    assert cache.get_seq_length() == seen.sequences.shape[1] - 1
    if way == "greedy":
        assert_same_logits(seen, expected)


@pytest.mark.parametrize("family", [family for family in ATTENDING if family != "mistral"])
def test_at_8_bits_a_cache_that_makes_its_layers_as_it_goes_gives_the_tokens_of_no_quantization(family: str) -> None:
    model, given, cache = tiny_model(family), inputs(family), kvlayers.QuantizedCache(nbits=8, **SMALL)
    expected = generated(model, given, past_key_values=transformers.DynamicCache(config=model.config))
    assert torch.equal(generated(model, given, past_key_values=cache).sequences, expected.sequences)
    # Every layer is taken for full attention.
    assert [blocks(layer) for layer in cache.layers] == [2] * model.config.num_hidden_layers
