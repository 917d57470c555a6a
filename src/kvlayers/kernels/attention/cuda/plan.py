"""What is prepared once for a segment, and used for each launch until it changes: arguments and compiled kernels."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers.kernels.attention.cuda.specs import (
    BOOL_MASK,
    dense_side_spec,
    merge_spec,
    rows_of_program,
    side_spec,
    split_spec,
    warps_of_program,
)
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS, DenseSegment, PackedSegment
from kvlayers.kernels.codes.cuda_packing import Constants
from kvlayers.kernels.codes.quantizer_contract import CodeFormat, Side
from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import DTYPES, DeviceFacts, KeptConstants, TritonKernel, runs_triton

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

DENSE_TOKENS = 64
"""Fewest tokens in full precision of a split."""

ATTEND_SPLIT = TritonKernel("kvlayers.kernels.attention.cuda.triton_kernels", "attend_split")
MERGE_SPLITS = TritonKernel("kvlayers.kernels.attention.cuda.triton_kernels", "merge_splits")


class Variant:
    """A compiled variant of the split kernel.

    Attributes:
        rows: rows of queries that a program takes.
        wide_mask: whether it needs bool masks in numbers of two bytes.
        constants: its compile-time constants; `None` until `fit`.
        obstacle: why it cannot be launched, `None` if it can.
        compared: whether a result of it has been compared with that of torch.
    """

    __slots__ = ("_options", "_spec", "compared", "constants", "obstacle", "rows", "wide_mask")

    def __init__(self, spec: Constants, launch: Launch, dtype: torch.dtype) -> None:
        self._spec, self.rows = spec, spec.rows
        # Triton lays out the operands of products by the narrowest number that goes into them, halved by a join: with a
        # byte, a thread would hold more tokens than a part has, and count each of them twice.
        self.wide_mask = spec.joined and spec.mask == BOOL_MASK
        warps = warps_of_program(spec, dtype)
        # Fused multiply-add is not the default of every version of triton.
        self._options = {"num_warps": warps, "num_stages": launch.stages, "enable_fp_fusion": True}
        self.constants: KeptConstants | None = None
        self.obstacle: str | None = None
        self.compared = False

    def fit(self, device: torch.device, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Find out with how many stages the device has enough shared memory. This compiles the kernel."""
        constants = KeptConstants(SPEC=self._spec, **self._options)
        self.obstacle = ATTEND_SPLIT.obstacle(device, grid, arguments, constants)
        while self.obstacle is not None and constants["num_stages"] > 1:
            constants["num_stages"] -= 1
            self.obstacle = ATTEND_SPLIT.obstacle(device, grid, arguments, constants)
        self.constants = constants


@functools.cache
def _variant_of(
    device: torch.device, facts: DeviceFacts, spec: Constants, launch: Launch, dtype: torch.dtype
) -> Variant:
    """The variant of all segments that need the same one. How it fits depends on the device."""
    return Variant(spec, launch, dtype)


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

    def blocks_per_split(self, blocks: int, programs_of_a_split: int) -> int:
        """Blocks of a split among so many, so that all multiprocessors are busy."""
        wanted = -(-self.facts.multiprocessors * self.launch.programs // programs_of_a_split)
        splits = min(wanted, -(-blocks // self.launch.minimum_blocks))
        return max(1, -(-blocks // max(1, splits)))


segment_kind = functools.lru_cache(maxsize=256)(SegmentKind)
"""The same object for the same attributes."""


@functools.lru_cache(maxsize=4096)
def variant_for(
    kind: SegmentKind,
    heads: int,
    q_tokens: int,
    mask: int,
    readers: int,
    indexed: bool,
    gathered: bool,
    factors: bool,
    means: bool,
) -> Variant:
    """The split kernel.

    Args:
        kind: the kind of the segments.
        heads: query heads.
        q_tokens: queries of a sequence.
        mask: kind of mask.
        readers: sequences that read each sequence of the segments.
        indexed: whether there are `Read.rows`.
        gathered: whether there are `Read.tables`.
        factors: whether keys were divided by factors; see `KeySmoothing`.
        means: whether means were subtracted from them.
    """
    groups = heads // kind.kv_heads
    spec = split_spec(
        kind.keys,
        kind.values,
        kind.block_tokens,
        kind.dtype,
        kind.kv_heads,
        groups,
        rows_of_program(groups * q_tokens * readers),
        mask,
        kind.first,
        kind.ends,
        readers > 1,
        indexed,
        kind.packed,
        gathered,
        factors,
        means,
    )
    return _variant_of(kind.device, kind.facts, spec, kind.launch, kind.dtype)


@functools.lru_cache(maxsize=1024)
def merge_constants(kind: SegmentKind, heads: int, gaps: bool) -> KeptConstants:
    """The constants of the merge kernel for a number of query heads; see `merge_spec`."""
    return KeptConstants(SPEC=merge_spec(heads, kind.values, gaps), num_warps=4, enable_fp_fusion=True)


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
    plan: SegmentPlan | str | None = segment.kernel_cache.get("triton")
    if plan is None:
        plan = _of_packed(segment) if isinstance(segment, PackedSegment) else _of_dense(segment)
        segment.kernel_cache["triton"] = plan
    return plan


def _of_packed(segment: PackedSegment) -> SegmentPlan | str:
    keys, values = segment.keys, segment.values
    device, dtype, block_tokens = keys.codes.device, keys.parameters.dtype, keys.block_tokens
    facts = triton_support.device_facts(device)
    if facts.obstacle is not None:
        return facts.obstacle
    if not supports(
        keys.format,
        values.format,
        key_head_dim=keys.head_dim,
        value_head_dim=values.head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        device=device,
    ):
        return "the kernel does not support such codes"
    key_codes, value_codes = _words(keys.codes), _words(values.codes)
    of_packed = key_codes, keys.parameters, value_codes, values.parameters
    kind = segment_kind(
        device,
        facts,
        dtype,
        side_spec(keys.format, "keys", keys.head_dim, block_tokens, dtype),
        side_spec(values.format, "values", values.head_dim, block_tokens, dtype),
        keys.codes.shape[1],
        block_tokens,
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
    size = segment.keys.block_tokens
    ends = torch.full((segment.blocks,), size, dtype=torch.int32, device=segment.keys.codes.device)
    for block, end in enumerate(segment.ends or ()):
        if end != size:
            ends[block].fill_(end)
    return ends


def supports(
    key_format: CodeFormat,
    value_format: CodeFormat,
    *,
    key_head_dim: int,
    value_head_dim: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether `attend_packed` takes packed states of this kind; otherwise the caller has to unpack them.

    Args:
        key_format: meaning of the key codes.
        value_format: meaning of the value codes.
        key_head_dim: channels of a key, and of a query.
        value_head_dim: channels of a value.
        block_tokens: tokens of a block.
        dtype: dtype of queries and parameters.
        device: device of the states.
    """
    if not runs_triton(device) or dtype not in DTYPES:
        return False
    # Two tiles of scores must have 16 columns.
    if block_tokens & (block_tokens - 1) or block_tokens * key_format.bits < 128 or block_tokens > LARGEST_BLOCK:
        return False
    sides: tuple[tuple[CodeFormat, Side, int], ...] = (
        (key_format, "keys", key_head_dim),
        (value_format, "values", value_head_dim),
    )
    return all(_supports_side(code_format, side, head_dim, block_tokens) for code_format, side, head_dim in sides)


def _supports_side(code_format: CodeFormat, side: Side, head_dim: int, block_tokens: int) -> bool:
    if code_format.bits not in WIDTHS or code_format.levels or code_format.fixed_scales:
        return False
    if head_dim > LARGEST_HEAD_DIM or block_tokens % code_format.group_tokens or head_dim % code_format.group_channels:
        return False
    # Rows are read in words of two bytes.
    return side == "keys" or code_format.bits != 8 or head_dim % 2 == 0
