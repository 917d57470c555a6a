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
from matrix import product
from models import fresh_model, prompt

CHOICES = {
    "as they were": [0, 1, 2, 3, 4, 5],
    "within their prefix": [2, 2, 0, 3, 3, 5],
    "across prefixes": [5, 0, 3, 1, 1, 4],
    "unevenly": [0, 0, 0, 0, 5],
    "of one prefix": [4, 5],
    "of the other": [1],
}


@pytest.mark.parametrize(
    ("choice", "heads", "kv_heads", "mask", "queries", "dtype"),
    product(
        CHOICES, [(2, 2), (6, 2), (4, 1)], ["none", "bool", "float", "causal"], [1, 3], [torch.float32, torch.bfloat16]
    ),
)
def test_attention_is_that_over_all_of_it(
    choice: str, heads: int, kv_heads: int, mask: str, queries: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = DynamicLayer()
    layer.update(torch.randn(2, kv_heads, 50, 16, dtype=dtype), torch.randn(2, kv_heads, 50, 24, dtype=dtype))
    layer.expand(3)
    rows = CHOICES[choice]
    layer.update(torch.randn(6, kv_heads, 5, 16, dtype=dtype), torch.randn(6, kv_heads, 5, 24, dtype=dtype))
    layer.batch_select_indices(rows)
    new = (
        torch.randn(len(rows), kv_heads, queries, 16, dtype=dtype),
        torch.randn(len(rows), kv_heads, queries, 24, dtype=dtype),
    )
    keys, values = layer.update(*new)
    assert isinstance(keys, PackedStates)
    query = torch.randn(len(rows), heads, queries, 16, dtype=dtype)
    tokens = 55 + queries
    allowed = torch.rand(len(rows), 1, queries, tokens) > 0.3
    allowed[..., -1] = True
    options: dict[str, Any] = {
        "none": {},
        "bool": {"attn_mask": allowed},
        "float": {"attn_mask": torch.randn(len(rows), 1, queries, tokens, dtype=dtype)},
        "causal": {"is_causal": True},
    }[mask]
    seen = scaled_dot_product_attention(query, keys, values, enable_gqa=True, **options)
    if "attn_mask" in options and options["attn_mask"].dtype != torch.bool:
        options["attn_mask"] = options["attn_mask"].double()
    exact = scaled_dot_product_attention(
        query.double(), keys.dense().double(), values.dense().double(), enable_gqa=True, **options
    )
    # Sums are in float32; in bfloat16 the result is rounded once, to 8 bits.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(seen.double(), exact, **close)
    weights = torch.softmax(
        query.float() @ keys.repeat_interleave(heads // kv_heads, 1).transpose(2, 3).float() / 4, -1
    )
    plain = (query @ keys.repeat_interleave(heads // kv_heads, 1).transpose(2, 3)).float() / 4
    torch.testing.assert_close(torch.softmax(plain, -1), weights, rtol=2e-2, atol=2e-2)


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
