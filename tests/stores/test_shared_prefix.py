"""A prompt that is held once for all sequences that go on from it."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from kvlayers import DynamicCache, DynamicLayer
from kvlayers.kernels.attention.packed_tensor import PackedStates
from models import fresh_model, prompt


@pytest.mark.parametrize("queries", [1, 3])
def test_causal_attention_of_torch_is_that_over_all_of_it(queries: int) -> None:
    layer = DynamicLayer()
    layer.update(torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 24))
    layer.expand(3)
    keys, values = layer.update(torch.randn(6, 2, queries, 16), torch.randn(6, 2, queries, 24))
    assert isinstance(keys, PackedStates)
    query = torch.randn(6, 6, queries, 16)
    seen = scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    expected = scaled_dot_product_attention(query, keys.dense(), values.dense(), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


def loop(model: Any, cache: Any, ids: Tensor, steps: int) -> Tensor:
    found = []
    with torch.no_grad():
        for _ in range(steps):
            ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            found.append(ids)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *itertools.product(["llama", "qwen2", "gemma3", "mistral", "deepseek_v3", "gpt2"], ["sdpa", "eager"]),
        # transformers has no other attention for it.
        ("gemma2", "eager"),
    ],
)
def test_a_loop_over_an_expanded_cache_gives_the_same_tokens(family: str, attention: str) -> None:
    model = fresh_model(family)
    model.set_attn_implementation(attention)
    ids, first = prompt(2, 30), prompt(8, 1, seed=3)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        with torch.no_grad():
            model(ids, past_key_values=cache)
    caches[0].batch_repeat_interleave(4)
    caches[1].expand(4)
    assert torch.equal(loop(model, caches[0], first, 20), loop(model, caches[1], first, 20))
    assert caches[1].batch_size == 8


def test_expanding_an_empty_cache_or_by_one_changes_nothing() -> None:
    cache = DynamicCache()
    cache.expand(3)
    assert cache.batch_size == -1
    cache.update(*(torch.randn(2, 1, 4, 8) for _ in range(2)), 0)
    cache.expand(1)
    assert cache.batch_size == 2
    for bad in (0, -1, 1.5, "2"):
        with pytest.raises(kvlayers.KVLayersError):
            cache.expand(bad)
    assert cache.batch_size == 2


def test_states_of_another_form_are_refused_while_a_prefix_is_held() -> None:
    layer = DynamicLayer()
    layer.update(torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8))
    layer.expand(4)
    with pytest.raises(kvlayers.errors.StateMismatchError, match="batch size 4"):
        layer.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
    assert layer.length == 9


def test_gradients_reach_what_comes_behind_the_prefix() -> None:
    layer = DynamicLayer()
    layer.update(torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8))
    layer.expand(2)
    keys, values = (torch.randn(2, 2, 1, 8, requires_grad=True) for _ in range(2))
    seen_keys, seen_values = layer.update(keys, values)
    scaled_dot_product_attention(torch.randn(2, 2, 1, 8), seen_keys, seen_values).sum().backward()
    assert keys.grad.abs().sum() > 0
    assert values.grad.abs().sum() > 0
