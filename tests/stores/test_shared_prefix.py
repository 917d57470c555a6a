"""A prompt that is held once for all sequences that go on from it."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
from kvlayers import DynamicCache, DynamicLayer
from models import fresh_model, prompt


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
