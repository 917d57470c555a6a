"""Marked keys give the attention of unmarked ones, and are a plain tensor to everything else."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from kvlayers.kernels.attention import dense_kernels, gqa
from matrix import product

BATCH = 8
"""Sequences of a batch in which two threads have heads enough for float32."""


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether float32 is grouped depends on the number of threads, and tests run on one or more."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.fixture(autouse=True)
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel for dense states has tests of its own."""
    monkeypatch.setattr(dense_kernels, "CPU_MINIMUM_STATES", 1 << 60)


def grouped_for_one_query(keys: Tensor) -> Tensor:
    return gqa.marked_for_sdpa(keys, keys, 1)[0]


def states(
    heads: int, kv_heads: int, dtype: torch.dtype, tokens: int = 300, value_dim: int = 16, batch: int = BATCH
) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(batch, heads, 1, 16, dtype=dtype)
    # Views of a larger buffer, as a cache returns them.
    keys = torch.randn(batch, kv_heads, tokens + 50, 16, dtype=dtype)[:, :, :tokens]
    values = torch.randn(batch, kv_heads, tokens + 50, value_dim, dtype=dtype)[:, :, :tokens]
    return query, keys, values


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "value_dim", "tokens"),
    product([(8, 2), (4, 4), (6, 1), (6, 3)], [torch.float32, torch.bfloat16, torch.float16], [16, 24], [1, 130, 2000]),
)
def test_attention_is_no_further_from_exact_than_with_unmarked_keys(
    heads: int, kv_heads: int, dtype: torch.dtype, value_dim: int, tokens: int
) -> None:
    query, keys, values = states(heads, kv_heads, dtype, tokens, value_dim)
    if dtype == torch.float32 and tokens < gqa.CPU_MINIMUM_FLOAT32_TOKENS:
        assert grouped_for_one_query(keys) is keys
        return
    marked = grouped_for_one_query(keys)
    assert type(marked) is gqa.GroupedKeys
    exact = scaled_dot_product_attention(query.double(), keys.double(), values.double(), scale=0.3, enable_gqa=True)
    plain = scaled_dot_product_attention(query, keys, values, scale=0.3, enable_gqa=True)
    seen = scaled_dot_product_attention(query, marked, values, scale=0.3, enable_gqa=True)
    assert (type(seen), seen.shape) == (Tensor, plain.shape)
    # Sums in another order: as close to the exact result as the usual one, give or take a rounding of its own size.
    limit = 1.5 * (plain.double() - exact).norm() + torch.finfo(dtype).eps * exact.norm()
    assert (seen.double() - exact).norm() <= limit


def test_a_mask_or_several_queries_take_the_usual_way() -> None:
    _, keys, values = states(4, 2, torch.float32)
    marked = grouped_for_one_query(keys)
    for queries, how in ((1, {"attn_mask": torch.rand(BATCH, 1, 1, keys.shape[2]) > 0.5}), (3, {"is_causal": True})):
        query = torch.randn(BATCH, 4, queries, 16)
        seen, expected = (
            scaled_dot_product_attention(query, held, values, enable_gqa=True, **how) for held in (marked, keys)
        )
        assert torch.equal(seen, expected)


@pytest.mark.parametrize(
    ("dtype", "batch", "tokens", "marked"),
    [
        *((dtype, batch, 100, True) for dtype in (torch.bfloat16, torch.float16) for batch in (1, 8)),
        *((torch.float32, *case) for case in ((1, 300, False), (2, 100, False), (2, 300, True))),
    ],
)
def test_keys_are_grouped_in_half_precision_or_if_threads_have_heads_and_tokens_enough(
    dtype: torch.dtype, batch: int, tokens: int, marked: bool
) -> None:
    layer = kvlayers.DynamicLayer()
    states = torch.randn(batch, 2, tokens, 8, dtype=dtype)
    assert type(layer.update(states, states)[0]) is Tensor
    for _ in range(2):
        keys, _ = layer.update(states[:, :, :1], states[:, :, :1])
        assert (type(keys) is gqa.GroupedKeys) == marked
    assert type(layer.keys) is Tensor


@pytest.mark.parametrize(("heads", "rows"), [(2, 1), (6, 1), (8, 4)])
def test_small_groups_in_float32_stay_in_torch_s_order(heads: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values = states(heads, 2, torch.float32)
    seen: list[int] = []

    def attend(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(query.shape[2])
        return scaled_dot_product_attention(query, *args, **kwargs)

    expected = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    for module in (gqa, dense_kernels):
        monkeypatch.setattr(module, "scaled_dot_product_attention", attend)
    attended = scaled_dot_product_attention(query, grouped_for_one_query(keys), values, enable_gqa=True)
    assert seen == [rows]
    torch.testing.assert_close(attended, expected)


def test_marked_keys_are_a_plain_tensor_to_everything_else() -> None:
    _, keys, _ = states(4, 2, torch.float32)
    marked = grouped_for_one_query(keys)
    assert (type(marked), type(marked.shape), marked.shape) == (gqa.GroupedKeys, torch.Size, keys.shape)
    for result in (marked * 2, marked[:, :, 1:], marked.transpose(2, 3), marked.clone(), torch.cat([marked, keys], 2)):
        assert type(result) is Tensor
    for twin in (copy.deepcopy(marked), pickle.loads(pickle.dumps(marked))):
        assert torch.equal(twin, keys)
    assert marked.data_ptr() == keys.data_ptr()


def test_shapes_that_plain_keys_refuse_or_broadcast_do_the_same() -> None:
    keys = torch.randn(1, 2, 300, 8, dtype=torch.bfloat16)
    marked = grouped_for_one_query(keys)
    assert type(marked) is gqa.GroupedKeys
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(torch.randn(1, 4, 1, 8, dtype=torch.bfloat16), marked, keys)
    one_head = torch.randn(1, 1, 1, 8, dtype=torch.bfloat16)
    expected = scaled_dot_product_attention(one_head, keys, keys)
    assert torch.equal(scaled_dot_product_attention(one_head, marked, keys), expected)
