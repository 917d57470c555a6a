"""Decode steps on a GPU whose torch prefers cuDNN call flash attention. On meta tensors: which operator is called."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import kvlayers
from kvlayers.attention.cuda import flash

FLASH = "aten._scaled_dot_product_flash_attention.default"
KV_HEADS, HEADS, HEAD_DIM = 2, 8, 64


@pytest.fixture(autouse=True)
def cudnn_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "replaces_cudnn", lambda states: states.is_meta)


def states(tokens: int, heads: int = KV_HEADS) -> Tensor:
    return torch.empty(2, heads, tokens, HEAD_DIM, dtype=torch.bfloat16, device="meta")


class Operators(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def calls_flash(keys: Tensor, values: Tensor, queries: int = 1, **options: object) -> bool:
    query = states(queries, HEADS).requires_grad_(bool(options.pop("gradients", False)))
    with Operators() as operators:
        out = scaled_dot_product_attention(query, keys, values, enable_gqa=True, **options)
    assert out.shape == (2, HEADS, queries, HEAD_DIM)
    return FLASH in operators.names


CACHES = {
    "dynamic": lambda: kvlayers.DynamicCache(),
    "static": lambda: kvlayers.Cache(layers=[kvlayers.StaticLayer(64)]),
    "sliding": lambda: kvlayers.Cache(layers=[kvlayers.SlidingLayer(16)]),
    "static sliding": lambda: kvlayers.Cache(layers=[kvlayers.StaticSlidingLayer(max_cache_len=64, sliding_window=16)]),
    "quantized, before the first block": lambda: kvlayers.QuantizedCache(),
}


@pytest.mark.parametrize("name", CACHES)
def test_each_step_of_a_full_precision_cache_calls_flash_attention(name: str) -> None:
    cache = CACHES[name]()
    cache.update(states(20), states(20), 0)
    for _ in range(3):
        keys, values = cache.update(states(1), states(1), 0)
        assert calls_flash(keys, values)
        assert calls_flash(keys, values, scale=0.5)


@pytest.mark.parametrize(
    "options",
    [{"attn_mask": True}, {"dropout_p": 0.1}, {"is_causal": True}, {"gradients": True}, {"queries": 3}],
    ids=str,
)
def test_other_attention_is_left_to_torch(options: dict[str, object]) -> None:
    cache = kvlayers.DynamicCache()
    cache.update(states(20), states(20), 0)
    keys, values = cache.update(states(1), states(1), 0)
    if "attn_mask" in options:
        options = {"attn_mask": torch.ones(2, 1, 1, 21, dtype=torch.bool, device="meta")}
    assert not calls_flash(keys, values, **options)


def test_a_prompt_and_states_of_other_gpus_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvlayers.DynamicCache()
    assert not calls_flash(*cache.update(states(20), states(20), 0), queries=20)
    monkeypatch.setattr(flash, "replaces_cudnn", lambda states: False)
    keys, values = cache.update(states(1), states(1), 0)
    assert type(keys) is Tensor
    assert not calls_flash(keys, values)
