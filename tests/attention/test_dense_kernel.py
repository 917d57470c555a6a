"""The compiled kernels on states in full precision: as close to float64 as torch, and used where models attend."""

import contextlib
import copy
import math
import random
import re
import struct
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
import versions
from kvlayers.kernels.attention import custom_masks, dense_kernels, gqa, model_attention
from kvlayers.kernels.attention.cpu import kernel
from matrix import product, seeds
from models import fresh_model, given, prompt, tiny_model
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


def test_rows_that_see_other_tokens_are_read_to_the_last_of_any() -> None:
    query, keys, values = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 600, 16), torch.randn(1, 2, 600, 16)
    mask = (torch.arange(600) < torch.tensor([[300], [5], [290]]))[None, None]
    seen = kernel.attend_dense(query, keys, values, mask, None)
    rows = zip(query.split(1, 2), mask.split(1, 2), strict=True)
    alone = torch.cat([kernel.attend_dense(row, keys, values, of_row, None) for row, of_row in rows], 2)
    torch.testing.assert_close(seen, alone, rtol=0, atol=1e-6)


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


@pytest.mark.parametrize("columns", [None, 40])
def test_what_is_written_to_states_that_wait_to_be_repeated_is_read(columns: int | None) -> None:
    states, query = torch.randn(2, 2, 30, 8), torch.randn(2, 6, 3, 8)
    marked: Any = gqa.marked_for_sdpa(states, states.clone(), 3)
    if columns is not None:
        marked = custom_masks.marked_for_custom_masks(*marked, custom_masks.columns_of(columns))
    keys, values = (side[:, :, None].expand(2, 2, 3, 30, 8).reshape(2, 6, 30, 8) for side in marked)
    plain = [states.repeat_interleave(3, dim=1) for _ in range(2)]
    for repeated in ([keys, values], plain):
        repeated[0][:, :, 5] = 0
        repeated[0] += 1
        repeated[1].mul_(2)
    seen = scaled_dot_product_attention(query, keys, values)
    torch.testing.assert_close(seen, scaled_dot_product_attention(query, *plain))
    # The cache holds what it did.
    assert torch.equal(marked[0] + 0, states)


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


@pytest.mark.parametrize("queries", [1, 40])
def test_a_cap_of_zero_and_too_few_sinks_are_what_eager_attention_makes_of_them(queries: int) -> None:
    query, keys, values = torch.randn(2, 4, queries, 16), torch.randn(2, 2, 3000, 16), torch.randn(2, 2, 3000, 16)
    mask = torch.ones(queries, 3000, dtype=torch.bool)
    attended, _ = model_attention.attention(torch.nn.Module(), query, keys, values, mask, softcap=0.0)
    # All scores are 0.
    expected = values.mean(2).repeat_interleave(2, dim=1)[:, None].expand(2, queries, 4, 16)
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)
    for sinks in (1, 3, 5):
        # The memory behind them is not read.
        with pytest.raises(RuntimeError, match="shape"):
            model_attention.attention(torch.nn.Module(), query, keys, values, mask, s_aux=torch.zeros(sinks))


# Many queries, as in a prompt: as exact as torch, whatever the mask hides

QUERIES = struct.Struct("@88x q")
"""Among the arguments of a call: two pointers and nine numbers come first."""

SHAPES = {
    "one head_dim": (1, 9, 3, 70, 70, 64, 64),
    "few tokens": (2, 4, 1, 33, 17, 256, 256),
    "no groups": (1, 8, 8, 130, 300, 128, 128),
    "odd head_dims": (1, 4, 2, 50, 77, 20, 36),
    "long": (2, 6, 2, 100, 1000, 80, 16),
    "latents": (1, 4, 4, 20, 700, 192, 128),
    "one KV head": (1, 71, 1, 19, 40, 64, 64),
}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Weights are rounded to the dtype, and so are results of about one."""


def masks(batch: int, heads: int, queries: int, tokens: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
    place = torch.arange(tokens)[None] - torch.arange(queries)[:, None] - (tokens - queries)
    some = torch.rand(batch, 1, queries, tokens, generator=torch.Generator().manual_seed(1)) > 0.5
    hides_a_row = some.clone()
    hides_a_row[:, :, 3] = False
    padding = torch.arange(tokens).expand(batch, 1, 1, tokens) >= tokens // 3
    lowest = torch.zeros(some.shape, dtype=dtype).masked_fill_(~some, torch.finfo(dtype).min)
    lowest[:, :, 5] = torch.finfo(dtype).min
    return {
        "none": None,
        "bool": some,
        "window": ((place <= 0) & (place > -40))[None, None],
        "two dimensions": place <= 0,
        "left padding": padding & (place <= 0),
        "a row that sees nothing": hides_a_row,
        "by head": torch.randn(batch, heads, queries, tokens, generator=torch.Generator().manual_seed(2)).to(dtype),
        "lowest numbers, for a whole row": lowest,
        "float32": torch.where(some, 0.25, -torch.inf),
        "not contiguous": some.transpose(2, 3).contiguous().transpose(2, 3),
    }


def states(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, queries, tokens, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, queries, heads, key_dim, generator=generator).transpose(1, 2)
    keys = torch.randn(batch, kv_heads, tokens, key_dim, generator=generator)
    values = torch.randn(batch, kv_heads, tokens, value_dim + 3, generator=generator)[..., :value_dim]
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    is_causal: bool = False,
    scale: float | None = None,
) -> None:
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": True}
    seen = kernel.attend_dense(query, keys, values, mask, scale, is_causal=is_causal)
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    exact = scaled_dot_product_attention(query.double(), keys.double(), values.double(), wide, **options)
    own = mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype)
    by_torch = scaled_dot_product_attention(query, keys, values, own, **options)
    # Both round weights to the dtype, and add up in other orders.
    assert (seen - exact).abs().max() <= 2 * (by_torch - exact).abs().max() + 2e-6


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_exact_as_torch(dtype: torch.dtype, name: str) -> None:
    shape = SHAPES[name]
    query, keys, values = states(shape, dtype)
    for mask in masks(shape[0], shape[1], shape[3], shape[4], dtype).values():
        check(query, keys, values, mask)
    check(query, keys, values, None, is_causal=True)
    for scale in (0.0, -0.3, 2.0):
        check(query, keys, values, None, scale=scale)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int) -> None:
    query, keys, values = states(SHAPES["long"], torch.float32)
    expected = kernel.attend_dense(query, keys, values, None, None)
    torch.set_num_threads(threads)
    assert torch.equal(kernel.attend_dense(query, keys, values, None, None), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spreads_as_far_as_in_torch(number: float, dtype: torch.dtype) -> None:
    mask = torch.ones(70, 70, dtype=torch.bool).tril()
    for place in range(3):
        sides = states(SHAPES["one head_dim"], dtype)
        sides[place][0, 0, 20, 0] = number
        # In float64: torch's attention in half precision makes some finite number of an infinite score.
        exact = scaled_dot_product_attention(*(side.double() for side in sides), mask, enable_gqa=True)
        for is_causal in (True, False):
            seen = kernel.attend_dense(*sides, None if is_causal else mask, None, is_causal=is_causal)
            # Torch adds masks to hidden scores, and multiplies hidden values by zero. So does the kernel in a block of
            # which a part is seen, but for scores that `is_causal` hides.
            assert torch.equal(seen[:, :, 20:].isfinite(), exact[:, :, 20:].isfinite())
            assert not seen[:, :, 20:].isfinite().all()
            assert seen[:, :, :20].isfinite().all() or (place == 2 or not is_causal)
            assert (seen.isfinite() >= exact.isfinite()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_that_see_nothing_get_what_torch_gives_them(dtype: torch.dtype) -> None:
    query, keys, values = states((2, 4, 2, 40, 300, 32, 16), dtype)
    values[:, :, 7] = torch.nan
    mask = torch.rand(2, 1, 40, 300, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[0, :, 3], mask[1], mask[..., 7] = False, False, False
    seen = kernel.attend_dense(query, keys, values, mask, None)
    assert not torch.cat([seen[0, :, 3], seen[1].flatten(0, 1)]).any()
    values[:, :, 7] = 0
    for hidden in (-torch.inf, torch.finfo(dtype).min):
        additive = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)
        expected = scaled_dot_product_attention(query, keys, values, additive, enable_gqa=True)
        seen = kernel.attend_dense(query, keys, values, additive, None)
        torch.testing.assert_close(seen, expected, rtol=0, atol=TOLERANCES[dtype])
        assert bool(seen[0, :, 3].eq(0).all()) == (hidden == -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_caps_and_sinks(dtype: torch.dtype) -> None:
    query, keys, values = states(SHAPES["one head_dim"], dtype)
    # Sinks of another dtype than float32, and not contiguous.
    sinks, mask = torch.linspace(-1, 3, 18).to(dtype)[::2], torch.ones(70, 70, dtype=torch.bool).tril()
    for own in (None, sinks):
        expected = exact(query, keys, values, mask, 1 / 8, 2.0, own)
        seen = kernel.attend_dense(query, keys, values, mask, None, 2.0, own)
        torch.testing.assert_close(seen.double(), expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_need_not_be_contiguous(dtype: torch.dtype) -> None:
    query, keys, values = states((2, 4, 2, 40, 70, 32, 32), dtype)
    expected = kernel.attend_dense(query, keys, values, None, None)
    ways = {
        "channels apart": lambda side: side.transpose(2, 3).contiguous().transpose(2, 3),
        "tokens apart": lambda side: side.repeat_interleave(2, 2)[:, :, ::2],
        "heads behind tokens": lambda side: side.transpose(1, 2).contiguous().transpose(1, 2),
        "every second channel": lambda side: side.repeat_interleave(2, 3)[..., ::2],
        "sequences apart": lambda side: side.repeat_interleave(2, 0)[::2],
    }
    for way in ways.values():
        for sides in ((way(query), keys, values), (query, way(keys), values), (query, keys, way(values))):
            assert torch.equal(kernel.attend_dense(*sides, None, None), expected)
    one = kernel.attend_dense(query[:, :2], keys[:, :1].expand(-1, 2, -1, -1), values[:, :2], None, None)
    assert torch.equal(one[:, 0], kernel.attend_dense(query[:, :1], keys[:, :1], values[:, :1], None, None)[:, 0])


def test_masks_are_broadcast_as_in_torch_or_refused_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values = states((2, 4, 2, 40, 50, 32, 32), torch.float32)
    calls = counted(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 40, 50), (1, 40, 50), (4, 1, 50), (40, 1), (1, 50), (2, 1, 1, 50), (1, 4, 40, 1), (2, 4, 40, 50)]
    for shape in shapes:
        for mask in (torch.rand(shape, generator=generator) > 0.3, torch.randn(shape, generator=generator)):
            expected = scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
            torch.testing.assert_close(gqa.attend_dense(query, keys, values, mask, False, None), expected)
    assert len(calls) == 2 * len(shapes)
    # A negation that torch only notes.
    negated = torch.randn(2, 1, 40, 50, dtype=torch.complex64, generator=generator).conj().imag
    expected = scaled_dot_product_attention(query, keys, values, negated, enable_gqa=True)
    torch.testing.assert_close(gqa.attend_dense(query, keys, values, negated, False, None), expected)
    wrong: list[Tensor] = [torch.ones(shape, dtype=torch.bool) for shape in ((50,), (40, 49), (3, 40, 50), (1,) * 5)]
    wrong += [torch.ones(40, 50, dtype=dtype) for dtype in (torch.int64, torch.float64, torch.float16)]
    for mask in (*wrong, torch.ones(3, 1, 40, 50)):
        with pytest.raises((RuntimeError, IndexError)) as by_torch:
            scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
        with pytest.raises(by_torch.type, match=re.escape(str(by_torch.value)[:30])):
            gqa.attend_dense(query, keys, values, mask, False, None)
    # Which of both counts is torch's to say: the mask, and from 2.14 on none.
    mask = torch.rand(40, 50, generator=generator) > 0.3
    try:
        expected = scaled_dot_product_attention(query, keys, values, mask, 0.0, True, enable_gqa=True)
    except RuntimeError as refusal:
        with pytest.raises(RuntimeError, match=re.escape(str(refusal)[:30])):
            gqa.attend_dense(query, keys, values, mask, True, None)
    else:
        assert torch.equal(gqa.attend_dense(query, keys, values, mask, True, None), expected)
    assert len(calls) == 2 * len(shapes)


@pytest.mark.parametrize("shape", [(1, 4, 2, 20, 0, 16, 16), (0, 4, 2, 20, 20, 16, 16), (1, 4, 2, 0, 20, 16, 16)])
def test_no_tokens_no_sequences_and_no_queries(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_kernels, "CPU_MINIMUM_PRODUCTS", 0)
    query, keys, values = states(shape, torch.float32)
    expected = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    seen = gqa.attend_dense(query, keys, values, None, False, None)
    assert torch.equal(seen, expected)
    assert seen.shape == expected.shape


def test_without_a_kernel_a_window_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.MANY, "get", lambda: None)
    query, keys, values = states((2, 6, 2, 600, 700, 32, 32), torch.float32)
    place = torch.arange(700)[None] - torch.arange(600)[:, None] - 100
    window = (place <= 0) & (place > -50)
    by_head = window.expand(2, 6, 600, 700)
    additive = torch.where(window, 0.5, -torch.inf)
    for mask in (window, by_head, additive, torch.ones(600, 700, dtype=torch.bool).tril(100)):
        expected = scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
        torch.testing.assert_close(gqa.attend_dense(query, keys, values, mask, False, None), expected)
    assert dense_kernels.attend_in_blocks(query, keys, values, window, None) is not None
    assert dense_kernels.attend_in_blocks(query, keys, values, torch.ones_like(window), None) is None


@pytest.mark.parametrize("tokens", [250, 600])
def test_without_a_kernel_torch_is_told_that_a_mask_is_causal(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.MANY, "get", lambda: None)
    query, keys, values = states((2, 6, 2, tokens, tokens, 32, 32), torch.float32)
    attend, told = scaled_dot_product_attention, []
    monkeypatch.setattr(
        dense_kernels,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: told.append(kwargs.get("is_causal", False)) or attend(*args, **kwargs),
    )
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    masks = [causal, causal[None, None].expand(2, 6, -1, -1)]
    # What differs from a causal mask in one entry, at the edges of blocks of 256 queries.
    last = tokens - 1
    for row, column, is_seen in (
        (last, 0, False),
        (last, last, False),
        (min(256, last), 0, False),
        (0, last, True),
        (min(255, last - 1), last, True),
    ):
        masks.append(causal.clone())
        masks[-1][row, column] = is_seen
    for index, mask in enumerate(masks):
        told.clear()
        expected = attend(query, keys, values, mask, enable_gqa=True)
        torch.testing.assert_close(gqa.attend_dense(query, keys, values, mask, False, None), expected)
        assert told == [True] if index < 2 else True not in told


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The queries of each call of the kernel from now on, which takes attention of any size."""
    monkeypatch.setattr(dense_kernels, "CPU_MINIMUM_PRODUCTS", 0)
    queries: list[int] = []
    spy(
        monkeypatch,
        kernel.MANY.get(),
        "kvlayers_attend_many",
        lambda numbers, *others: queries.append(QUERIES.unpack_from(numbers)[0]),
    )
    return queries


CACHES: dict[str, Any] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=400),
    "offloaded": lambda config: kvlayers.OffloadedCache(config=config),
    "recall": lambda config: kvlayers.DynamicCache(config=config, recall=kvlayers.layers.Recall(pages=64)),
    "int8": lambda config: kvlayers.QuantizedCache(config=config, nbits=8),
    "int4, offloaded": lambda config: kvlayers.QuantizedCache(config=config, nbits=4, offloading=True),
}


def last_logits(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Of a prompt, a second turn, and three tokens, `[5, batch, vocabulary]`."""
    found, seen = [], 0
    for part in (300, 80, 1, 1, 1):
        with torch.no_grad():
            output = model(ids[:, seen : seen + part], attention_mask=mask[:, : seen + part], **given(cache))
        found.append(output.logits[:, -1])
        seen += part
    return torch.stack(found)


@pytest.mark.parametrize(("family", "cache", "pads"), product(["llama", "gemma3"], CACHES, [False, True]))
def test_prompts_and_second_turns_of_models(family: str, cache: str, pads: bool, monkeypatch: Any) -> None:
    queries = counted(monkeypatch)
    model, ids = fresh_model(family), prompt(2, 383, 1)
    mask = torch.ones_like(ids)
    if pads:
        mask[0, :100] = 0
    seen = last_logits(model, CACHES[cache](model.config), ids, mask)
    # Each layer, for the prompt and for the second turn.
    layers = model.config.num_hidden_layers
    assert queries == [300] * layers + [80] * layers
    monkeypatch.undo()
    # What is packed is compared with what plain torch makes of it.
    monkeypatch.setattr(kernel.MANY, "get", lambda: None)
    other = CACHES[cache](model.config) if "int" in cache else tf.DynamicCache(config=model.config)
    # The same sums in another order of float32; the logits of these models spread by some tens.
    torch.testing.assert_close(seen, last_logits(model, other, ids, mask), rtol=1e-4, atol=2e-4)
