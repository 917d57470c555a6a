"""Codes that a CUDA device computes are those of a CPU, or as good."""

from typing import Any

import pytest
import torch

import cuda_device
from cuda_device import DEVICE
from kvlayers import Quantization
from kvlayers.stores import QuantizedStore
from kvlayers.utils.triton_support import runs_triton
from packed_reference import (
    counted_launches,
    dense_states,
    equal_codes,
    on_cpu,
    random_pair,
    relative_error,
)

pytestmark = cuda_device.on_cuda

KV_HEADS = 2
ROUNDINGS = {torch.bfloat16: 2**-7, torch.float32: 1e-5}
OPTIONS: dict[str, dict[str, Any]] = {
    "2 bits": {"nbits": 2},
    "3 bits": {"nbits": 3},
    "4 bits": {"nbits": 4},
    "8 bits": {"nbits": 8},
    "fp8": {"backend": "fp8"},
}


def filled(name: str, states: tuple[torch.Tensor, ...]) -> QuantizedStore:
    store = QuantizedStore(Quantization(residual_length=32, sink_tokens=16, **OPTIONS[name]))
    store.take_in(*states)
    return store


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_codes_are_those_of_a_cpu(name: str, dtype: torch.dtype) -> None:
    states = random_pair(2, KV_HEADS, 48 + 256, 128, dtype, DEVICE)
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
    states = random_pair(1, KV_HEADS, 48 + 128, 64, dtype, DEVICE)
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


def test_a_block_is_packed_by_few_kernels() -> None:
    store = QuantizedStore(Quantization(nbits=4))
    store.take_in(*random_pair(1, KV_HEADS, 400, 128, torch.bfloat16, DEVICE))
    with counted_launches() as launches:
        store.take_in(*random_pair(1, KV_HEADS, 64, 128, torch.bfloat16, DEVICE))
    if runs_triton(DEVICE):
        # One for keys and one for values, or one for both.
        assert 1 <= launches.total() <= 4
