"""Packed states on a CUDA device: attention to them is that of float64, and their codes are those of a CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import cuda_device
import grouped_backend
from kvlayers import Quantization
from kvlayers.kernels.attention.dispatch import CUDA
from kvlayers.stores import QuantizedStore
from kvlayers.utils import triton_support
from packed_reference import (
    attention,
    dense_states,
    equal_codes,
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


# Each case compiles kernels for some seconds: few of them.


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "queries", "kind"),
    [
        *((name, torch.bfloat16, 128, 1, "bool") for name in [*OPTIONS, *GROUPED]),
        *(("4 bits", torch.bfloat16, 128, *case) for case in ((1, "none"), (5, "bool"), (16, "bool"), (16, "added"))),
        *((name, torch.bfloat16, 128, *case) for name, *case in (("8 bits", 16, "added"), ("fp8", 5, "none"))),
        *(("2 bits", torch.bfloat16, 128, *case) for case in ((5, "added"), (16, "none"))),
        *(("4 bits", torch.bfloat16, head_dim, 1, "bool") for head_dim in (64, 256)),
        *(("4 bits", *case, 1, "bool") for case in ((torch.float16, 128), (torch.float32, 80), (torch.float32, 128))),
        *((name, torch.float32, 128, 1, "bool") for name in GROUPED),
    ],
    ids=str,
)
def test_attention_is_that_of_float64(name: str, dtype: torch.dtype, head_dim: int, queries: int, kind: str) -> None:
    """Attention to a store that was cut at both ends, with a causal mask of bool, one that is added, or none."""
    options = (OPTIONS | GROUPED)[name]
    size = options.get("key_group_size", 64)
    store = QuantizedStore(Quantization(residual_length=32, sink_tokens=16, **options))
    shape: dict[str, Any] = {
        "batch": 2,
        "kv_heads": KV_HEADS,
        "head_dim": head_dim,
        "dtype": dtype,
        "device": cuda_device.DEVICE,
    }
    store.take_in(*random_pair(**shape, tokens=48 + 5 * size))
    store.truncate(store.length - size - 25)
    store.take_in(*random_pair(**shape, tokens=size + 30, seed=1))
    store.drop_oldest(16 + 17)
    held = dense_states(on_cpu(store))
    new = random_pair(**shape, tokens=queries, seed=2)
    query = torch.randn(2, HEADS, queries, head_dim, device=cuda_device.DEVICE, dtype=dtype)
    seen = torch.ones(queries, store.length + queries, dtype=torch.bool, device=cuda_device.DEVICE).tril(store.length)
    mask = {"bool": seen, "added": torch.where(seen, 0.0, -torch.inf).to(dtype), "none": None}[kind]
    out = scaled_dot_product_attention(query, *store.take_in(*new), attn_mask=mask, enable_gqa=True)
    states = [torch.cat([old, own.cpu()], 2) for old, own in zip(held, new, strict=True)]
    expected = attention(query.cpu(), *states, None if mask is None else mask.cpu())
    assert relative_error(out.cpu(), expected) < 4 * ROUNDINGS[dtype]
    # A scale for each token needs up to 184 KB of shared memory in float32, groups of 256 tokens 136 KB: more than some
    # GPUs have.
    assert store.attention_paths
    if (
        name in OPTIONS
        and (dtype, head_dim) == (torch.bfloat16, 128)
        and triton_support.runs_triton(cuda_device.DEVICE)
    ):
        assert set(store.attention_paths) == {CUDA}


# Codes that the device computes are those of a CPU, or as good


def filled(name: str, states: tuple[torch.Tensor, ...]) -> QuantizedStore:
    store = QuantizedStore(Quantization(residual_length=32, sink_tokens=16, **OPTIONS[name]))
    store.take_in(*states)
    return store


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_codes_are_those_of_a_cpu(name: str, dtype: torch.dtype) -> None:
    states = random_pair(2, KV_HEADS, 48 + 256, 128, dtype, cuda_device.DEVICE)
    here, there = filled(name, states), filled(name, tuple(side.cpu() for side in states))
    bits = {"2 bits": 2, "4 bits": 4, "8 bits": 8, "fp8": 8}.get(name)
    if bits is not None:
        # Rotations add in another order, so a few states are nearest to another code, or their group to another grid.
        assert equal_codes(here.state(), there.state(), bits) > 0.97
    for seen, other, exact in zip(dense_states(on_cpu(here)), dense_states(there), states, strict=True):
        assert relative_error(seen, exact.cpu()) < 1.005 * relative_error(other, exact.cpu())
    for seen, other in zip(dense_states(here), dense_states(on_cpu(here)), strict=True):
        assert relative_error(seen.cpu(), other) < ROUNDINGS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_states_that_cannot_be_coded_are_those_of_a_cpu(name: str, dtype: torch.dtype) -> None:
    states = random_pair(1, KV_HEADS, 48 + 128, 64, dtype, cuda_device.DEVICE)
    keys, values = states
    keys[:, :, 20:90] = 3.0
    keys[:, 0, 100] = torch.nan
    values[:, 1, 110] = torch.inf
    values[:, :, 120] = 0.0
    here, there = filled(name, states), filled(name, tuple(side.cpu() for side in states))
    for seen, other in zip(dense_states(here), dense_states(there), strict=True):
        assert torch.equal(seen.cpu().isnan(), other.isnan())
        # A scale of bfloat16 that rounds the other way moves more states to another code.
        assert relative_error(seen.cpu().nan_to_num(), other.nan_to_num()) < (0.05 if dtype == torch.float32 else 0.1)
