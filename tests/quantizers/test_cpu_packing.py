"""The C++ kernel that packs blocks on a CPU does what torch does."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import packing_cases
from kvlayers.kernels.codes import cpu_packing as pack
from kvlayers.kernels.codes.groups import BlockLayout
from kvlayers.kernels.codes.smoothing import KeySmoothing
from kvlayers.quantized.packed_blocks import SIDES, PackedBlocks
from kvlayers.quantizers import CodeFormat, NativeQuantizer, SideOptions, backend
from kvlayers.utils.native_library import NativeLibrary
from packing_cases import PACKINGS, Packing, packed, squared_error

needs_kernel = pytest.mark.skipif(pack.LIBRARY.get() is None, reason="no kernel here: it could not be compiled")

CASES = {name: case for name, case in PACKINGS.items() if case.name == "native"} | {
    "1 bit": Packing(bits=1),
    "kivi": Packing("kivi", 2, torch.bfloat16),
    "a token of ten thousand channels": Packing(head_dim=10_000, bits=8),
}


def packed_by_torch(case: Packing, keys: Tensor, values: Tensor) -> PackedBlocks:
    with mock.patch.object(NativeLibrary, "get", return_value=None):
        return packed(case, keys, values)


def check(case: Packing, keys: Tensor, values: Tensor) -> None:
    """Compare blocks that the kernel packed with blocks that torch packed."""
    finite = keys.isfinite().all(-1) & values.isfinite().all(-1)
    (found,), (expected,) = packed(case, keys, values).segments(), packed_by_torch(case, keys, values).segments()
    even = packing_cases.smoothing_of(case, keys, values).applied(keys)
    for side, states in zip(SIDES, (even, values), strict=True):
        packing_cases.check_side(found.side(side), expected.side(side), states, finite)


@needs_kernel
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_packs_the_codes_that_torch_packs(name: str) -> None:
    case = CASES[name]
    keys, values = packing_cases.states_of(case)
    with mock.patch.object(pack, "pack_blocks", wraps=pack.pack_blocks) as packing:
        blocks = packed(case, keys, values)
    assert packing.call_count == 2 * min(case.blocks, 2)
    assert bool(blocks.state()["values_parameters"].isnan().any()) == ("not_finite" in name)
    check(case, keys, values)


@needs_kernel
@given(
    bits=st.sampled_from([1, 2, 3, 4, 5, 6, 8]),
    dtype=st.sampled_from(packing_cases.DTYPES),
    head_dims=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    key_group=st.sampled_from([None, 8, 32]),
    lost=st.lists(st.integers(0, 63), max_size=3),
)
def test_the_kernel_packs_blocks_of_every_shape_as_well_as_torch(
    bits: int,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    sizes: tuple[int, int, int],
    key_group: int | None,
    lost: list[int],
) -> None:
    batch, kv_heads, blocks = sizes
    case = Packing(
        "native", bits, dtype, *head_dims, batch=batch, kv_heads=kv_heads, blocks=blocks, key_group=key_group
    )
    keys, values = packing_cases.states_of(case)
    keys[-1, -1, lost, 0] = torch.nan
    values[0, 0, lost, -1] = torch.inf
    finite = keys.isfinite().all(-1) & values.isfinite().all(-1)
    (found,), (expected,) = packed(case, keys, values).segments(), packed_by_torch(case, keys, values).segments()
    for side, states in zip(SIDES, (keys, values), strict=True):
        one, other = found.side(side), expected.side(side)
        error, allowed = (squared_error(each, states, finite) for each in (one, other))
        # A state that rounding moves over a border between codes changes few errors, and each by little.
        assert error <= allowed * 1.02 + 1e-9
        assert torch.equal(one.parameters.isnan(), other.parameters.isnan())


@needs_kernel
def test_every_layout_of_the_states_in_memory_gives_the_same_codes() -> None:
    case = replace(CASES["several sequences, heads and blocks"], dtype=torch.bfloat16)
    keys, values = packing_cases.states_of(case)
    channels_first = [states.transpose(2, 3).contiguous().transpose(2, 3) for states in (keys, values)]
    expected = packed(case, keys.contiguous(), values.contiguous()).state()
    for one in (packed(case, keys, values), packed(case, *channels_first)):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in one.state().items())


def turning(states: Tensor, dim: int) -> Tensor:
    """Pairs of channels that go in circles, as constants do that a rotary embedding turns.

    Args:
        states: `[batch, kv_heads, tokens, head_dim]`, by which the circles differ a little.
        dim: 1 if the channels of a pair are half a head apart, 2 if they are neighbours.
    """
    pairs = states.shape[3] // 2
    angles = torch.arange(float(states.shape[2]))[:, None] * torch.linspace(0.5, 2, pairs)
    radii = torch.linspace(1, 100, pairs)
    return states * 0.01 + torch.stack([radii * angles.cos(), radii * angles.sin()], dim).flatten(1)


KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "uneven and not finite": lambda keys: packing_cases.uneven(keys, "keys"),
    "a constant channel": lambda keys: keys + 100 * (torch.arange(keys.shape[3]) == 3),
    "two large tokens": lambda keys: keys * torch.where(torch.arange(keys.shape[2]) % 64 < 2, 1e12, 1.0)[:, None],
    "largest": lambda keys: packing_cases.hugest(keys, "keys"),
    "tiny": lambda keys: keys * torch.linspace(1e-37, 1e-35, keys.shape[3]),
    "zeros": torch.zeros_like,
    "halves that turn": lambda keys: turning(keys, 1),
    "neighbours that turn": lambda keys: turning(keys, 2),
}

HAVE_FACTORS = ("uneven and not finite", "a constant channel", "two large tokens", "tiny")


@needs_kernel
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("head_dim", [64, 30])
def test_the_kernel_finds_the_factors_that_torch_finds(kind: str, head_dim: int) -> None:
    torch.manual_seed(0)
    keys = KEYS[kind](torch.randn(2, 3, 192, head_dim) * torch.linspace(1, 30, head_dim)).unflatten(2, (3, 64))
    quantizer = backend("native").quantizer(SideOptions("keys", 4), head_dim)
    with mock.patch.object(NativeLibrary, "get", return_value=None):
        expected = KeySmoothing.for_keys(keys, quantizer)
    found = KeySmoothing.for_keys(keys, quantizer)
    assert bool((expected.factor > 1).any()) == (kind in HAVE_FACTORS)
    torch.testing.assert_close(found.factor, expected.factor, rtol=1e-2, atol=0)
    # Of keys that lie in memory in another way it finds the same.
    other = keys.transpose(1, 3).contiguous().transpose(1, 3)
    assert KeySmoothing.for_keys(other, quantizer).is_same(found)


@needs_kernel
@pytest.mark.parametrize("name", ["fp8", "nf4", "turboquant"])
def test_the_kernel_leaves_other_formats_to_torch(name: str) -> None:
    case = Packing(name, 8 if name == "fp8" else 4)
    with mock.patch.object(pack, "pack_blocks") as packing:
        packed(case, *packing_cases.states_of(case))
    assert not packing.called


@needs_kernel
@pytest.mark.parametrize(
    "disguise",
    [torch._neg_view, lambda states: torch._efficientzerotensor(states.shape), lambda states: states[0], Tensor.double],
    ids=["a negation that is only noted", "zeros without memory", "three dimensions", "float64"],
)
def test_states_that_are_not_what_lies_in_memory_are_left_to_torch(disguise: Callable[[Tensor], Tensor]) -> None:
    states = torch.randn(1, 2, 64, 16)
    layout = BlockLayout(CodeFormat(4, 64, 1, rotated=True), "keys", 16, 64)
    assert pack.packs(layout, states, states)
    assert not pack.packs(layout, states, disguise(states))
    assert not pack.packs(layout, disguise(states), states)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not pack.packs(layout, states, states)


@needs_kernel
@pytest.mark.parametrize(
    ("code_format", "tokens"), [(CodeFormat(4, 64, 1), 100), (CodeFormat(4, 1, 64), 128), (CodeFormat(4, 1, 7), 64)]
)
def test_states_that_groups_do_not_divide_are_refused(code_format: CodeFormat, tokens: int) -> None:
    with pytest.raises(RuntimeError):
        NativeQuantizer(code_format).quantize(torch.randn(1, 2, tokens, 60))
