"""Cases of the kernels that pack and read blocks, run by `test_triton_quantizers` in a process of its own.

Triton decides when a kernel is defined whether it is compiled or interpreted, so `TRITON_INTERPRET` is to be set
before anything imports triton: not in the process of other tests.
"""

import contextlib
import copy
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

import kvlayers
from interpreted_kernels import tried
from kvlayers.kernels.codes import packed_side as side_module
from kvlayers.kernels.codes.cuda_packing import read_blocks
from kvlayers.kernels.codes.groups import BlockLayout
from kvlayers.kernels.codes.packed_side import PackedSide, pack_side
from kvlayers.quantized import packed_blocks as blocks_module
from kvlayers.quantized.packed_blocks import SIDES
from kvlayers.quantizers import CodeFormat, QuantizedGroups
from matrix import to_run
from packed_reference import counted_launches
from packing_cases import PACKINGS, Packing, check_side, not_finite, packed, smoothing_of, states_of, uneven


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Pack and read blocks as on a device without Triton."""

    def obstacle(*_: Any) -> str:
        return "a test"

    with (
        mock.patch.object(blocks_module, "pack_obstacle", obstacle),
        mock.patch.object(side_module, "read_obstacle", obstacle),
    ):
        yield


def check_packing(case: Packing) -> None:
    """Blocks that kernels packed are as good as those that the CPU packed, and are read as the CPU reads them."""
    keys, values = states_of(case)
    blocks = packed(case, keys, values)
    with without_kernels():
        expected = packed(case, keys, values)
    finite = keys.isfinite().all(-1) & values.isfinite().all(-1)
    (ours,), (other,) = blocks.segments(), expected.segments()
    even = smoothing_of(case, keys, values).applied(keys)
    for side, states in zip(SIDES, (even, values), strict=True):
        one = ours.side(side)
        with without_kernels():
            check_side(one, other.side(side), states, finite)
        # Rounded once to the dtype, from sums of float32 over head_dim, which take another order.
        assert is_read(one, case.dtype, 2 * max(torch.finfo(case.dtype).eps, 1e-6)), side
    assert bool(ours.values.parameters.isnan().any()) == (case.kind in (not_finite, uneven))
    assert [blocks.obstacle(side) for side in SIDES] == [None, None]


def is_read(side: PackedSide, dtype: torch.dtype, rounding: float) -> bool:
    """Whether a kernel reads the states that the CPU reads."""
    read = side.states(dtype)
    with without_kernels():
        dense = side.states(dtype)
    close = (read.double() - dense.double()).abs().nan_to_num(0) <= rounding * dense.double().abs().nan_to_num(0).amax()
    return bool(close.all()) and torch.equal(read.isnan(), dense.isnan())


READINGS: dict[str, tuple[CodeFormat, int, int, torch.dtype]] = {
    "keys by tokens": (CodeFormat(4, 1, 32), 64, 64, torch.bfloat16),
    "3 bits": (CodeFormat(3, 64, 1), 80, 64, torch.float32),
    "groups of tokens": (CodeFormat(2, 32, 1), 48, 96, torch.float16),
    "8 bits by tokens": (CodeFormat(8, 1, 25), 25, 64, torch.float32),
    "rotated by tokens": (CodeFormat(3, 1, 12, rotated=True), 36, 96, torch.bfloat16),
    "float8, every code": (CodeFormat(8, 1, 4, floating=True), 12, 64, torch.float32),
    "float8 of tokens": (CodeFormat(8, 32, 1, floating=True), 12, 64, torch.bfloat16),
}


def check_reading(code_format: CodeFormat, head_dim: int, block_tokens: int, dtype: torch.dtype) -> None:
    """States of random codes are those of the torch code, for keys and for values."""
    torch.manual_seed(0)
    shape = (2, 2, 2 * block_tokens, head_dim)
    grid = (*shape[:2], shape[2] // code_format.group_tokens, head_dim // code_format.group_channels)
    codes = torch.randint(0, 2**code_format.bits, shape, dtype=torch.uint8)
    zero = None if code_format.floating else torch.randn(grid).to(dtype)
    groups = QuantizedGroups(codes, torch.rand(grid).add(0.5).to(dtype), zero)
    for side in SIDES:
        layout = BlockLayout(code_format, side, head_dim, block_tokens)
        found = pack_side(groups, layout)
        # The second block alone: a view of larger buffers.
        one = PackedSide(*(part[:, 1:, 1:] for part in found), layout)
        assert is_read(one, dtype, 2 * torch.finfo(dtype).eps), side


def check_nan_of_a_gpu() -> None:
    """Arithmetic on a GPU gives NaN the bits 0x7FFFFFFF, which no arithmetic on a CPU does: it is read as NaN."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for rotated in (False, True):
            layout = BlockLayout(CodeFormat(4, 1, 32, rotated=rotated), "values", 32, 64)
            codes = torch.randint(0, 256, (1, 1, 1, layout.code_bytes), dtype=torch.uint8)
            parameters = torch.full((1, 1, 1, layout.parameters), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
            assert read_blocks(codes, parameters, layout, dtype).isnan().all(), (dtype, rotated)


def cache_of(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=16
    )
    return kvlayers.QuantizedCache(config=config, residual_length=32, sink_tokens=4, **options)


@torch.no_grad()
def decoded(passes: list[tuple[Tensor, Tensor]], **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The state of a cache after a prompt and decoded tokens, a fork and a crop; and states that were returned."""
    cache = cache_of(**options)
    returned = []
    for number, states in enumerate(passes):
        if number == 40:
            other = copy.deepcopy(cache)
            fork = cache.fork()
        keys, values = cache.update(*states, 0)
        if number in (0, 39, 100):
            # Now: states that a fork shares may be stale once the cache goes on.
            returned += [states.dense() if hasattr(states, "dense") else states.clone() for states in (keys, values)]
    # The fork packs its next block into the slots after the shared ones, after the cache has done so.
    for states in passes[40:100]:
        fork.update(*states, 0)
        other.update(*states, 0)
    same = all(
        torch.equal(tensor, other.layers[0].store.state()[name])
        for name, tensor in fork.layers[0].store.state().items()
    )
    assert same, "the fork differs"
    cache.crop(150)
    cache.update(*passes[1], 0)
    return cache.layers[0].store.state(), returned


def check_cache(**options: Any) -> None:
    """A cache that kernels pack and read holds what one does that the CPU packs and reads."""
    torch.manual_seed(0)
    passes = [(torch.randn(2, 2, tokens, 16), torch.randn(2, 2, tokens, 16)) for tokens in (200, *[1] * 140, 70)]
    with counted_launches() as launched:
        state, returned = decoded(passes, **options)
    assert min(launched["pack_block"], launched["read_block"]) >= 2, launched
    with without_kernels():
        expected, expected_returned = decoded(passes, **options)
    assert list(state) == list(expected)
    for name, tensor in state.items():
        if "codes" in name:
            assert (tensor == expected[name]).double().mean() > 0.998, name
        else:
            # Sums of 16 channels in another order.
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-5)
    # States of unit size, in float32.
    torch.testing.assert_close(returned, expected_returned, atol=1e-4, rtol=0)


CHECKS: dict[str, Callable[[], None]] = {
    **{f"blocks of {name} are read": functools.partial(check_reading, *case) for name, case in READINGS.items()},
    "nan is read as nan": check_nan_of_a_gpu,
    "a cache of int4 holds what the CPU would": functools.partial(check_cache, nbits=4),
    "a cache of float8 holds what the CPU would": functools.partial(check_cache, backend="fp8", nbits=8),
}


if __name__ == "__main__":
    packings = {name: tried(check_packing, PACKINGS[name]) for name in to_run(PACKINGS)}
    json.dump({"packings": packings, "checks": {name: tried(check) for name, check in CHECKS.items()}}, sys.stdout)
