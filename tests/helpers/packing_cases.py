"""Blocks of states of every kind, packed: cases for the kernels of every device."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvlayers.core.buffer import form_of
from kvlayers.kernels.codes.groups import unpack
from kvlayers.kernels.codes.packed_side import PackedSide
from kvlayers.kernels.codes.smoothing import KeySmoothing
from kvlayers.quantized.packed_blocks import SIDES, PackedBlocks
from kvlayers.quantizers import Quantizer, Side, SideOptions, backend

BLOCK_TOKENS = 64


def usual(states: Tensor, side: Side) -> Tensor:
    """Channels of many sizes."""
    return states * torch.linspace(0.1, 4, states.shape[-1])


def constant(states: Tensor, side: Side) -> Tensor:
    """Groups of equal states, once they are rotated: keys of one token, values of one channel."""
    return states[:, :, :1].expand_as(states) if side == "keys" else states * (torch.arange(states.shape[-1]) == 0)


def uneven(states: Tensor, side: Side) -> Tensor:
    """A channel that varies much, one that is a large constant, and tokens that are not finite."""
    states = not_finite(states, side)
    states[..., 5] *= 30
    states[..., 9] += 100
    return states


def huge(states: Tensor, side: Side) -> Tensor:
    """Up to the limit of float16."""
    return states.clamp(-3, 3) * (65504 / 3)


def hugest(states: Tensor, side: Side) -> Tensor:
    """Up to the limit of bfloat16 and float32."""
    return states.clamp(-3, 3) * (3e38 / 3)


def at_the_limit(states: Tensor, side: Side) -> Tensor:
    """Tokens whose rotation adds up, beside usual ones."""
    return torch.where((torch.arange(states.shape[2]) % 3 == 0)[:, None], 3e38, states)


def tiny(states: Tensor, side: Side) -> Tensor:
    """About the smallest numbers of float16."""
    return states * 2e-7


def zeros(states: Tensor, side: Side) -> Tensor:
    """Nothing."""
    return states * 0


def not_finite(states: Tensor, side: Side) -> Tensor:
    """Tokens with NaN in a key, and with infinity in a value."""
    states = states.clone()
    if side == "keys":
        states[:, :, 3, 5] = torch.nan
        states[:, :, 40, 0] = torch.inf
    else:
        states[:, :, 41] = -torch.inf
        states[:, -1, 63, 1] = torch.nan
    return states


@dataclass
class Packing:
    """States to pack."""

    name: str = "native"
    bits: int = 4
    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    value_head_dim: int | None = None
    kind: Callable[[Tensor, Side], Tensor] = usual
    batch: int = 1
    kv_heads: int = 1
    blocks: int = 1
    smoothed: bool = False
    key_group: int | None = None
    value_group: int | None = None


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 80, 96, 128)
FORMATS = (("native", 2), ("native", 3), ("native", 4), ("native", 5), ("native", 6), ("native", 8), ("fp8", 8))

PACKINGS: dict[str, Packing] = {
    f"{name} {bits}, {str(dtype).removeprefix('torch.')}, head_dim {head_dim}": Packing(name, bits, dtype, head_dim)
    # Each format in each dtype and head_dim, not in each pair of them.
    for of_format, (name, bits) in enumerate(FORMATS)
    for of_dtype, dtype in enumerate(DTYPES)
    for of_dim, head_dim in enumerate(HEAD_DIMS)
    if (of_format + of_dtype + of_dim) % 3 == 0
}
for kind, dtype in (
    (constant, torch.bfloat16),
    (huge, torch.float16),
    (hugest, torch.bfloat16),
    (hugest, torch.float32),
    (tiny, torch.float16),
    (zeros, torch.bfloat16),
    (not_finite, torch.bfloat16),
):
    for name, bits in (("native", 4), ("native", 8), ("fp8", 8)):
        packing = Packing(name, bits, dtype, 16, kind=kind, kv_heads=2)
        PACKINGS[f"{name} {bits}, {str(dtype).removeprefix('torch.')}, {kind.__name__}"] = packing
PACKINGS |= {
    "several sequences, heads and blocks": Packing(batch=2, kv_heads=2, blocks=3, head_dim=16),
    "other head_dims of keys and values": Packing(head_dim=128, value_head_dim=64, bits=3),
    "head_dim 256 at the limit": Packing(head_dim=256, dtype=torch.bfloat16, kind=at_the_limit),
    "smoothed, not_finite, float32": Packing(kind=uneven, batch=2, kv_heads=2, blocks=2, smoothed=True),
    "smoothed, not_finite, bfloat16": Packing(
        kind=uneven, kv_heads=2, head_dim=80, dtype=torch.bfloat16, smoothed=True
    ),
    "smoothed, not_finite, float8": Packing("fp8", 8, kind=uneven, kv_heads=2, head_dim=96, smoothed=True),
    "smoothed, not_finite, float8, float16": Packing("fp8", 8, kind=uneven, dtype=torch.float16, smoothed=True),
    "head_dim 124": Packing(head_dim=124),
    "head_dim 100": Packing(head_dim=100, bits=2),
    "head_dim 7": Packing(head_dim=7, bits=3),
    "small groups": Packing(key_group=16, value_group=8, head_dim=32),
    "small groups of no power of two": Packing(value_group=12, head_dim=96, bits=2, dtype=torch.bfloat16),
    "small groups of float8": Packing("fp8", 8, key_group=32, value_group=12, head_dim=36),
}


def states_of(case: Packing) -> tuple[Tensor, Tensor]:
    """Keys and values as projections give them: `[batch, tokens, kv_heads, head_dim]` in memory."""
    torch.manual_seed(0)
    keys, values = (
        torch.randn(case.batch, case.blocks * BLOCK_TOKENS, case.kv_heads, head_dim).transpose(1, 2)
        for head_dim in (case.head_dim, case.value_head_dim or case.head_dim)
    )
    return case.kind(keys, "keys").to(case.dtype), case.kind(values, "values").to(case.dtype)


def quantizers_of(case: Packing, keys: Tensor, values: Tensor) -> dict[Side, Quantizer]:
    return {
        side: backend(case.name).quantizer(SideOptions(side, case.bits, None, group), states.shape[3])
        for side, states, group in zip(SIDES, (keys, values), (case.key_group, case.value_group), strict=True)
    }


def smoothing_of(case: Packing, keys: Tensor, values: Tensor) -> KeySmoothing:
    """How keys are smoothed."""
    if not case.smoothed:
        return KeySmoothing()
    return KeySmoothing.for_keys(keys[:, :, None, :BLOCK_TOKENS], quantizers_of(case, keys, values)["keys"])


def packed(case: Packing, keys: Tensor, values: Tensor) -> PackedBlocks:
    """Blocks of the states, written in two parts if there are several."""
    quantizers, smoothing = quantizers_of(case, keys, values), smoothing_of(case, keys, values)
    blocks = PackedBlocks(quantizers, (form_of(keys), form_of(values)), BLOCK_TOKENS)
    blocks.prepare(case.blocks)
    first = BLOCK_TOKENS
    blocks.write(0, keys[:, :, :first], values[:, :, :first], smoothing)
    if case.blocks > 1:
        blocks.write(1, keys[:, :, first:], values[:, :, first:], smoothing)
    blocks.hold(case.blocks)
    return blocks


def codes_of(side: PackedSide) -> Tensor:
    return unpack(
        torch.unflatten(side.codes, -1, (side.layout.rows, side.layout.row_bytes)),
        side.layout.format.bits,
        side.layout.columns,
    )


def squared_error(side: PackedSide, states: Tensor, finite: Tensor) -> float:
    """Of finite states, in units of their largest."""
    exact = states.double()[finite]
    largest = exact.abs().amax().clamp(min=1e-300)
    return float(((side.states(torch.float32).double()[finite] - exact) / largest).square().sum())


def check_side(one: PackedSide, other: PackedSide, states: Tensor, finite: Tensor) -> None:
    """Blocks that a kernel packed are as good as those that torch packed."""
    # A code differs where rounding moves a state over the border between two, or the search to another range.
    assert float((codes_of(one) == codes_of(other)).double().mean()) > 0.998
    errors = [squared_error(each, states, finite) for each in (one, other)]
    assert errors[0] <= errors[1] * 1.002 + 1e-12
    assert torch.equal(one.parameters.isnan(), other.parameters.isnan())
    # A sum that overflows makes a parameter many times too large, and need not change a code.
    largest = [float(each.parameters.nan_to_num(0).double().abs().amax()) for each in (one, other)]
    assert largest[0] == pytest.approx(largest[1], rel=0.1)
