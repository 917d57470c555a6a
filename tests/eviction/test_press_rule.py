"""Presses of kvpress: as rules of eviction, and with their own hooks over caches of kvlayers."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
from kvlayers.upstream import cache_argument
from models import COMMON, given, prompt, read


@dataclass
class ScorerPress:
    """The contract of kvpress' presses that score."""

    compression_ratio: float = 0.0

    def score(self, module: Any, hidden: Any, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any) -> Tensor:
        raise NotImplementedError


class NormPress(ScorerPress):
    """Looks at keys."""

    def score(self, module: Any, hidden: Any, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any) -> Tensor:
        return -keys.norm(dim=-1)


class LastQueryPress(ScorerPress):
    """Looks at the last query, as kvpress computes it: projected and rotated."""

    def score(self, module: Any, hidden: Any, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any) -> Tensor:
        assert hidden.shape[1] > 64, "too few tokens"
        heads, kv_heads = module.config.num_attention_heads, module.config.num_key_value_heads
        query = module.q_proj(hidden[:, -1:]).view(-1, 1, heads, module.head_dim).transpose(1, 2)
        cos, sin = (each[:, -1:].unsqueeze(1) for each in kwargs["position_embeddings"])
        half = module.head_dim // 2
        query = query * cos + torch.cat([-query[..., half:], query[..., :half]], dim=-1) * sin
        seen = (query @ keys.repeat_interleave(heads // kv_heads, 1).transpose(2, 3)).softmax(-1)
        return seen.view(len(keys), kv_heads, -1, keys.shape[2]).mean(2)


class ProjectingPress(ScorerPress):
    """Needs the projection of keys."""

    def score(self, module: Any, hidden: Any, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any) -> Tensor:
        return -module.k_proj(hidden).norm(dim=-1)


@pytest.fixture
def kvpress_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("kvpress")
    module.ScorerPress = ScorerPress
    monkeypatch.setitem(sys.modules, "kvpress", module)


def model_of() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**COMMON, "max_position_embeddings": 1024})).eval()


def held_keys(model: Any, cache: Any, ids: Tensor) -> list[Tensor]:
    read(model, ids, cache)
    return [layer.keys for layer in cache.layers]


class Reference(kvlayers.eviction.EvictionRule):
    """What a press computes, by what a rule is given."""

    def __init__(self, press: ScorerPress) -> None:
        self.queries = 0 if isinstance(press, NormPress) else 1

    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        if queries is None:
            return -keys.norm(dim=-1)
        repeated = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
        seen = (queries[:, :, -1:] @ repeated.transpose(2, 3)).softmax(-1)
        return seen.view(*keys.shape[:2], -1, keys.shape[2]).mean(2)


@pytest.mark.parametrize("press", [NormPress(0.75), LastQueryPress(0.75)])
@pytest.mark.parametrize("how", [{"keep": 0.5}, {"budget": 100}])
def test_a_press_evicts_as_a_rule_with_its_scores(
    press: ScorerPress, how: dict[str, Any], kvpress_is_imported: None
) -> None:
    model, ids = model_of(), prompt(2, 300)
    options = {"per_head": False, "sink_tokens": 1, "recent_tokens": 2, **how}
    ours, theirs = (kvlayers.EvictingCache(model.config, rule=rule, **options) for rule in (press, Reference(press)))
    held = held_keys(model, ours, ids)
    assert {keys.shape[2] for keys in held} == {100 if "budget" in how else 150}
    torch.testing.assert_close(held, held_keys(model, theirs, ids), rtol=0, atol=0)
    # Later evictions know the queries since the last one alone, and may have fewer tokens than a press asserts.
    for index in range(80):
        seen, expected = (held_keys(model, cache, prompt(2, 1, seed=index)) for cache in (ours, theirs))
        assert [keys.shape for keys in seen] == [keys.shape for keys in expected]


def test_what_a_press_keeps_is_the_default(kvpress_is_imported: None) -> None:
    model = model_of()
    cache = kvlayers.EvictingCache(model.config, rule=NormPress(0.75), per_head=False, sink_tokens=1, recent_tokens=1)
    assert [keys.shape[2] for keys in held_keys(model, cache, prompt(1, 200))] == [50, 50]
    with kvlayers.installed():
        ids = model.generate(
            prompt(1, 200), max_new_tokens=5, cache_implementation="evicting", cache_config={"rule": NormPress(0.5)}
        )
    assert ids.shape == (1, 205)


def test_a_press_that_needs_more_of_the_model_is_refused(kvpress_is_imported: None) -> None:
    with pytest.raises(kvlayers.OptionError, match="got a ProjectingPress .*'k_proj'.*use it with kvpress itself"):
        kvlayers.EvictingCache(model_of().config, rule=ProjectingPress(0.5))
    with pytest.raises(kvlayers.OptionError, match="needs? .*name|register"):
        kvlayers.EvictingCache(model_of().config, rule=NormPress(0.5)).describe()
    with pytest.raises(kvlayers.OptionError, match="or a ScorerPress of kvpress, got a int"):
        kvlayers.EvictingCache(model_of().config, rule=3)


def test_without_kvpress_its_presses_are_no_rules() -> None:
    with pytest.raises(kvlayers.OptionError, match="got a NormPress"):
        kvlayers.EvictingCache(model_of().config, rule=NormPress(0.5))


@torch.no_grad()
def pressed(model: Any, cache: Any, ids: Tensor, kept: Tensor) -> Tensor:
    """Logits behind a prompt whose tokens were evicted as the hooks of kvpress do it, in any cache."""
    past = given(cache, model)
    model(ids, **past)
    for layer in cache.layers:
        if isinstance(cache, transformers.QuantizedCache):
            keys, values = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
            layer._quantized_keys = layer._quantize(keys[:, :, kept].contiguous(), axis=layer.axis_key)
            layer._quantized_values = layer._quantize(values[:, :, kept].contiguous(), axis=layer.axis_value)
            layer.keys = layer.values = torch.zeros(0, dtype=keys.dtype)
            layer.cumulative_length = len(kept)
        else:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    logits = [
        model(prompt(2, 1, seed=seed), position_ids=torch.full((2, 1), ids.shape[1] + seed), **past).logits
        for seed in range(70)
    ]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    ("backend", "nbits", "tolerance"), [("native", 8, 0.05), ("quanto", 4, 0.5), ("hqq", 8, 0.05), ("fp8", 8, 0.3)]
)
def test_what_kvpress_calls_of_quantized_layers_works(backend: str, nbits: int, tolerance: float) -> None:
    model, ids = model_of(), prompt(2, 300)
    kept = torch.randperm(300)[:150].sort().values
    expected = pressed(model, transformers.DynamicCache(config=model.config), ids, kept)
    cache = kvlayers.QuantizedCache(backend=backend, config=model.config, residual_length=32, nbits=nbits)
    seen = pressed(model, cache, ids, kept)
    assert [layer.keys.shape[2] for layer in cache.layers] == [220, 220]
    assert all(layer.bits and layer.store.blocks for layer in cache.layers)
    torch.testing.assert_close(seen, expected, rtol=0, atol=tolerance)
    # As its pipeline takes an answer back.
    layer = cache.layers[0]
    layer.keys, layer.values = layer.keys[:, :, :150], layer.values[:, :, :150]
    layer._quantized_keys, layer._quantized_values = (
        layer._quantized_keys[:, :, :150],
        layer._quantized_values[:, :, :150],
    )
    assert layer.keys.shape[2] == layer.length == 150


WITH_KVPRESS = ("KnormPress", "KeyDiffPress", "SnapKVPress", "TOVAPress", "LagKVPress", "CURPress", "StreamingLLMPress")
"""Presses that need no more than keys, values and queries."""

OWN_HOOKS = (*WITH_KVPRESS, "ExpectedAttentionPress", "LeverageScorePress", "NonCausalAttnPress", "PyramidKVPress")


@pytest.fixture
def kvpress() -> Any:
    return pytest.importorskip("kvpress", reason="kvpress cannot be imported", exc_type=ImportError)


@pytest.mark.parametrize("name", WITH_KVPRESS)
def test_a_press_of_kvpress_is_a_rule(name: str, kvpress: Any) -> None:
    model, ids = model_of(), prompt(1, 300)
    press: Callable[..., Any] = getattr(kvpress, name)
    cache = kvlayers.EvictingCache(model.config, rule=press(compression_ratio=0.5), budget=100)
    output = model.generate(ids, max_new_tokens=80, do_sample=False, **{cache_argument.name_in_generate(model): cache})
    assert output.shape == (1, 380)
    assert cache.nbytes < kvlayers.plan(model.config, 380, names=["dynamic"])["dynamic"].nbytes * 0.6


@pytest.mark.skipif(cache_argument.usual_name() == "cache", reason="kvpress does not find the cache in this version")
@pytest.mark.parametrize("name", OWN_HOOKS)
def test_presses_with_their_own_hooks_answer_alike_over_dynamic_caches(name: str, kvpress: Any) -> None:
    model, ids = model_of(), prompt(1, 300)

    def answer(cache: Any) -> Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            with getattr(kvpress, name)(compression_ratio=0.5)(model):
                model.model(input_ids=ids, past_key_values=cache)
            logits = [
                model(prompt(1, 1, seed=seed), past_key_values=cache, position_ids=torch.tensor([[300 + seed]])).logits
                for seed in range(10)
            ]
        return torch.cat(logits, dim=1)

    expected = answer(transformers.DynamicCache(config=model.config))
    assert torch.equal(answer(kvlayers.DynamicCache(config=model.config)), expected)
    packed = kvlayers.QuantizedCache(backend="native", config=model.config, nbits=8, residual_length=32)
    answer(packed)
    assert all(layer.length == layer.keys.shape[2] < 310 for layer in packed.layers)


def test_a_press_draws_no_random_numbers_of_the_caller(kvpress_is_imported: None) -> None:
    before = torch.get_rng_state()
    kvlayers.EvictingCache(rule=NormPress(0.5))
    assert torch.equal(torch.get_rng_state(), before)
