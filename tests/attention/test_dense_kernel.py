"""The compiled kernel on states in full precision: as close to float64 as torch, and used where models attend."""

import contextlib
import copy
import math
import random
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
import versions
from kvlayers.kernels.attention import dense_kernels, gqa, model_attention
from kvlayers.kernels.attention.cpu import kernel
from matrix import seeds
from models import prompt, tiny_model
from spies import spy

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="there is no C++ compiler for the kernel")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def kernel_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_kernels, "CPU_MINIMUM_STATES", 0)
    monkeypatch.setattr(dense_kernels, "CPU_MAXIMUM_FLOAT32_QUERIES", dense_kernels.CPU_MAXIMUM_QUERIES)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Heads of the query and of the keys in each call of the kernel."""
    seen: list[tuple[int, int]] = []
    spy(
        monkeypatch,
        kernel,
        "attend_dense",
        lambda query, keys, *others, **options: seen.append((query.shape[1], keys.shape[1])),
    )
    return seen


def exact(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention in float64, written out. A query that sees no token gets zeros."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (states.double().repeat_interleave(group, dim=1) for states in (keys, values))
    scores = query.double() @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if sinks is not None:
        sink = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=3)
    weights = torch.nan_to_num(torch.softmax(scores, dim=3))
    return weights[..., : keys.shape[2]] @ values


def some_mask(kind: str, batch: int, heads: int, queries: int, tokens: int, dtype: torch.dtype) -> Tensor | None:
    hidden, nothing = torch.rand(batch, 1, queries, tokens) > 0.5, torch.zeros(batch, 1, queries, tokens)
    return {
        "none": None,
        "bool": ~hidden,
        "left padding": torch.arange(tokens) >= torch.randint(0, tokens, (batch, 1, 1, 1)),
        "all hidden": nothing.bool(),
        "infinities": nothing.masked_fill(hidden, -math.inf),
        "lowest": nothing[:1].to(dtype).masked_fill(hidden[:1], torch.finfo(dtype).min),
        "additive": torch.randn(batch, heads, queries, tokens, dtype=dtype),
    }[kind]


@pytest.mark.parametrize("seed", seeds(40, 120))
def test_random_shapes_are_as_close_to_float64_as_torch(seed: int) -> None:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    dtype = chosen.choice(DTYPES)
    batch, kv_heads, group = chosen.randint(1, 9), chosen.choice([1, 2, 3]), chosen.choice([1, 2, 3, 4, 7, 16])
    queries, tokens = chosen.choice([1, 1, 2, 5, 16]), chosen.choice([1, 2, 7, 63, 64, 65, 130, 300])
    head_dim = chosen.choice([16, 17, 24, 31, 40, 64, 80, 96, 128, 160, 256])
    value_dim = chosen.choice([head_dim, head_dim, 16, 33])
    heads = kv_heads * group
    query = torch.randn(batch, queries, heads, head_dim).to(dtype).transpose(1, 2)
    # Views of a larger buffer, as a cache returns them.
    keys = torch.randn(batch, kv_heads, tokens + 5, head_dim).to(dtype)[:, :, 2 : tokens + 2]
    values = torch.randn(batch, kv_heads, tokens + 5, value_dim).to(dtype)[:, :, 2 : tokens + 2]
    kind = chosen.choice(["none", "bool", "left padding", "all hidden", "infinities", "lowest", "additive"])
    mask = some_mask(kind, batch, heads, queries, tokens, dtype)
    scale = chosen.choice([head_dim**-0.5, 0.3])
    assert dense_kernels.takes_on_cpu(query, keys, values, mask)

    right = exact(query, keys, values, mask, scale)
    error = (kernel.attend_dense(query, keys, values, mask, scale).double() - right).norm()
    of_torch = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    torchs = scaled_dot_product_attention(query, keys, values, of_torch, scale=scale, enable_gqa=True)
    # Sums in another order: as close as torch's, give or take a rounding.
    assert error <= 1.5 * (torch.nan_to_num(torchs).double() - right).norm() + torch.finfo(dtype).eps * right.norm()

    softcap, sinks = chosen.choice([None, 5.0]), torch.randn(heads)
    right = exact(query, keys, values, mask, scale, softcap, sinks)
    error = (kernel.attend_dense(query, keys, values, mask, scale, softcap, sinks).double() - right).norm()
    assert error <= 4 * torch.finfo(dtype).eps * right.norm() + 1e-12


@pytest.mark.parametrize(
    ("first", "last"), [*((0, last) for last in (1, 64, 99, 256, 300)), *((first, 600) for first in (1, 63, 256, 300))]
)
def test_masked_slots_at_either_end_are_not_read(first: int, last: int) -> None:
    """Padding, and the free slots of a static cache behind its tokens, cost nothing, whatever they hold."""
    query, keys, values = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 600, 16), torch.randn(1, 2, 600, 16)
    place = torch.arange(600)
    mask = ((place >= first) & (place < last)).expand(1, 1, 1, 600)
    expected = kernel.attend_dense(query, keys[:, :, first:last], values[:, :, first:last], None, None)
    for states in (keys, values):
        states[:, :, :first] = states[:, :, last:] = math.nan
    # Behind padding, units of tokens begin elsewhere, so sums are in another order.
    seen = kernel.attend_dense(query, keys, values, mask, None)
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-6 if first else 0)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float64},
        {"queries": 17},
        {"heads": 5},
        {"mask": torch.zeros(1, 1, 1, 299)},
        {"mask": torch.zeros(1, 1, 1, 300, dtype=torch.float64)},
        {"mask": torch.zeros(1, 1, 1, 300, requires_grad=True)},
        {"requires_grad": True},
        {"device": "meta"},
        {"mode": FakeTensorMode},
    ],
    ids=str,
)
def test_what_the_kernel_does_not_know_is_left_to_torch(change: dict[str, Any]) -> None:
    mask, mode = change.pop("mask", None), change.pop("mode", contextlib.nullcontext)
    heads, queries = change.pop("heads", 4), change.pop("queries", 1)
    with mode():
        query, keys = torch.randn(1, heads, queries, 16, **change), torch.randn(1, 2, 300, 16, **change)
        assert not dense_kernels.takes_on_cpu(query, keys, keys, mask)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_steps_of_padded_batches_read_each_kv_head_once(
    kind: str, dtype: torch.dtype, calls: list[tuple[int, int]]
) -> None:
    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    ids, mask = prompt(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = kvlayers.DynamicCache() if kind == "dynamic" else kvlayers.StaticCache(model.config, max_cache_len=48)
    reference = tf.DynamicCache()
    # In float32, sums in another order; in bfloat16, roundings of two layers.
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    start = 0
    for width in (20, 5, 1, 2, 11, 1):
        end = start + width
        inputs = {
            "input_ids": ids[:, start:end],
            "attention_mask": mask[:, :end],
            "position_ids": positions[:, start:end],
        }
        before = len(calls)
        with torch.no_grad():
            found = model(**inputs, past_key_values=cache).logits
            made = calls[before:]
            expected = model(**inputs, past_key_values=reference).logits
        torch.testing.assert_close(found[1:], expected[1:], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(found[0, -1:], expected[0, -1:], atol=tolerance, rtol=tolerance)
        # Before 5.23, transformers repeats keys itself for one token with a mask.
        if width <= dense_kernels.CPU_MAXIMUM_QUERIES and (width > 1 or versions.PACKS_ONE_QUERY):
            # A group of query heads of one token may arrive as queries of its KV head.
            assert made in ([(4, 2)] * 2, [(2, 2)] * 2)
        start = end


def test_states_that_wait_to_be_repeated_are_plain_tensors_to_everything_else() -> None:
    keys = torch.randn(2, 2, 30, 8)
    marked, values = gqa.marked_for_sdpa(keys, keys.clone(), 3)
    assert type(marked) is type(values) is gqa.SharedStates
    repeated = marked[:, :, None].expand(2, 2, 3, 30, 8).reshape(2, 6, 30, 8)
    assert repeated.shape == (2, 6, 30, 8)
    written_out = keys.repeat_interleave(3, dim=1)
    assert type(repeated * 1) is Tensor
    assert torch.equal(repeated * 1, written_out)
    query = torch.randn(2, 6, 3, 8)
    expected = scaled_dot_product_attention(query, written_out, written_out, is_causal=True)
    assert torch.equal(scaled_dot_product_attention(query, repeated, written_out, is_causal=True), expected)
    for result in (marked * 2, marked[:, :, 1:], marked.transpose(2, 3), torch.cat([marked, keys], 2)):
        assert type(result) is Tensor


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("queries", [1, 4])
def test_soft_caps_and_sinks_of_models(queries: int, trained: bool, calls: list[tuple[int, int]]) -> None:
    """Sinks that are trained alone have gradients."""
    query, keys, values = torch.randn(2, 4, queries, 16), torch.randn(2, 2, 90, 16), torch.randn(2, 2, 90, 16)
    sinks, how = torch.randn(4, requires_grad=trained), {"scaling": 0.5, "softcap": 3.0}
    attended, _ = model_attention.attention(torch.nn.Module(), query, keys, values, None, s_aux=sinks, **how)
    seen = torch.ones(queries, 90, dtype=torch.bool).tril(90 - queries)
    expected = exact(query, keys, values, seen.expand(2, 1, queries, 90), 0.5, 3.0, sinks)
    torch.testing.assert_close(attended.transpose(1, 2).double(), expected, atol=1e-5, rtol=1e-5)
    assert calls == ([] if trained else [(4, 2)])
    if trained:
        gradients = [torch.autograd.grad(states.double().square().sum(), sinks)[0] for states in (attended, expected)]
        torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-5)
