"""Cases of the decode kernel, which `triton_gathered_cases` runs in a process of its own.

Triton decides when a kernel is defined whether it is compiled or interpreted, so `TRITON_INTERPRET` is to be set
before anything imports triton: not in the process of other tests.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from histories import Held, History, ordinary, side_by_side
from interpreted_kernels import tried
from kvlayers import QuantizedCache
from kvlayers.kernels.attention import dispatch, slabs
from kvlayers.kernels.attention.cuda import kernel, plan
from kvlayers.kernels.attention.cuda.plan import Launch, supports
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment, SegmentRows, of_repeats
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.kernels.codes.packed_side import PackedSide
from kvlayers.kernels.codes.quantizer_contract import CodeFormat, Side
from kvlayers.kernels.codes.smoothing import KeySmoothing
from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import DeviceFacts
from matrix import to_run
from random_states import hadamard, packed_states

SIDES: tuple[Side, Side] = ("keys", "values")


def in_products(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Attention by torch's products in float32, as on a CPU."""
    with mock.patch.object(slabs, "INTERPRETED", False):
        return slabs.attend(query, segments, mask, scale)


@dataclass
class Case:
    """States and queries of a case.

    `before` and `after` are the tokens of the dense segments on both sides of the packed ones. `cuts` are blocks before
    which the packed run is cut in two, and `between` the tokens of a dense segment at each cut. Without blocks, all
    segments are dense, or the only one is packed and empty.
    """

    keys: CodeFormat
    values: CodeFormat
    key_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    batch: int = 1
    kv_heads: int = 1
    blocks: int = 2
    block_tokens: int = 64
    groups: int = 2
    q_tokens: int = 1
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    """The sequence of each segment that each sequence reads; of those in `after`, each reads its own."""
    options: dict[str, Any] = field(default_factory=dict)
    mask_shape: tuple[int, int, int] | None = None
    mask_dtype: torch.dtype = torch.bool
    hidden: str | None = None
    """Which tokens the mask hides from the first query, all of them: `"dense"` or `"packed"`."""
    smoothed: tuple[str, ...] = ()
    """How packed keys were smoothed: `"factor"`, `"mean"` or both."""


def native(bits: int, channels: int = 64, rotated: bool = False) -> dict[str, CodeFormat]:
    return {
        "keys": CodeFormat(bits, 64, 1, rotated=rotated),
        "values": CodeFormat(bits, 1, channels, rotated=rotated),
    }


def per_token(bits: int, group: int = 64) -> dict[str, CodeFormat]:
    return {"keys": CodeFormat(bits, 1, group), "values": CodeFormat(bits, 1, group)}


FLOAT8 = CodeFormat(8, 64, 1, floating=True), CodeFormat(8, 1, 64, floating=True)
ENDS = (64, 0, 41)
CUT = {"ends": (64, 0, 23), "first": 35}
AROUND: dict[str, Any] = {"before": (5,), "after": (70,)}
"""Blocks of which whole groups of 16 and 32 tokens are not part of the history, at both ends."""

CASES: dict[str, Case] = {
    "only dense": Case(**native(4), blocks=0, after=(200,), batch=2),
    "only dense, three queries, a mask": Case(**native(4), **AROUND, blocks=0, q_tokens=3, mask_shape=(1, 1, 3)),
    "only dense, additive mask, bfloat16": Case(
        **native(4),
        blocks=0,
        batch=2,
        after=(70,),
        mask_shape=(2, 1, 1),
        mask_dtype=torch.bfloat16,
        dtype=torch.bfloat16,
    ),
    "only dense, a shared prefix": Case(**native(4), blocks=0, before=(70,), after=(9,), rows=(0, 0, 0)),
    "only dense, a shared prefix of two sequences": Case(
        **native(4), blocks=0, batch=2, before=(70,), after=(9,), rows=(1, 0, 1)
    ),
    "2 bits": Case(**native(2), batch=2, kv_heads=2),
    "4 bits": Case(**native(4), key_dim=128, value_dim=128, kv_heads=2),
    "8 bits": Case(**native(8), value_dim=128, kv_heads=2),
    "float8": Case(*FLOAT8, value_dim=128, kv_heads=2),
    "other widths of keys and values": Case(native(4)["keys"], native(2)["values"]),
    "bfloat16": Case(**native(4), dtype=torch.bfloat16),
    "float16": Case(**native(8), dtype=torch.float16),
    "float8 in bfloat16": Case(*FLOAT8, dtype=torch.bfloat16),
    "other head_dims of keys and values": Case(**native(4), key_dim=128, value_dim=64),
    "head_dim 256": Case(**native(8), key_dim=256, value_dim=256, blocks=1),
    "head_dim 80": Case(CodeFormat(4, 64, 1), CodeFormat(4, 1, 40), key_dim=80, value_dim=80),
    "head_dim 80 by chunks": Case(CodeFormat(2, 64, 1), CodeFormat(8, 1, 40), key_dim=80, value_dim=80),
    "head_dim 96": Case(CodeFormat(8, 64, 1), CodeFormat(4, 1, 48), key_dim=96, value_dim=96),
    "head_dim that is padded": Case(CodeFormat(2, 64, 1), CodeFormat(2, 1, 25), key_dim=100, value_dim=100),
    "scales of each token": Case(**per_token(4)),
    "scales of each token, 2 bits": Case(**per_token(2, 32)),
    "scales of each token, float8": Case(FLOAT8[1], replace(FLOAT8[1], group_channels=16)),
    "scales of each channel": Case(CodeFormat(4, 64, 1), CodeFormat(4, 64, 1)),
    "scales of half blocks": Case(CodeFormat(4, 32, 1), CodeFormat(4, 32, 1)),
    "longer blocks": Case(**native(4), block_tokens=128),
    "shorter blocks": Case(CodeFormat(4, 32, 1), CodeFormat(4, 1, 64), block_tokens=32),
    # Rows of few channels are padded, and slots of a byte that no channel has are beyond the last scale.
    "head_dim 4": Case(CodeFormat(4, 64, 1), CodeFormat(4, 1, 4), key_dim=4, value_dim=4),
    "head_dim 4, 2 bits": Case(CodeFormat(2, 64, 1), CodeFormat(2, 1, 4), key_dim=4, value_dim=4),
    "head_dim 12": Case(CodeFormat(4, 64, 1), CodeFormat(4, 1, 4), key_dim=12, value_dim=12),
    "head_dim 12, 2 bits": Case(CodeFormat(2, 64, 1), CodeFormat(2, 1, 12), key_dim=12, value_dim=12),
    "one query head a kv head": Case(**native(4), groups=1, kv_heads=2),
    "rows that do not fill a tile": Case(**native(4), groups=7, q_tokens=3, blocks=1),
    "rows of several programs": Case(**native(4), groups=5, q_tokens=7, blocks=1),
    "one block": Case(**native(4), blocks=1),
    "no block": Case(**native(4), blocks=0),
    "tokens dropped in front": Case(**native(4), options={"first": 17}),
    "blocks that are not full": Case(**native(4), blocks=3, options={"ends": ENDS}),
    "both": Case(**native(2), blocks=3, options={"ends": ENDS, "first": 63}),
    "both, 8 bits in float16": Case(**native(8), blocks=3, options=CUT, dtype=torch.float16),
    "both, float8": Case(*FLOAT8, blocks=3, options=CUT),
    "both, shorter blocks": Case(
        CodeFormat(4, 32, 1),
        CodeFormat(4, 1, 64),
        block_tokens=32,
        blocks=3,
        options={"ends": (32, 32, 3), "first": 30},
    ),
    "both, scales of each token": Case(
        CodeFormat(4, 1, 32), CodeFormat(4, 1, 8), blocks=3, options=CUT, dtype=torch.bfloat16
    ),
    "both, scales of each channel": Case(CodeFormat(4, 32, 1), CodeFormat(4, 32, 1), blocks=3, options=CUT),
    "both, scales of each channel, float8": Case(FLOAT8[0], CodeFormat(8, 16, 1, floating=True), blocks=3, options=CUT),
    "scale": Case(**native(4), options={"scale": 0.3}),
    "negative scale": Case(**native(4), options={"scale": -0.1}),
    "no scale": Case(**native(4), options={"scale": 0.0}),
    "mask": Case(**native(4), batch=2, mask_shape=(2, 4, 2), q_tokens=2, kv_heads=2),
    "mask, 2 bits": Case(**native(2), **AROUND, batch=2, mask_shape=(2, 4, 2), q_tokens=2, kv_heads=2),
    "mask of sequences, 2 bits": Case(**native(2), batch=2, mask_shape=(2, 1, 1), q_tokens=2, options={"first": 17}),
    "mask of sequences": Case(**native(4), batch=2, mask_shape=(2, 1, 1), q_tokens=2, options={"first": 17}),
    "mask and ends": Case(**native(4), batch=2, mask_shape=(2, 1, 1), blocks=3, options=CUT),
    "added mask": Case(**native(2), mask_shape=(2, 1, 1), batch=2, mask_dtype=torch.float32, options=CUT, blocks=3),
    "added mask in bfloat16": Case(
        **native(4),
        batch=2,
        mask_shape=(2, 4, 2),
        kv_heads=2,
        q_tokens=2,
        mask_dtype=torch.bfloat16,
        dtype=torch.bfloat16,
    ),
    "sinks and residual": Case(**native(4), **AROUND, kv_heads=2),
    "sinks": Case(**native(4), before=(5,)),
    "residual of several splits": Case(**native(4), after=(200,), blocks=1),
    "several segments on both sides": Case(**native(4), before=(5, 3), after=(40, 1), kv_heads=2, q_tokens=2),
    "sinks and residual, bfloat16": Case(**native(4), **AROUND, dtype=torch.bfloat16),
    "sinks and residual, float16": Case(**native(8), **AROUND, dtype=torch.float16),
    "sinks and residual, head_dim 80": Case(**native(4, 40), **AROUND, key_dim=80, value_dim=80),
    "sinks and residual, head_dim 256": Case(**native(8), **AROUND, key_dim=256, value_dim=256),
    "sinks and residual, head_dim 4": Case(**native(4, 4), **AROUND, key_dim=4, value_dim=4),
    "sinks and residual, other head_dims": Case(**native(4), **AROUND, key_dim=128, value_dim=64),
    "sinks and residual, negative scale": Case(**native(4), **AROUND, options={"scale": -0.1}),
    "sinks and residual, rows of several programs": Case(**native(4), **AROUND, groups=5, q_tokens=7),
    "sinks and residual, mask": Case(**native(4), **AROUND, mask_shape=(1, 4, 3), q_tokens=3, kv_heads=2),
    "sinks and residual, mask of sequences and cut blocks": Case(
        **native(4), **AROUND, batch=2, mask_shape=(2, 1, 1), blocks=3, options=CUT
    ),
    "sinks and residual, added mask": Case(
        **native(2), **AROUND, mask_shape=(1, 1, 3), mask_dtype=torch.float32, q_tokens=3, blocks=3, options=CUT
    ),
    "sinks and residual, added mask in bfloat16": Case(
        **native(4), **AROUND, mask_shape=(1, 1, 3), mask_dtype=torch.bfloat16, q_tokens=3, dtype=torch.bfloat16
    ),
    # A packed run that is shared up to a cut, with the own tokens of a fork behind it.
    "cut": Case(**native(4), **AROUND, blocks=3, cuts=(1, 2)),
    "cut, several queries": Case(**native(4), blocks=3, cuts=(1,), before=(5,), after=(40, 1), q_tokens=3),
    "cut, dense tokens at each cut": Case(
        **native(4), blocks=3, cuts=(1, 2), before=(5, 3), between=(70, 1), after=(40, 1), batch=2
    ),
    "cut, blocks that are not full": Case(**native(4), blocks=3, cuts=(1, 2), between=(9, 3), options=CUT),
    "cut, mask": Case(
        **native(4),
        **AROUND,
        blocks=3,
        cuts=(1, 2),
        between=(9, 3),
        mask_shape=(1, 4, 3),
        q_tokens=3,
        kv_heads=2,
        options=CUT,
    ),
    "cut, added mask": Case(
        **native(4, rotated=True),
        **AROUND,
        blocks=3,
        cuts=(1,),
        mask_shape=(1, 1, 3),
        mask_dtype=torch.float32,
        q_tokens=3,
    ),
    "cut, rotated, bfloat16": Case(
        **native(4, rotated=True), **AROUND, blocks=3, cuts=(1, 2), between=(70, 1), dtype=torch.bfloat16
    ),
    "cut, nothing in some pieces": Case(**native(4), blocks=2, cuts=(0, 2), between=(0, 3), after=(0, 9)),
    "shared": Case(**native(4), **AROUND, rows=(0, 0, 0), blocks=3),
    "shared by two batches, cut, mask": Case(
        **native(4, rotated=True),
        batch=2,
        rows=of_repeats(2, 2),
        before=(5,),
        between=(9, 3),
        after=(9,),
        blocks=3,
        cuts=(1, 2),
        mask_shape=(4, 2, 2),
        q_tokens=2,
        options=CUT,
    ),
    "shared by many, rows of several programs": Case(**native(4), rows=(0,) * 20, after=(9,), blocks=1),
    "shared unevenly": Case(**native(4, rotated=True), batch=3, rows=(2, 0, 2, 2), before=(5,), after=(9,), cuts=(1,)),
    "shared unevenly, mask and cut blocks": Case(
        **native(4), **AROUND, batch=2, rows=(1, 0, 1), mask_shape=(3, 2, 1), blocks=3, cuts=(1,), options=CUT
    ),
    "rotated": Case(**native(4, rotated=True), **AROUND, kv_heads=2),
    "smoothed": Case(**native(4), **AROUND, kv_heads=2, batch=2, q_tokens=2, smoothed=("factor", "mean")),
    "smoothed, rotated": Case(**native(4, rotated=True), **AROUND, batch=2, smoothed=("factor",)),
    "smoothed, rotated, bfloat16": Case(
        **native(4, rotated=True), **AROUND, dtype=torch.bfloat16, kv_heads=2, smoothed=("factor",)
    ),
    "smoothed, float8": Case(*FLOAT8, **AROUND, kv_heads=2, batch=2, smoothed=("mean",)),
    "smoothed, float8, bfloat16": Case(*FLOAT8, **AROUND, dtype=torch.bfloat16, kv_heads=2, smoothed=("mean",)),
    "smoothed, scales of each token": Case(**per_token(4), **AROUND, kv_heads=2, smoothed=("factor", "mean")),
    "smoothed, shared by even numbers of sequences": Case(
        **native(4, rotated=True), **AROUND, batch=2, rows=(0, 0, 1, 1), smoothed=("factor", "mean")
    ),
    "smoothed, shared by other numbers of sequences": Case(
        **native(4, rotated=True), **AROUND, batch=2, rows=(1, 0, 1), smoothed=("factor", "mean")
    ),
    "smoothed, head_dim 80": Case(
        **native(4, 40, rotated=True), **AROUND, key_dim=80, value_dim=80, smoothed=("factor", "mean")
    ),
    "rotated, 2 bits": Case(**native(2, rotated=True), key_dim=128, value_dim=128),
    "rotated, bfloat16": Case(**native(4, rotated=True), **AROUND, dtype=torch.bfloat16, key_dim=128, value_dim=128),
    "rotated, float16": Case(**native(8, rotated=True), **AROUND, dtype=torch.float16),
    "rotated, float8": Case(*(replace(side, rotated=True) for side in FLOAT8), **AROUND),
    "rotated, head_dim 80": Case(**native(4, 40, rotated=True), **AROUND, key_dim=80, value_dim=80),
    "rotated, head_dim 96": Case(**native(8, 48, rotated=True), **AROUND, key_dim=96, value_dim=96, q_tokens=3),
    "rotated, odd head_dim": Case(**native(4, 25, rotated=True), **AROUND, key_dim=25, value_dim=25),
    "rotated, other head_dims": Case(**native(4, rotated=True), **AROUND, key_dim=128, value_dim=64),
    "rotated, keys only": Case(native(4, rotated=True)["keys"], native(4)["values"], **AROUND),
    "rotated, values only": Case(native(4)["keys"], native(4, rotated=True)["values"], **AROUND),
    "rotated, mask and cut blocks": Case(
        **native(4, rotated=True), **AROUND, mask_shape=(1, 2, 3), q_tokens=3, blocks=3, options=CUT
    ),
    "rotated, tokens in full precision are hidden": Case(
        **native(4, rotated=True), **AROUND, mask_shape=(1, 1, 3), q_tokens=3, hidden="dense"
    ),
    "rotated, packed tokens are hidden": Case(
        **native(4, rotated=True), **AROUND, mask_shape=(1, 1, 3), q_tokens=3, hidden="packed"
    ),
}


def counted(blocks: int, block_tokens: int, options: dict[str, Any]) -> Tensor:
    """Which tokens of a run of blocks are part of the history."""
    tokens = torch.arange(blocks * block_tokens)
    held = tokens >= options.get("first", 0)
    if options.get("ends") is not None:
        held &= tokens % block_tokens < torch.tensor(options["ends"])[tokens // block_tokens]
    return held


def quantized(code_format: CodeFormat, side: Side, head_dim: int, case: Case) -> PackedSide:
    """A random side within larger buffers, whose other blocks hold nan, as do groups of tokens that were forgotten."""
    shape = (case.batch, case.kv_heads, case.blocks * case.block_tokens, head_dim)
    held = torch.unflatten(counted(case.blocks, case.block_tokens, case.options), 0, (-1, code_format.group_tokens))
    forgotten = ~held.any(1, keepdim=True)
    packed, _ = packed_states(code_format, side, shape, case.block_tokens, case.dtype, forgotten)
    spare = case.batch, case.kv_heads + 1, case.blocks + 3
    codes = torch.full((*spare, packed.codes.shape[3]), 0x7F, dtype=torch.uint8)
    parameters = torch.full((*spare, packed.parameters.shape[3]), torch.nan, dtype=packed.parameters.dtype)
    where = (slice(None), slice(1, None), slice(2, 2 + case.blocks))
    codes[where], parameters[where] = packed.codes, packed.parameters
    return PackedSide(codes[where], parameters[where], packed.layout)


def dense_segment(case: Case, tokens: int, batch: int) -> DenseSegment:
    """A view of what projections give: `[batch, tokens, kv_heads, head_dim]`."""
    sides = (
        torch.randn(batch, tokens, case.kv_heads, head_dim).transpose(1, 2).to(case.dtype)
        for head_dim in (case.key_dim, case.value_dim)
    )
    return DenseSegment(*sides)


def states_of(case: Case) -> KVSegments:
    """Random states of a case."""

    def dense(tokens: int, batch: int = case.batch) -> DenseSegment:
        return dense_segment(case, tokens, batch)

    first, ends = case.options.get("first", 0), case.options.get("ends")
    has_packed = case.blocks or not (case.before or case.after)
    if has_packed:
        keys = quantized(case.keys, "keys", case.key_dim, case)
        values = quantized(case.values, "values", case.value_dim, case)

    def packed(start: int, stop: int) -> PackedSegment:
        sides = (
            replace(side, codes=side.codes[:, :, start:stop], parameters=side.parameters[:, :, start:stop])
            for side in (keys, values)
        )
        # Each segment has vectors of its own.
        smoothing = smoothing_of(case) if case.smoothed else KeySmoothing()
        return PackedSegment(
            *sides, 0 if start else first, None if ends is None else ends[start:stop], smoothing=smoothing
        )

    pieces = itertools.starmap(packed, itertools.pairwise((0, *case.cuts, case.blocks)) if has_packed else ())
    around_cuts = itertools.zip_longest(pieces, map(dense, case.between))
    shared = [*map(dense, case.before), *(segment for pair in around_cuts for segment in pair if segment is not None)]
    if case.rows:
        rows = SegmentRows(case.batch, case.rows)
        shared = [segment.with_rows(rows) for segment in shared]
    own = [dense(tokens, len(case.rows) or case.batch) for tokens in case.after]
    return KVSegments((*shared, *own))


def smoothing_of(case: Case) -> KeySmoothing:
    """Random vectors of each sequence and kv head; of sequences that read the same states, the same ones."""
    vectors = {
        "factor": torch.rand(case.batch, case.kv_heads, 1, case.key_dim) + 1,
        "mean": torch.randn(case.batch, case.kv_heads, 1, case.key_dim),
    }
    of_readers = [*(case.rows or range(case.batch))]
    return KeySmoothing(**{name: vectors[name][of_readers].to(case.dtype) for name in case.smoothed})


def before_packing(packed: PackedSide) -> Tensor:
    """All states of a side in float64, as they were before they were packed."""
    states = packed.dequantized().double()
    return states @ hadamard(packed.layout.head_dim) if packed.layout.format.rotated else states


def held_in_float64(segment: DenseSegment | PackedSegment) -> Held:
    """A segment with the states of its columns in float64, all of which are tokens."""
    if isinstance(segment, DenseSegment):
        exact = [segment.states(side, torch.float64) for side in SIDES]
    else:
        exact = [before_packing(segment.side(side)) for side in SIDES]
    held = ordinary((segment, *exact), segment.rows)
    return replace(held, keys=segment.smoothing.restored(held.keys))


def mask_of(case: Case, segments: KVSegments) -> Tensor | None:
    """A random mask, of which the last of several rows hides all."""
    if case.mask_shape is None:
        return None
    shown = torch.rand(*case.mask_shape, segments.tokens) > 0.4
    if case.mask_shape != (1, 1, 1):
        shown[-1, -1, -1] = False
    before, packed = sum(case.before), slice(sum(case.before), segments.tokens - sum(case.after))
    if case.hidden == "packed":
        shown[:, :, 0, packed] = False
    if case.hidden == "dense":
        shown[:, :, 0, :before] = shown[:, :, 0, packed.stop :] = False
    if case.mask_dtype == torch.bool:
        return shown
    return torch.randn(shown.shape).masked_fill(~shown, -torch.inf).to(case.mask_dtype)


def query_of(case: Case) -> Tensor:
    """Queries of a case, a view of what projections give: `[batch, q_tokens, heads, head_dim]`."""
    heads = case.kv_heads * case.groups
    return torch.randn(len(case.rows) or case.batch, case.q_tokens, heads, case.key_dim).transpose(1, 2).to(case.dtype)


def attended_in_float32(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """What the kernel computes, before it is rounded to the dtype of the query."""
    reads = kernel.reads_of(segments)
    assert not isinstance(reads, str), reads
    variants = [kernel.variant_of(read, *query.shape[1:3], kernel.kind_of(mask)) for read in reads]
    return kernel.split_call(query, reads, variants, mask, scale)(torch.float32)


def attended(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor | str:
    """What the kernel returns, or why it cannot."""
    return kernel.attend(query, segments, mask, scale, functools.partial(slabs.attend, query, segments, mask, scale))


def check_case(case: Case) -> None:
    """Attention of a case is that of the reference."""
    torch.manual_seed(0)
    segments, query = states_of(case), query_of(case)
    mask = mask_of(case, segments)
    scale = case.options.get("scale", case.key_dim**-0.5)
    out = attended_in_float32(query, segments, mask, scale)
    if case.after and case.dtype != torch.float32:
        rounded = attended(query, segments, mask, scale)
        assert isinstance(rounded, Tensor), rounded
        assert rounded.dtype == case.dtype
        assert rounded.transpose(1, 2).is_contiguous()
        # The interpreter cuts float32 off to bfloat16, and does not round it.
        torch.testing.assert_close(rounded, out.to(case.dtype))
    held = side_by_side([held_in_float64(segment) for segment in segments.in_order], case.dtype)
    check_attention(case, held, query, mask, scale, out)


def check_attention(case: Case, held: History, query: Tensor, mask: Tensor | None, scale: float, out: Tensor) -> None:
    """No result is further off than roundings allow."""
    expected, size = held.attended(query, mask, scale)
    assert out.dtype == torch.float32
    # Of a query that sees nothing.
    assert not out[(size == 0).expand_as(out)].any()
    # Operands of products are rounded to the dtype of the states: the queries after scaling, whose errors add up over
    # head_dim in a score, and the weights, of which each output is a mean. With float32 the sums round, and exp2.
    rounding = torch.finfo(case.dtype).eps if case.dtype != torch.float32 else 8 * torch.finfo(torch.float32).eps
    # Random factors are below two.
    spread = abs(float(query.double().norm(dim=-1).amax() * scale)) * (2 if "factor" in case.smoothed else 1)
    largest = float(held.values.abs().amax()) if held.values.numel() else 1.0
    limit = max(largest, 1e-9) * rounding * (2 + 2 * spread)
    assert not out.numel() or (out - expected).abs().amax() <= limit, (out - expected).abs().amax() / limit


def check_cases() -> dict[str, Any]:
    # As many splits as blocks: merging is part of every case.
    runs = {name: (CASES[name], Launch(programs=10**6, minimum_blocks=1)) for name in to_run(CASES)}
    runs["several blocks a split"] = replace(CASES["both"], blocks=3), Launch(minimum_blocks=3)
    found = {}
    for name, (case, launch) in runs.items():
        with mock.patch.object(plan, "LAUNCH", launch):
            found[name] = tried(check_case, case)
    return found


def check_nan() -> None:
    """Queries get nan of a token that is not finite, as long as it is part of the history."""
    case = Case(**native(4))
    keys, values = quantized(case.keys, "keys", 64, case), quantized(case.values, "values", 64, case)
    parameters = torch.unflatten(values.parameters, -1, (2, values.layout.block_tokens, -1))
    parameters[:, :, 0, :, 9] = torch.nan
    parameters[:, :, 1, :, 40] = torch.nan
    query = torch.randn(1, 2, 1, 64)
    for first, end, expected in ((10, 40, False), (9, 40, True), (10, 41, True), (0, 64, True)):
        segments = KVSegments((PackedSegment(keys, values, first, (64, end)),))
        assert bool(attended_in_float32(query, segments, None, 0.125).isnan().any()) == expected, (first, end)


def check_not_finite() -> None:
    """Which of two query heads get nan, when there is a number that is not finite outside of the packed states."""
    for part, number, expected in (
        ("query", torch.nan, [False, True]),
        ("query", torch.inf, [False, True]),
        (0, torch.nan, [True, True]),
        (2, torch.nan, [True, True]),
        (2, torch.inf, [True, True]),
        ("scale", torch.nan, [True, True]),
    ):
        torch.manual_seed(0)
        segments = states_of(Case(**native(4), before=(5,), after=(9,)))
        query, scale = torch.rand(1, 2, 1, 64) + 0.1, number if part == "scale" else 0.125
        if part == "query":
            query[0, 1, 0, 3] = number
        elif part != "scale":
            segments.in_order[part].keys[0, -1, 2, 3] = number
        found = attended(query, segments, None, scale).isnan().any(-1)[0, :, 0].tolist()
        assert found == expected, (part, number, found)


def check_resources() -> None:
    """Stages of the kernel on devices of less and less shared memory, and what is said if one has too little."""
    segments, query = states_of(CASES["rotated"]), query_of(CASES["rotated"])
    stages, refused, asked = [], [], []
    refusal = "the kernel needs 1000 bytes of shared memory, and the GPU has 900"

    def shared_memory(*arguments: Any) -> int:
        asked.append(arguments)
        return 1000 * int(arguments[-1]["num_stages"])

    for limit in (3000, 2500, 1000, 900, None):
        packed = segments.in_order[1]
        packed.kernel_cache.clear()
        segments.kernel_cache.clear()
        with (
            mock.patch.object(triton_support, "device_facts", lambda device, limit=limit: DeviceFacts(None, 1, limit)),
            mock.patch.object(plan.ATTEND_SPLIT, "shared_memory", shared_memory, create=True),
        ):
            attended(query, segments, None, 0.125)
            variant = plan.variant_for(plan.plan_of(packed).kind, 2, 16, 0, False, False, False, False, False)
            stages.append(variant.obstacle or variant.constants["num_stages"])
            paths = PathCounter()
            out = dispatch.attend(query, segments, None, 0.125, paths)
            # What `explain()` says.
            refused += [path.endswith(refusal) for path in paths.counts]
            torch.testing.assert_close(out, in_products(query, segments, None, 0.125))
    assert stages == [3, 2, 1, refusal, 3], stages
    assert refused == [False] * 3 + [True, False], refused
    # One question for each number of stages: answers are kept.
    assert len(asked) == 1 + 2 + 3 + 3, asked


def check_wrong_code() -> None:
    """Code that is wrong is launched once for all segments of a kind, and its result is never used."""
    launched, found = [], []
    launch = plan.ATTEND_SPLIT.launch

    def wrong(device: Any, grid: Any, arguments: tuple[Any, ...], constants: Any) -> None:
        launched.append(grid)
        launch(device, grid, (*arguments[:-1], 30 * arguments[-1]), constants)

    plan.variant_for.cache_clear()
    plan.segment_kind.cache_clear()
    with mock.patch.object(plan.ATTEND_SPLIT, "launch", wrong):
        # Of the first query, the expected result is nan, and says nothing of it.
        for blocks, number in ((2, torch.nan), (2, 1.0), (3, 1.0), (5, 1.0)):
            torch.manual_seed(0)
            segments, query = states_of(Case(**native(4), **AROUND, blocks=blocks)), torch.randn(1, 2, 1, 64)
            query[0, 0, 0, 3] = number
            paths = PathCounter()
            out = dispatch.attend(query, segments, None, 0.125, paths)
            found += paths.counts
            if number == number:
                torch.testing.assert_close(out, in_products(query, segments, None, 0.125))
    plan.variant_for.cache_clear()
    plan.segment_kind.cache_clear()
    assert len(launched) == 2, launched
    assert ["the first result of the kernel was" in path for path in found] == [False, True, True, True], found
    assert found[0] == "a Triton kernel on segments", found


def check_cache(backend: str, nbits: int) -> None:
    """A cache that decodes while blocks are packed: attention to its states, against the dense reference."""
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, head_dim=64
    )
    cache = QuantizedCache(backend, config, nbits=nbits, residual_length=32)
    torch.manual_seed(0)
    worst, packed_tokens, paths = 0.0, set(), set()
    for step, new in enumerate((150, *[1] * 10, 3, *[1] * 25)):
        keys, values = cache.update(torch.randn(1, 2, new, 64), torch.randn(1, 2, new, 64), 0)
        if not isinstance(keys, PackedStates) or step % 10 not in (0, 1):
            continue
        query, mask = torch.randn(1, 4, new, 64), None
        if new > 1:
            mask = torch.ones(new, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - new)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        segments = keys.snapshot.segments
        whole = None if mask is None else mask.expand(1, 4, new, segments.tokens)
        expected = in_products(query, segments, whole, 64**-0.5)
        worst = max(worst, float((out - expected).abs().amax()))
        packed_tokens.add(sum(one.tokens for one in segments.in_order if isinstance(one, PackedSegment)))
        paths |= set(keys.snapshot.paths.counts)
    # float32 throughout: sums of 200 tokens and 64 channels, of states of unit size.
    assert worst < 1e-5, worst
    assert len(packed_tokens) > 1, packed_tokens
    assert paths == {"a Triton kernel on segments"}, paths


def check_device() -> None:
    """Devices that are current as the kernels are launched, and those that are made current for a device."""
    case = CASES["4 bits"]
    segments = states_of(case)
    current: list[str] = []
    launched: list[list[str]] = []

    @contextlib.contextmanager
    def launching_on(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    function = mock.MagicMock()
    function.__getitem__.return_value.side_effect = lambda *arguments, **options: launched.append([*current])
    with (
        mock.patch.object(plan.ATTEND_SPLIT, "function", function),
        mock.patch.object(plan.MERGE_SPLITS, "function", function),
        mock.patch.object(triton_support, "launching_on", launching_on),
    ):
        attended(torch.randn(1, 4, 1, 128), segments, None, 0.1)
    with (
        mock.patch.object(torch.cuda, "device", lambda device: f"current {device}"),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        contexts = [str(triton_support.launching_on(torch.device(name))) for name in ("cuda:1", "cuda:0", "cpu")]
    assert launched == [["cpu"], ["cpu"]], launched
    assert contexts[0] == "current cuda:1", contexts
    assert ["nullcontext" in context for context in contexts[1:]] == [True, True], contexts


def check_refusals() -> None:
    """What `obstacle` says of states and queries that the kernel does not take."""
    segments = states_of(Case(**native(4), **AROUND, key_dim=128, value_dim=128))
    before, packed, after = segments.in_order
    keys, values = packed.keys, packed.values
    query = torch.randn(1, 4, 1, 128)
    of_3_bits = PackedSegment(changed(keys, bits=3), values)
    half = DenseSegment(after.keys.half(), after.values)
    rotated = PackedSegment(keys, changed(values, rotated=True))
    without = before.with_tensors([before.keys[:, :, :0]] * 2)
    cases: list[tuple[Tensor, tuple[Any, ...], str | None]] = [
        (query, (before, packed, after), None),
        (query, (before, after), None),
        (query[:, :, :0], (before, packed, after), None),
        (query, (without,), "there are no tokens"),
        (
            torch.randn(1, 4, 65, 128),
            (before, packed, after),
            "there are more than 256 queries for a kv head, as in a prompt",
        ),
        (
            query.expand(65536, -1, -1, -1),
            (before, packed, after),
            "there are more than 65535 kv heads in all sequences",
        ),
        (query.bfloat16(), (before, packed, after), "queries are torch.bfloat16, and scales torch.float32"),
        (
            query,
            (before, packed, half),
            "scales are torch.float32, and states in full precision torch.float16 and torch.float32",
        ),
        (query, (before, of_3_bits, after), "the kernel does not support such codes"),
        (query, (packed, rotated), "packed segments have other dtypes, or rotations"),
    ]
    for given, held, expected in cases:
        said = attended(given, KVSegments(held), None, 0.1)
        assert said == expected if expected is not None else said.shape == given.shape, said
    one, other, exact = keys.layout, values.layout, torch.float32
    supported = [
        supports(one, other, exact),
        supports(changed(keys, bits=1).layout, other, exact),
        supports(one, other, torch.float64),
        supports(*(replace(layout, block_tokens=48) for layout in (one, other)), exact),
        supports(*(replace(layout, block_tokens=512) for layout in (one, other)), exact),
        supports(one, replace(other, head_dim=512), exact),
    ]
    assert supported == [True, False, False, False, False, False], supported


def changed(side: PackedSide, **numbers: Any) -> PackedSide:
    """A side whose codes have another meaning."""
    return replace(side, layout=replace(side.layout, format=replace(side.layout.format, **numbers)))


CHECKS: dict[str, Callable[[], None]] = {
    "nan comes only from held tokens": check_nan,
    "queries that meet a number that is not finite get nan": check_not_finite,
    "kernels are launched on the device of the query": check_device,
    "states and queries that the kernel does not take are named": check_refusals,
    "a kernel that needs too much shared memory has fewer stages or is not launched": check_resources,
    "code that is wrong is launched once and its result never used": check_wrong_code,
    "a cache of int4 decodes over a packing": functools.partial(check_cache, "native", 4),
    "a cache of float8 decodes over a packing": functools.partial(check_cache, "fp8", 8),
}


def results() -> dict[str, Any]:
    """What the cases and the checks gave."""
    return {"cases": check_cases(), "checks": {name: tried(check) for name, check in CHECKS.items()}}
