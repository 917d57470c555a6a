"""Attention to packed states on a CUDA device is that of float64, on whatever path."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import cuda_device
import grouped_backend
from cuda_device import DEVICE
from kvlayers import Quantization
from kvlayers.kernels.attention.dispatch import CUDA
from kvlayers.stores import QuantizedStore
from kvlayers.utils import triton_support
from packed_reference import (
    attention,
    dense_states,
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
    options: dict[str, Any],
    dtype: torch.dtype,
    head_dim: int,
    queries: int = 1,
    blocks: int = 5,
    size: int = 64,
    kind: str = "bool",
) -> tuple[float, QuantizedStore]:
    """Error of attention to a store that was cut at both ends, relative to the norm of the right result.

    The mask is causal and of bool; or `kind` is "added" for a mask that is added to the scores, "none" for none.
    """
    store = QuantizedStore(Quantization(residual_length=32, sink_tokens=16, **options))
    shape: dict[str, Any] = {"batch": 2, "kv_heads": KV_HEADS, "head_dim": head_dim, "dtype": dtype, "device": DEVICE}
    extended(store, random_pair(**shape, tokens=48 + blocks * size))
    store.truncate(store.length - size - 25)
    extended(store, random_pair(**shape, tokens=size + 30, seed=1))
    store.drop_oldest(16 + 17)
    held = dense_states(on_cpu(store))
    new = random_pair(**shape, tokens=queries, seed=2)
    query = torch.randn(2, HEADS, queries, head_dim, device=DEVICE, dtype=dtype)
    seen = torch.ones(queries, store.length + queries, dtype=torch.bool, device=DEVICE).tril(store.length)
    masks = {"bool": seen, "added": torch.where(seen, 0.0, -torch.inf).to(dtype), "none": None}
    mask = masks[kind]
    keys, values = extended(store, new)
    out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    states = [torch.cat([old, own.cpu()], 2) for old, own in zip(held, new, strict=True)]
    return relative_error(out.cpu(), attention(query.cpu(), *states, None if mask is None else mask.cpu())), store


# Each case compiles kernels for some seconds: few of them.


@pytest.mark.parametrize(
    ("name", "queries", "kind"),
    [
        *((name, 1, "bool") for name in OPTIONS),
        *(("4 bits", 1, "none"), ("4 bits", 5, "bool"), ("4 bits", 16, "bool"), ("4 bits", 16, "added")),
        *(("8 bits", 16, "added"), ("fp8", 5, "none"), ("2 bits", 5, "added"), ("2 bits", 16, "none")),
    ],
)
def test_attention_is_that_of_float64(name: str, queries: int, kind: str) -> None:
    error, store = error_of_attention(OPTIONS[name], torch.bfloat16, 128, queries, kind=kind)
    assert error < 4 * ROUNDINGS[torch.bfloat16]
    assert set(store.attention_paths) == {CUDA} or not triton_support.runs_triton(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 64), (torch.bfloat16, 256), (torch.float16, 128), (torch.float32, 80), (torch.float32, 128)],
    ids=str,
)
def test_attention_of_other_dtypes_and_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    error, _ = error_of_attention({"nbits": 4}, dtype, head_dim)
    assert error < 4 * ROUNDINGS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", GROUPED)
def test_what_needs_much_shared_memory_is_right_on_some_path(name: str, dtype: torch.dtype) -> None:
    """A scale for each token needs up to 184 KB in float32, groups of 256 tokens 136 KB: more than some GPUs have."""
    size = GROUPED[name].get("key_group_size", 64)
    error, store = error_of_attention(GROUPED[name], dtype, 128, size=size)
    assert error < 4 * ROUNDINGS[dtype]
    assert store.attention_paths
