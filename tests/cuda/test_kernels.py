"""Triton kernels on a CUDA device: attention to packed states, codes, and what is refused beforehand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import cuda_device
import grouped_backend
from cuda_device import DEVICE
from kvlayers import Quantization, QuantizedStore
from kvlayers.utils.triton_support import runs_triton
from packed_reference import (
    attention,
    counted_launches,
    dense_states,
    equal_codes,
    extended,
    on_cpu,
    random_pair,
    relative_error,
)

pytestmark = cuda_device.on_cuda

HEADS, KV_HEADS = 8, 2
ROUNDINGS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
"""Relative rounding of the operands of products; Triton may multiply float32 in several parts."""

OPTIONS: dict[str, dict[str, Any]] = {
    "2 bits": {"nbits": 2},
    "3 bits": {"nbits": 3},
    "4 bits": {"nbits": 4},
    "8 bits": {"nbits": 8},
    "fp8": {"backend": "fp8"},
}
GROUPED: dict[str, dict[str, Any]] = {
    "a scale for each token": {"backend": grouped_backend.NAME, "nbits": 4},
    "8 bits, groups of 256 tokens": {"backend": grouped_backend.NAME, "nbits": 8, "axis_key": 0, "key_group_size": 256},
}


@pytest.fixture(autouse=True)
def _grouped_backend() -> Iterator[None]:
    with grouped_backend.registered():
        yield


def error_of_attention(
    options: dict[str, Any], dtype: torch.dtype, head_dim: int, queries: int = 1, blocks: int = 5, size: int = 64
) -> tuple[float, QuantizedStore]:
    """Error of attention to a store that was cut at both ends, relative to the norm of the right result."""
    store = QuantizedStore(Quantization(residual_length=32, sink_tokens=16, **options))
    shape: dict[str, Any] = {"batch": 2, "kv_heads": KV_HEADS, "head_dim": head_dim, "dtype": dtype, "device": DEVICE}
    extended(store, random_pair(**shape, tokens=48 + blocks * size))
    store.truncate(store.length - size - 25)
    extended(store, random_pair(**shape, tokens=size + 30, seed=1))
    store.drop_oldest(16 + 17)
    held = dense_states(on_cpu(store))
    new = random_pair(**shape, tokens=queries, seed=2)
    query = torch.randn(2, HEADS, queries, head_dim, device=DEVICE, dtype=dtype)
    mask = torch.ones(queries, store.length + queries, dtype=torch.bool, device=DEVICE).tril(store.length)
    keys, values = extended(store, new)
    out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    states = [torch.cat([old, own.cpu()], 2) for old, own in zip(held, new, strict=True)]
    return relative_error(out.cpu(), attention(query.cpu(), *states, mask.cpu())), store


@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_that_of_float64(name: str, queries: int) -> None:
    error, _ = error_of_attention(OPTIONS[name], torch.bfloat16, 128, queries)
    assert error < 4 * ROUNDINGS[torch.bfloat16]


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
def test_attention_of_every_dtype(dtype: torch.dtype, head_dim: int) -> None:
    error, _ = error_of_attention({"nbits": 4}, dtype, head_dim)
    assert error < 4 * ROUNDINGS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", GROUPED)
def test_what_needs_much_shared_memory_is_right_on_some_path(name: str, dtype: torch.dtype) -> None:
    """A scale for each token needs up to 184 KB in float32, groups of 256 tokens 136 KB: more than some GPUs have."""
    size = GROUPED[name].get("key_group_size", 64)
    error, store = error_of_attention(GROUPED[name], dtype, 128, size=size)
    assert error < 4 * ROUNDINGS[dtype]
    assert store.paths.counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_codes_are_those_of_a_cpu(name: str, dtype: torch.dtype) -> None:
    states = random_pair(2, KV_HEADS, 48 + 256, 128, dtype, DEVICE)
    stores = [QuantizedStore(Quantization(residual_length=32, sink_tokens=16, **OPTIONS[name])) for _ in range(2)]
    extended(stores[0], states)
    extended(stores[1], (states[0].cpu(), states[1].cpu()))
    bits = {"2 bits": 2, "4 bits": 4, "8 bits": 8, "fp8": 8}.get(name)
    if bits is not None:
        # Rotations add in another order, so a few states are nearest to another code, or their group to another grid.
        assert equal_codes(stores[0].state(), stores[1].state(), bits) > 0.97
    for seen, other, exact in zip(dense_states(on_cpu(stores[0])), dense_states(stores[1]), states, strict=True):
        assert relative_error(seen, exact.cpu()) < 1.005 * relative_error(other, exact.cpu())
    for here, there in zip(dense_states(stores[0]), dense_states(on_cpu(stores[0])), strict=True):
        assert relative_error(here.cpu(), there) < ROUNDINGS[dtype]


@pytest.mark.parametrize("name", OPTIONS)
def test_states_that_cannot_be_coded_are_those_of_a_cpu(name: str) -> None:
    states = random_pair(1, KV_HEADS, 48 + 128, 64, torch.float32, DEVICE)
    keys, values = states
    keys[:, :, 20:90] = 3.0
    keys[:, 0, 100] = torch.nan
    values[:, 1, 110] = torch.inf
    values[:, :, 120] = 0.0
    stores = [QuantizedStore(Quantization(residual_length=32, sink_tokens=16, **OPTIONS[name])) for _ in range(2)]
    extended(stores[0], states)
    extended(stores[1], (keys.cpu(), values.cpu()))
    for seen, other in zip(dense_states(stores[0]), dense_states(stores[1]), strict=True):
        assert torch.equal(seen.cpu().isnan(), other.isnan())
        assert relative_error(seen.cpu().nan_to_num(), other.nan_to_num()) < 0.05


def test_a_block_is_packed_by_few_kernels() -> None:
    store = QuantizedStore(Quantization(nbits=4))
    extended(store, random_pair(1, KV_HEADS, 400, 128, torch.bfloat16, DEVICE))
    with counted_launches() as launches:
        extended(store, random_pair(1, KV_HEADS, 64, 128, torch.bfloat16, DEVICE))
    if runs_triton(DEVICE):
        # One for keys and one for values, or one for both.
        assert 1 <= launches.total() <= 4
