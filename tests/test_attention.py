"""Marked keys give the attention of unmarked ones, and are a plain tensor to everything else."""

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from kvlayers.attention.single_query import MINIMUM_TOKENS, SharedKeys, attended_by_one_query
from models import prompt, tiny_model

pytestmark = pytest.mark.fast


def states(
    heads: int, kv_heads: int, dtype: torch.dtype, tokens: int = MINIMUM_TOKENS + 3, value_dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(2, heads, 1, 16, dtype=dtype)
    # Views of a larger buffer, as a cache returns them.
    keys = torch.randn(2, kv_heads, tokens + 50, 16, dtype=dtype)[:, :, :tokens]
    values = torch.randn(2, kv_heads, tokens + 50, value_dim, dtype=dtype)[:, :, :tokens]
    return query, keys, values


@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 4), (6, 1), (6, 3)])
def test_attention_is_no_further_from_exact_than_with_unmarked_keys(
    heads: int, kv_heads: int, dtype: torch.dtype, value_dim: int
) -> None:
    query, keys, values = states(heads, kv_heads, dtype, value_dim=value_dim)
    marked = attended_by_one_query(keys)
    assert type(marked) is SharedKeys
    exact = scaled_dot_product_attention(query.double(), keys.double(), values.double(), scale=0.3, enable_gqa=True)
    plain = scaled_dot_product_attention(query, keys, values, scale=0.3, enable_gqa=True)
    seen = scaled_dot_product_attention(query, marked, values, scale=0.3, enable_gqa=True)
    assert type(seen) is Tensor
    assert seen.shape == plain.shape
    # Sums in another order: as close to the exact result as the usual one, give or take a rounding of its own size.
    limit = 1.5 * (plain.double() - exact).norm() + torch.finfo(dtype).eps * exact.norm()
    assert (seen.double() - exact).norm() <= limit


def test_a_mask_or_several_queries_take_the_usual_way() -> None:
    query, keys, values = states(4, 2, torch.float32)
    marked = attended_by_one_query(keys)
    mask = torch.rand(2, 1, 1, keys.shape[2]) > 0.5
    expected = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    assert torch.equal(scaled_dot_product_attention(query, marked, values, attn_mask=mask, enable_gqa=True), expected)
    queries = torch.randn(2, 4, 3, 16)
    expected = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    assert torch.equal(scaled_dot_product_attention(queries, marked, values, is_causal=True, enable_gqa=True), expected)


def test_keys_are_marked_only_where_it_pays() -> None:
    layer = kvlayers.DynamicLayer()
    long, one = torch.randn(1, 2, MINIMUM_TOKENS, 8), torch.randn(1, 2, 1, 8)
    assert type(layer.update(long, long)[0]) is Tensor
    assert type(layer.update(one, one)[0]) is SharedKeys
    layer.crop(100)
    assert type(layer.update(one, one)[0]) is Tensor
    assert type(layer.keys) is Tensor


def test_marked_keys_are_a_plain_tensor_to_everything_else() -> None:
    _, keys, _ = states(4, 2, torch.float32)
    marked = attended_by_one_query(keys)
    for result in (marked * 2, marked[:, :, 1:], marked.transpose(2, 3), marked.clone(), torch.cat([marked, keys], 2)):
        assert type(result) is Tensor
    assert torch.equal(copy.deepcopy(marked), keys)
    assert torch.equal(pickle.loads(pickle.dumps(marked)), keys)
    assert marked.data_ptr() == keys.data_ptr()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_long_context_decodes_the_tokens_of_transformers(family: str, attention: str) -> None:
    import transformers

    config = copy.deepcopy(tiny_model(family).config)
    config.max_position_embeddings = 2048
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = prompt(2, MINIMUM_TOKENS + 10)
    how = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **how)
    for cache in (kvlayers.DynamicCache(config=config), kvlayers.StaticCache(config, max_cache_len=1100)):
        assert torch.equal(model.generate(ids, past_key_values=cache, **how), expected)


def test_shapes_that_plain_keys_refuse_or_broadcast_do_the_same() -> None:
    keys = torch.randn(1, 2, MINIMUM_TOKENS, 8)
    marked = attended_by_one_query(keys)
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(torch.randn(1, 4, 1, 8), marked, keys)
    one_head = torch.randn(1, 1, 1, 8)
    expected = scaled_dot_product_attention(one_head, keys, keys)
    assert torch.equal(scaled_dot_product_attention(one_head, marked, keys), expected)
