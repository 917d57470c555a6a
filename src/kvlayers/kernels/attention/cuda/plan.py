"""What is prepared once for a segment, and used for each launch until it changes: arguments and compiled kernels."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers.kernels.attention.cuda.specs import (
    BOOL_MASK,
    dense_side_spec,
    side_spec,
    warps_of_program,
)
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS, DenseSegment, PackedSegment
from kvlayers.kernels.codes.cuda_packing import Constants
from kvlayers.kernels.codes.groups import BlockLayout
from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import DTYPES, DeviceFacts, KeptConstants, TritonKernel, is_interpreted, power_of_two

WIDTHS = (2, 4, 8)
"""Bits of a code that the kernel unpacks."""

LARGEST_BLOCK = 256
"""Tokens of a block: the scores of more do not fit into registers."""

LARGEST_HEAD_DIM = 256
"""Channels of a key or value that one program holds at most."""


@dataclass(frozen=True)
class Launch:
    """How the work is divided on a device. No number changes the result, apart from the order of sums.

    Attributes:
        programs: programs for each multiprocessor; with fewer, memory bandwidth stays unused.
        minimum_blocks: fewest blocks of a split, so that its partial result is small beside the codes it reads.
        stages: blocks in the copy pipeline, including the current one; fewer if shared memory is too small.
    """

    programs: int = 8
    minimum_blocks: int = 2
    stages: int = 3


LAUNCH = Launch()
"""How work is divided. Kinds of segments keep it, so it holds for segments that are read for the first time."""

_FLOAT16_BOOSTS = {2: 1.0, 4: 4.0, 8: 64.0}
"""Factor of the value scales in float16, for each width of a code: weights times small scales would be subnormal.

A scale is at most the range of float16 divided by the largest code, so it stays finite.
"""

_SPLITS_MERGED_AT_ONCE = 16
_DENSE_BYTES = 8192
"""Bytes of the keys in full precision that a program reads at once: more would not fit into registers."""

DENSE_TOKENS = 64
"""Fewest tokens in full precision of a split."""

ATTEND_SPLIT = TritonKernel("kvlayers.kernels.attention.cuda.triton_kernels", "attend_split")
MERGE_SPLITS = TritonKernel("kvlayers.kernels.attention.cuda.triton_kernels", "merge_splits")


class Variant:
    """A compiled variant of the split kernel.

    Attributes:
        rows: rows of queries that a program takes.
        wide_mask: whether it needs bool masks in numbers of two bytes.
        constants: its compile-time constants.
        is_fitted: whether `fit` has found out how many stages it has.
        obstacle: why it cannot be launched, `None` if it can.
        compared: whether a result of it has been compared with that of torch.
    """

    __slots__ = ("compared", "constants", "is_fitted", "obstacle", "rows", "wide_mask")

    def __init__(self, spec: Constants, launch: Launch, dtype: torch.dtype) -> None:
        self.rows: int = spec.rows
        # Triton lays out the operands of products by the narrowest number that goes into them, halved by a join: with a
        # byte, a thread would hold more tokens than a part has, and count each of them twice.
        self.wide_mask = spec.joined and spec.mask == BOOL_MASK
        # Fused multiply-add is not the default of every version of triton.
        self.constants = KeptConstants(
            SPEC=spec, num_warps=warps_of_program(spec, dtype), num_stages=launch.stages, enable_fp_fusion=True
        )
        self.obstacle: str | None = None
        self.is_fitted = self.compared = False

    def fit(self, device: torch.device, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Find out with how many stages the device has enough shared memory. This compiles the kernel."""
        # Other threads may launch, or find out the same.
        constants = KeptConstants(**self.constants)
        while (obstacle := ATTEND_SPLIT.obstacle(device, grid, arguments, constants)) and constants["num_stages"] > 1:
            constants["num_stages"] -= 1
        self.constants, self.obstacle, self.is_fitted = constants, obstacle, True


@dataclass(frozen=True, eq=False)
class SegmentKind:
    """What segments that are coded in one way have in common. Some segments are new at each step, their kind is not.

    Attributes:
        device: device of the segments.
        facts: what is known of the device.
        dtype: dtype of the states.
        keys: how keys are coded.
        values: how values are coded.
        kv_heads: heads that have keys and values.
        block_tokens: tokens of a block.
        packed: whether blocks are packed.
        first: whether tokens at the front of the first block have been evicted.
        ends: whether there are blocks that are not full.
        launch: how work is divided.
    """

    device: torch.device
    facts: DeviceFacts
    dtype: torch.dtype
    keys: Constants
    values: Constants
    kv_heads: int
    block_tokens: int
    packed: bool
    first: bool
    ends: bool
    launch: Launch


segment_kind = functools.lru_cache(maxsize=256)(SegmentKind)
"""The same object for the same attributes."""


@functools.cache
def variant_for(
    kind: SegmentKind,
    groups: int,
    rows: int,
    mask: int,
    shared: bool,
    indexed: bool,
    gathered: bool,
    factors: bool,
    means: bool,
) -> Variant:
    """The split kernel, the same one for all segments that need the same.

    It is compiled for:

    - keys: how keys are coded.
    - values: how values are coded.
    - block_tokens: tokens of a packed block, or the most of a gathered piece in full precision.
    - kv_heads: heads that have keys and values.
    - groups: query heads of each kv head.
    - rows: rows of queries that a program takes.
    - key_channels: head_dim of the keys, padded to a power of two.
    - value_channels: head_dim of the values, padded to a power of two.
    - columns: words of values, padded to a power of two.
    - joined: whether two tiles of scores are one part, because one has too few columns for the next product.
    - parts: parts of the scores of a block.
    - mask: `NO_MASK`, `BOOL_MASK` or `ADDED_MASK`.
    - first: whether tokens at the front of the first block have been evicted.
    - ends: whether there are blocks that are not full, or pieces that have other lengths.
    - shared: whether several sequences side by side read each sequence of the segments.
    - indexed: whether a tensor has the sequence of the segments that each sequence reads.
    - packed: whether the segment that is read in blocks is packed, and not in full precision.
    - gathered: whether tables have the blocks that each kv head reads.
    - factors: whether packed keys were divided by factors of their channels, which queries are multiplied by.
    - means: whether packed keys lack a mean, whose products with queries are added to the scores.
    - boost: factor of the value scales.
    - divisor: factor of the sums that is to be undone.
    - unfold: factor of the scores of packed keys.
    - dense_tokens: tokens in full precision that are read at once.
    - emulated: whether triton interprets the kernel.
    """
    keys, values = kind.keys, kind.values
    boost = _FLOAT16_BOOSTS[values.bits] if kind.packed and kind.dtype == torch.float16 else 1.0
    joined = kind.packed and keys.words < 16
    widest = power_of_two(max(keys.head_dim, values.head_dim))
    spec = Constants(
        keys=keys,
        values=values,
        block_tokens=kind.block_tokens,
        kv_heads=kind.kv_heads,
        groups=groups,
        rows=rows,
        key_channels=max(16, power_of_two(keys.head_dim)),
        value_channels=max(16, power_of_two(values.head_dim)),
        columns=max(8, power_of_two(values.words)),
        joined=joined,
        parts=keys.tiles // 2 if joined else keys.tiles,
        mask=mask,
        first=kind.first,
        ends=kind.ends or gathered,
        shared=shared,
        indexed=indexed,
        packed=kind.packed,
        gathered=gathered,
        factors=factors,
        means=means,
        boost=boost,
        divisor=boost if values.folded and not values.floating else 1.0,
        # Codes of float8 are 256 times the numbers that the kernel unpacks, which it makes up for with the scales.
        unfold=256.0 if keys.floating and keys.folded else 1.0,
        dense_tokens=min(64, max(16, _DENSE_BYTES // (widest * kind.dtype.itemsize))),
        emulated=is_interpreted(),
    )
    return Variant(spec, kind.launch, kind.dtype)


@functools.lru_cache(maxsize=1024)
def merge_constants(device: torch.device, values: Constants, heads: int, gaps: bool) -> KeptConstants:
    """The constants of the merge kernel on a device.

    It is compiled for:

    - heads: query heads.
    - head_dim: channels of a value.
    - channels: the same, padded to a power of two.
    - rotation: binary logarithm of the channels that a Hadamard matrix has mixed in packed values, or 0.
    - at_once: splits that are read at once.
    - gaps: whether there may be splits without tokens, which have stored no sums.
    """
    spec = Constants(
        heads=heads,
        head_dim=values.head_dim,
        channels=power_of_two(values.head_dim),
        rotation=values.rotation,
        at_once=_SPLITS_MERGED_AT_ONCE,
        gaps=gaps,
    )
    return KeptConstants(SPEC=spec, num_warps=4, enable_fp_fusion=True)


@dataclass(eq=False)
class SegmentPlan:
    """The arguments of one segment.

    If the segment is in full precision, keys and values stand for codes, a block is the most tokens of a piece, and
    nothing is rotated.

    Attributes:
        kind: the kind of the segment.
        tensors: codes and parameters of the keys and of the values, and the ends of the blocks. Pointers of the right
            type stand for what is never read.
        strides: batch, head and block strides of the first four tensors.
        blocks: number of blocks.
        first: tokens at the front of the first block that have been evicted.
    """

    kind: SegmentKind
    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]
    blocks: int = 0
    first: int = 0

    @functools.cached_property
    def starts(self) -> Tensor:
        """int32 `[blocks]`: the tokens that are held in front of each block, by which masks are indexed."""
        ends = self.tensors[4]
        if not self.kind.ends:
            return ends
        starts = torch.cumsum(ends, 0, dtype=torch.int32) - ends
        starts[1:] -= self.first
        return starts


def plan_of(segment: PackedSegment | DenseSegment) -> SegmentPlan | str:
    """The plan of a segment, made once for as long as it does not change, or why the kernel cannot take it."""
    # Not with the segment itself: it holds the plan, and the two would outlive each other on the GPU.
    return segment.kernel_cache.kept(  # type: ignore[no-any-return]
        "triton", lambda: _of_packed(segment) if isinstance(segment, PackedSegment) else _of_dense(segment)
    )


def _of_packed(segment: PackedSegment) -> SegmentPlan | str:
    keys, values = segment.keys, segment.values
    device, dtype = keys.codes.device, keys.parameters.dtype
    facts = triton_support.device_facts(device)
    if facts.obstacle is not None:
        return facts.obstacle
    if not supports(keys.layout, values.layout, dtype):
        return "the kernel does not support such codes"
    key_codes, value_codes = _words(keys.codes), _words(values.codes)
    of_packed = key_codes, keys.parameters, value_codes, values.parameters
    kind = segment_kind(
        device,
        facts,
        dtype,
        side_spec(keys.layout, dtype),
        side_spec(values.layout, dtype),
        keys.codes.shape[1],
        keys.layout.block_tokens,
        True,
        segment.first > 0,
        segment.ends is not None,
        LAUNCH,
    )
    ends = key_codes if segment.ends is None else _ends_of(segment)
    strides = tuple(stride for tensor in of_packed for stride in tensor.stride()[:3])
    return SegmentPlan(kind, (*of_packed, ends), strides, segment.blocks, segment.first)


def _of_dense(segment: DenseSegment) -> SegmentPlan | str:
    keys, values = segment.keys, segment.values
    device, dtype, key_dim, value_dim = keys.device, keys.dtype, keys.shape[3], values.shape[3]
    facts = triton_support.device_facts(device)
    if facts.obstacle is not None:
        return facts.obstacle
    if dtype not in DTYPES or values.dtype != dtype:
        return f"the kernel does not support keys that are {dtype}, and values {values.dtype}"
    if max(key_dim, value_dim) > LARGEST_HEAD_DIM:
        return f"the kernel does not support more than {LARGEST_HEAD_DIM} channels"
    kind = segment_kind(
        device,
        facts,
        dtype,
        dense_side_spec(key_dim),
        dense_side_spec(value_dim),
        keys.shape[1],
        DENSE_PIECE_TOKENS,
        False,
        False,
        False,
        LAUNCH,
    )
    keys, values, strides = rows_of_channels(keys, values)
    nothing = (0, 0, 0)
    return SegmentPlan(kind, (keys, keys, values, values, keys), (*strides[:3], *nothing, *strides[3:], *nothing))


def rows_of_channels(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Keys and values whose channels are neighbours, copies if they are not, and the other strides of both."""
    if keys.stride(3) != 1 or values.stride(3) != 1:
        keys, values = keys.contiguous(), values.contiguous()
    return keys, values, keys.stride()[:3] + values.stride()[:3]


def _words(codes: Tensor) -> Tensor:
    """Codes as words of two bytes: a view, or a copy if the codes start within a word."""
    *strides, _ = codes.stride()
    if codes.storage_offset() % 2 or any(stride % 2 for stride in strides):
        codes = codes.contiguous()
    return codes.view(torch.int16)


def _ends_of(segment: PackedSegment) -> Tensor:
    """The ends of the blocks as a tensor, filled on its device: copying them from the host would wait for it."""
    size = segment.keys.layout.block_tokens
    ends = torch.full((segment.blocks,), size, dtype=torch.int32, device=segment.keys.codes.device)
    for block, end in enumerate(segment.ends or ()):
        if end != size:
            ends[block].fill_(end)
    return ends


def supports(keys: BlockLayout, values: BlockLayout, dtype: torch.dtype) -> bool:
    """Whether the kernel takes packed blocks of these layouts, with parameters and queries of a dtype."""
    block_tokens = keys.block_tokens
    # Two tiles of scores must have 16 columns.
    if block_tokens & (block_tokens - 1) or block_tokens * keys.format.bits < 128 or block_tokens > LARGEST_BLOCK:
        return False
    return dtype in DTYPES and all(map(_supports_side, (keys, values)))


def _supports_side(layout: BlockLayout) -> bool:
    code_format, head_dim = layout.format, layout.head_dim
    if code_format.bits not in WIDTHS or code_format.levels or code_format.fixed_scales or head_dim > LARGEST_HEAD_DIM:
        return False
    if layout.block_tokens % code_format.group_tokens or head_dim % code_format.group_channels:
        return False
    # Rows are read in words of two bytes.
    return layout.side == "keys" or code_format.bits != 8 or head_dim % 2 == 0
