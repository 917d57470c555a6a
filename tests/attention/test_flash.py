"""Decode steps on a GPU call flash attention in place of cuDNN, and with a mask the Triton kernel: on meta tensors."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvlayers
from kvlayers.kernels.attention import dense_kernels
from kvlayers.kernels.attention.segments import KVSegments
from spies import Operators

FLASH = "aten._scaled_dot_product_flash_attention.default"
CLONE = torch.ops.aten.clone.default
KV_HEADS, HEADS, HEAD_DIM = 2, 8, 64


@pytest.fixture(autouse=True)
def cudnn_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_kernels, "replaces_cudnn", lambda states: states.is_meta)


def states(tokens: int, heads: int = KV_HEADS) -> Tensor:
    return torch.empty(2, heads, tokens, HEAD_DIM, dtype=torch.bfloat16, device="meta")


def calls_flash(keys: Tensor, values: Tensor, queries: int = 1, **options: object) -> bool:
    query = states(queries, HEADS).requires_grad_(bool(options.pop("gradients", False)))
    names: list[str] = []
    with Operators(lambda operator, *_: names.append(str(operator))):
        out = scaled_dot_product_attention(query, keys, values, enable_gqa=True, **options)
    assert out.shape == (2, HEADS, queries, HEAD_DIM)
    return FLASH in names


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
    monkeypatch.setattr(dense_kernels, "replaces_cudnn", lambda states: False)
    keys, values = cache.update(states(1), states(1), 0)
    assert type(keys) is Tensor
    assert not calls_flash(keys, values)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the query, of the keys and of the mask in each call of the Triton kernel."""
    seen = []

    def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float, by_torch: object) -> Tensor:
        (segment,) = segments.in_order
        seen.append((tuple(query.shape), tuple(segment.keys.shape), None if mask is None else tuple(mask.shape), scale))
        batch, heads, queries, _ = query.shape
        return query.new_empty((batch, queries, heads, segment.values.shape[3])).transpose(1, 2)

    monkeypatch.setattr(dense_kernels, "serves_few_queries", lambda states: states.is_meta)
    monkeypatch.setattr(dense_kernels.cuda_kernel, "attend", attend)
    return seen


def module() -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.num_key_value_groups = HEADS // KV_HEADS
    layer.is_causal = True
    return layer


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("name", CACHES)
def test_few_queries_with_a_mask_go_to_the_triton_kernel(
    name: str, queries: int, kernel_calls: list[tuple[int, ...]]
) -> None:
    cache = CACHES[name]()
    cache.update(states(10), states(10), 0)
    # As models do that make the mask.
    cache.get_mask_sizes(queries, 0)
    keys, values = cache.update(states(queries), states(queries), 0)
    tokens = keys.shape[2]
    mask = torch.ones(2, 1, queries, tokens, dtype=torch.bool, device="meta")
    copied = [0]
    with Operators(lambda operator, _, result: copied.append(result.numel() if operator is CLONE else 0)):
        out, _ = sdpa_attention_forward(module(), states(queries, HEADS), keys, values, mask, scaling=0.5)
    assert out.shape == (2, queries, HEADS, HEAD_DIM)
    # transformers may take the query heads of a group for queries itself, if there is one.
    ((query, of_keys, of_mask, scale),) = kernel_calls
    assert (query[0], query[1] * query[2], query[3]) == (2, HEADS * queries, HEAD_DIM)
    assert of_keys == (2, KV_HEADS, tokens, HEAD_DIM)
    assert of_mask == (*query[:3], tokens)
    assert scale == 0.5
    # The result may be copied, but no key or value is repeated.
    assert max(copied) <= out.numel()


def test_a_prompt_with_a_mask_is_left_to_torch(kernel_calls: list[tuple[int, ...]]) -> None:
    cache = kvlayers.DynamicCache()
    keys, values = cache.update(states(40), states(40), 0)
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool, device="meta")
    sdpa_attention_forward(module(), states(40, HEADS), keys, values, mask)
    assert not kernel_calls
