"""Evicting caches: their options, the models that they serve, copies, files, and compiled code."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
import versions
from families import model_of
from kvlayers import DynamicCache, EncoderDecoderCache, EvictingCache, OptionError, errors
from matrix import once
from models import given, prompt, tiny_model

OPTIONS: dict[str, Any] = {"keep": 0.4, "sink_tokens": 2, "recent_tokens": 8}
READ, TOKENS = 60, 8

BAD_OPTIONS = {
    "nothing kept": ({"keep": 0}, "`keep`.*got 0"),
    "more than all": ({"keep": 1.5}, "`keep`.*got 1.5"),
    "negative": ({"keep": -0.1}, "`keep`"),
    "a part in words": ({"keep": "half"}, "`keep`"),
    "a part that is true": ({"keep": True}, "`keep`"),
    "half a token of a budget": ({"budget": 100.5}, "budget"),
    "a budget below more protected tokens": ({"budget": 100, "recent_tokens": 97}, "from 101 to.*the 101 sinks"),
    "both": ({"keep": 0.5, "budget": 100}, "got both"),
    "a budget below the protected tokens": ({"budget": 67}, "from 68 to.*the 68 sinks and recent tokens"),
    "a budget in words": ({"budget": "many"}, "budget"),
    "no sinks": ({"sink_tokens": 0}, "`sink_tokens`"),
    "half a recent token": ({"recent_tokens": 0.5}, "`recent_tokens`"),
    "an unknown rule": ({"rule": "knrm"}, "knrm"),
    "a number as the rule": ({"rule": 3}, "`rule`"),
    "a rule that is a class": ({"rule": kvlayers.EvictingLayer}, "`rule`.*the class EvictingLayer: pass an instance"),
    "per_head in words": ({"per_head": "yes"}, "`per_head`"),
    "an unknown division": ({"layer_budgets": "cone"}, "layer_budgets"),
    "a negative weight": ({"layer_budgets": [1.0, -1.0]}, "layer_budgets"),
    "weights for other layers": ({"layer_budgets": [1.0, 1.0, 1.0]}, "layer_budgets"),
    "more tokens than torch counts": ({"budget": 2**64}, "`budget`.*to 16777216, got"),
    "more sinks than torch counts": ({"sink_tokens": 2**64}, "`sink_tokens`"),
    "quantization by a number": ({"quantization": 4}, "`quantization`"),
    "quantization with a misspelt option": ({"quantization": {"bits": 4}}, "Quantization.*nbits"),
    "rotary by a name": ({"rotary": "halves"}, "`rotary`"),
    "negative padding": ({"left_padding": [-1]}, "left_padding"),
    "a misspelt option": ({"keeps": 0.5}, "did you mean 'keep'"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EvictingCache(**{"config": tiny_model("llama").config, **options})


@torch.no_grad()
def read(model: Any, cache: Any, ids: torch.Tensor, prefill: int = READ) -> torch.Tensor:
    """Logits behind a prompt, and of the tokens after it, which come one by one."""
    passes = ids.split([prefill, *[1] * (ids.shape[1] - prefill)], dim=1)
    return torch.stack([model(part, **given(cache)).logits[:, -1] for part in passes if part.shape[1]], 1)


def test_a_layer_evicts_when_it_holds_64_tokens_more_than_its_budget() -> None:
    layer = kvlayers.EvictingLayer("knorm", budget=48, sink_tokens=4, recent_tokens=16, per_head=False)
    held = []
    for tokens in (100, *[1] * 130):
        layer.update(*torch.randn(2, 1, 2, tokens, 8))
        held.append(layer.held_tokens)
    assert held == [*range(48, 112), *range(48, 112), 48, 49, 50]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        *((family, "depends on how many tokens") for family in ("bloom", "t5")),
        *((family, "the layers of the model are") for family in ("mistral", "mamba", "recurrent_gemma")),
    ],
)
def test_models_whose_tokens_cannot_be_evicted_are_refused_by_name(family: str, message: str) -> None:
    if family == "recurrent_gemma":
        versions.need_since("5.1", "caches of recurrent_gemma")
    model = model_of(family)
    with pytest.raises(errors.ConfigError, match=message):
        EvictingCache(model.config, **OPTIONS)
    cache = EvictingCache(**OPTIONS)
    with pytest.raises(errors.ConfigError, match=message):
        cache.prepare(model.config)
    assert not cache.layers


@pytest.mark.parametrize(
    ("family", "rule"), once(["gemma3", "gemma3n", "gpt2", "bamba", "falcon_h1", "deepseek_v3"], ["keydiff", "snapkv"])
)
def test_a_model_is_served_with_all_tokens_kept_exactly(family: str, rule: str) -> None:
    model = model_of(family)
    if family == "deepseek_v3" and rule == "snapkv":
        if kvlayers.upstream.compat.CACHES_LATENTS:
            with pytest.raises(errors.ConfigError, match="'snapkv' needs queries.*'deepseek_v3' has multi-head latent"):
                EvictingCache(model.config, rule=rule, **OPTIONS)
        return
    ids = prompt(2, 30 + TOKENS)
    dense = read(model, DynamicCache(config=model.config), ids, 30)
    whole = EvictingCache(model.config, rule=rule, **{**OPTIONS, "keep": 1.0})
    assert torch.equal(read(model, whole, ids, 30), dense)
    cache = EvictingCache(model.config, rule=rule, **OPTIONS)
    assert read(model, cache, ids, 30).isfinite().all()
    held = [layer.parts[0].held_tokens for layer in cache.adapted_layers() if layer.fidelity == "evicting"]
    assert held
    assert all(tokens == 12 + TOKENS for tokens in held)
    assert cache.get_seq_length() == 30 + TOKENS


def test_a_decoder_evicts_beside_its_encoder() -> None:
    model, ids = tiny_model("bart"), prompt(1, 12)
    how = {"do_sample": False, "max_new_tokens": 90}
    dense = model.generate(ids, **how)
    pairs = [
        EncoderDecoderCache(EvictingCache(model.config, recent_tokens=8, **options), DynamicCache())
        for options in ({"keep": 1.0}, {"budget": 16})
    ]
    assert torch.equal(model.generate(ids, past_key_values=pairs[0], **how), dense)
    model.generate(ids, past_key_values=pairs[1], **how)
    assert all(layer.held_tokens <= 16 + 64 < layer.length for layer in pairs[1].self_attention_cache.layers)
    with pytest.raises(OptionError, match="EncoderDecoderCache"), kvlayers.installed():
        model.generate(ids, past_key_values=EvictingCache(model.config), **how)


# A packed store has sinks of its own, of another number than those of the layer.
PACKED = {"quantization": {"nbits": 8, "residual_length": 4, "sink_tokens": 10}}


@pytest.mark.parametrize(
    ("rule", "options"),
    once(["keydiff", "snapkv", "h2o"], [{}, {"per_head": False}, {"keep": None, "budget": 24}, PACKED], times=2),
)
def test_states_and_files_go_on(rule: str, options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    model, ids = tiny_model("llama"), prompt(2, READ + TOKENS)

    def make() -> EvictingCache:
        return EvictingCache(model.config, rule=rule, **{**OPTIONS, **options})

    cache = make()
    read(model, cache, ids[:, :READ])
    expected = read(model, cache.fork(), ids[:, READ:], 0)
    other = make()
    other.load_state(cache.state())
    kvlayers.save_cache(cache, tmp_path / "cache.safetensors", config=model.config)
    loaded = kvlayers.load_cache(tmp_path / "cache.safetensors")
    assert loaded.describe() == cache.describe()
    for twin in (other, loaded):
        torch.testing.assert_close(read(model, twin, ids[:, READ:], 0), expected, rtol=0, atol=1e-6)
    cache.reset()
    torch.testing.assert_close(read(model, cache, ids)[:, 1:], expected, rtol=0, atol=1e-6)


def test_a_state_of_other_options_is_refused() -> None:
    model, ids = tiny_model("llama"), prompt(1, READ)
    cache = EvictingCache(model.config, **OPTIONS)
    read(model, cache, ids)
    for changes in ({"keep": 0.5}, {"rule": "knorm"}, {"recent_tokens": 9}, {"per_head": False}):
        stranger = EvictingCache(model.config, **{**OPTIONS, **changes})
        with pytest.raises(errors.StateMismatchError):
            stranger.load_state(cache.state())
        assert stranger.get_seq_length() == 0


def test_a_rule_without_a_name_serves_and_is_not_saved(tmp_path: pathlib.Path) -> None:
    class Nameless(kvlayers.eviction.EvictionRule):
        """Has no name."""

        def scores(self, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
            return keys[..., 0]

    model = tiny_model("llama")
    cache = EvictingCache(model.config, rule=Nameless(), **OPTIONS)
    read(model, cache, prompt(1, READ))
    assert cache.layers[0].held_tokens == 24
    with pytest.raises(OptionError, match=r"Nameless.*register_eviction_rule"):
        kvlayers.save_cache(cache, tmp_path / "cache.safetensors")


MADE_FOR_A_CONFIG: dict[str, Callable[..., Any]] = {
    "a rule that needs the rotation": lambda **given: EvictingCache(rule="expected_attention", **OPTIONS, **given),
    "layers that keep other numbers": lambda **given: EvictingCache(layer_budgets="pyramid", **OPTIONS, **given),
    "sinks": lambda **given: kvlayers.SinkCache(24, 4, **given),
}


@pytest.mark.parametrize("make", MADE_FOR_A_CONFIG.values(), ids=MADE_FOR_A_CONFIG)
def test_a_cache_without_a_config_says_what_it_lacks_and_learns_it(make: Callable[..., Any]) -> None:
    model, ids, cache = tiny_model("llama"), prompt(1, READ + TOKENS), make()
    with pytest.raises(errors.ConfigError, match=r"prepare\(model.config\)"):
        model(ids, past_key_values=cache)
    assert not cache.get_seq_length()
    cache.prepare(model.config)
    assert torch.equal(read(model, cache, ids), read(model, make(config=model.config), ids))
    with pytest.raises(errors.StateMismatchError, match="68 tokens"):
        cache.prepare(model.config)


def test_a_rule_that_needs_no_config_is_given_none() -> None:
    model, ids = tiny_model("llama"), prompt(1, READ + TOKENS)
    expected = read(model, EvictingCache(model.config, **OPTIONS), ids)
    assert torch.equal(read(model, EvictingCache(**OPTIONS), ids), expected)


@pytest.mark.parametrize("make", MADE_FOR_A_CONFIG.values(), ids=MADE_FOR_A_CONFIG)
def test_padding_of_another_batch_is_refused_before_anything_is_changed(make: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    cache = make(config=model.config, left_padding=[0, 2, 1])
    with pytest.raises(errors.StateMismatchError, match="3 (entries|sequences)"):
        model(prompt(2, READ), past_key_values=cache)
    assert cache.get_seq_length() == 0


def attend(cache: EvictingCache, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One layer of a forward pass. To trace a whole model takes ten times as long."""
    tokens = query.shape[2]
    held = cache.update(keys, values, 0)
    mask = torch.ones(tokens, held[0].shape[2], dtype=torch.bool).tril(held[0].shape[2] - tokens)
    return scaled_dot_product_attention(query, *held, mask, enable_gqa=True)


@pytest.mark.parametrize("rule", ["keydiff", "snapkv"])
def test_compiled_attention_is_right_or_named(rule: str) -> None:
    plain, cache = (EvictingCache(tiny_model("llama", 1).config, rule=rule, **OPTIONS) for _ in range(2))
    compiled = torch.compile(attend, backend="eager")
    for tokens in (READ, 1, 1):
        states = (torch.randn(1, heads, tokens, 8) for heads in (4, 2, 2))
        query, keys, values = states
        expected = attend(plain, query, keys, values)
        if rule == "keydiff" or tokens > 1:
            torch.testing.assert_close(compiled(cache, query, keys, values), expected)
            continue
        with pytest.raises(errors.UnsupportedLayerError, match=r"'snapkv' needs the queries.*without torch\.compile"):
            compiled(cache, query, keys, values)
        assert cache.get_seq_length() == READ
    assert not cache.is_compileable
