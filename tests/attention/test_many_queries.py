"""Attention of many queries, as in a prompt, is as exact as torch's, whatever the mask hides."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from kvlayers.kernels.attention import dense_kernels, gqa
from kvlayers.kernels.attention.cpu import kernel
from models import fresh_model, given, prompt

needs_kernel = pytest.mark.skipif(kernel.MANY.get() is None, reason="no C++ compiler")

SHAPES = {
    "one head_dim": (1, 9, 3, 70, 70, 64, 64),
    "few tokens": (2, 4, 1, 33, 17, 256, 256),
    "no groups": (1, 8, 8, 130, 300, 128, 128),
    "odd head_dims": (1, 4, 2, 50, 77, 20, 36),
    "long": (2, 6, 2, 100, 1000, 80, 16),
    "latents": (1, 4, 4, 20, 700, 192, 128),
    "one KV head": (1, 71, 1, 19, 40, 64, 64),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def check(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool = False) -> None:
    seen = dense_kernels.attend_on_cpu(query, keys, values, mask, None, is_causal=is_causal)
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    exact = scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), wide, is_causal=is_causal, enable_gqa=True
    )
    own = mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype)
    by_torch = scaled_dot_product_attention(query, keys, values, own, is_causal=is_causal, enable_gqa=True)
    # Both round weights to the dtype, and add up in other orders.
    assert (seen - exact).abs().max() <= 2 * (by_torch - exact).abs().max() + 2e-6


@needs_kernel
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_exact_as_torch(dtype: torch.dtype, name: str) -> None:
    shape = SHAPES[name]
    query, keys, values = states(shape, dtype)
    for mask in masks(shape[0], shape[1], shape[3], shape[4], dtype).values():
        check(query, keys, values, mask)
    check(query, keys, values, None, is_causal=True)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int) -> None:
    query, keys, values = states(SHAPES["long"], torch.float32)
    before = torch.get_num_threads()
    expected = dense_kernels.attend_on_cpu(query, keys, values, None, None)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(dense_kernels.attend_on_cpu(query, keys, values, None, None), expected)
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_spreads_as_far_as_in_torch(number: float) -> None:
    query, keys, values = states(SHAPES["one head_dim"], torch.float32)
    for side in (keys, values):
        side[0, 0, 20, 0] = number
        seen = dense_kernels.attend_on_cpu(query, keys, values, None, None, is_causal=True)
        expected = scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        # Torch multiplies hidden values by zero, and so does the kernel in a block of which a part is seen.
        assert torch.equal(seen[:, :, 20:].isfinite(), expected[:, :, 20:].isfinite())
        assert side is values or not seen[:, :, :20].isnan().any()
        side[0, 0, 20, 0] = 0


@needs_kernel
def test_soft_caps_and_sinks() -> None:
    query, keys, values = states(SHAPES["one head_dim"], torch.float32)
    sinks, mask = torch.linspace(-1, 3, 9), torch.ones(70, 70, dtype=torch.bool).tril()
    scores = query.double() @ keys.double().repeat_interleave(3, 1).transpose(2, 3) / 8
    scores = (torch.tanh(scores / 2) * 2).masked_fill(~mask, -torch.inf)
    with_sinks = torch.cat([scores, sinks.double()[None, :, None, None].expand(1, 9, 70, 1)], -1)
    expected = with_sinks.softmax(-1)[..., :-1] @ values.double().repeat_interleave(3, 1)
    seen = dense_kernels.attend_on_cpu(query, keys, values, mask, None, 2.0, sinks)
    torch.testing.assert_close(seen.double(), expected, rtol=0, atol=2e-6)


def test_derivatives_are_left_to_torch() -> None:
    query, keys, values = states(SHAPES["no groups"], torch.float32)
    assert not dense_kernels.takes_on_cpu(query.requires_grad_(), keys, values, None, True)
    with torch.no_grad():
        assert dense_kernels.takes_on_cpu(query, keys, values, None, True) == (kernel.MANY.get() is not None)


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


CACHES: dict[str, Any] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=400),
    "offloaded": lambda config: kvlayers.OffloadedCache(config=config),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("pads", [False, True])
def test_prompts_and_second_turns_of_models(family: str, cache: str, pads: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(dense_kernels, "CPU_MINIMUM_PRODUCTS", 0)
    model, ids = fresh_model(family), prompt(2, 343, 1)
    mask = torch.ones_like(ids)
    if pads:
        mask[0, :100] = 0
    logits = []
    for own in (transformers.DynamicCache(config=model.config), CACHES[cache](model.config)):
        found, seen = [], 0
        for part in (300, 40, 1, 1, 1):
            with torch.no_grad():
                output = model(ids[:, seen : seen + part], attention_mask=mask[:, : seen + part], **given(own))
            found.append(output.logits[:, -1])
            seen += part
        logits.append(torch.stack(found))
    # The same sums in another order of float32; the logits of these models spread by some tens.
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=2e-4)
