"""What is prepared once for a segment, and used for each launch until it changes: arguments and compiled kernels."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.cuda.specs import (
    BOOL_MASK,
    MergeSpec,
    SideSpec,
    SplitSpec,
    dense_side_spec,
    merge_spec,
    rows_of_program,
    side_spec,
    split_spec,
    warps_of_program,
)
from kvlayers.attention.cuda.support import DTYPES, LARGEST_HEAD_DIM, supports
from kvlayers.attention.dense_segment import DENSE_PIECE_TOKENS, DenseSegment
from kvlayers.attention.packed_segment import PackedSegment
from kvlayers.utils.triton_support import (
    KeptConstants,
    TritonKernel,
    device_obstacle,
    multiprocessors,
    shared_memory_limit,
)


@dataclass(frozen=True)
class Launch:
    """How the work is divided on a device. No number changes the result, apart from the order of sums.

    Attributes:
        programs: programs for each multiprocessor; with fewer, memory bandwidth stays unused.
        minimum_blocks: fewest blocks of a split, so that its partial result is small beside the codes it reads.
        stages: blocks in the copy pipeline, including the current one; fewer if shared memory is too small.
        warps: warps of a program; `None` to choose them by its rows and channels.
        assembly: whether inline assembly unpacks two codes at a time.
    """

    programs: int = 8
    minimum_blocks: int = 2
    stages: int = 3
    warps: int | None = None
    assembly: bool = True


DEFAULT_LAUNCH = Launch()

DENSE_TOKENS = 64
"""Fewest tokens in full precision of a split."""

ATTEND_SPLIT = TritonKernel("kvlayers.attention.cuda.triton_kernels", "attend_split")
MERGE_SPLITS = TritonKernel("kvlayers.attention.cuda.triton_kernels", "merge_splits")


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

    def __init__(self, spec: SplitSpec, launch: Launch, dtype: torch.dtype) -> None:
        self._spec, self.rows = spec, spec.rows
        # Triton lays out the operands of products by the narrowest number that goes into them, halved by a join: with a
        # byte, a thread would hold more tokens than a part has, and count each of them twice.
        self.wide_mask = spec.joined and spec.mask == BOOL_MASK
        warps = launch.warps or warps_of_program(spec, dtype)
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


_variants: dict[tuple[torch.device, int | None, SplitSpec, Launch], Variant] = {}


class SplitKernels:
    """The kernels for segments that are coded in one way.

    Args:
        device: device of the segments.
        limits: its multiprocessors, and bytes of shared memory that a program can have, `None` without a limit.
        dtype: dtype of the states.
        sides: how keys and values are coded.
        kv_heads: heads that have keys and values.
        block_tokens: tokens of a block.
        packed: whether blocks are packed.
        first: whether tokens at the front of the first block have been evicted.
        ends: whether there are blocks that are not full.
        launch: how work is divided.
    """

    def __init__(
        self,
        device: torch.device,
        limits: tuple[int, int | None],
        dtype: torch.dtype,
        sides: tuple[SideSpec, SideSpec],
        kv_heads: int,
        block_tokens: int,
        packed: bool,
        first: bool,
        ends: bool,
        launch: Launch,
    ) -> None:
        self.multiprocessors, self.shared_memory = limits
        self._device, self._dtype, self._sides, self._launch = device, dtype, sides, launch
        self._kv_heads, self._block_tokens = kv_heads, block_tokens
        self._packed, self._first, self._ends = packed, first, ends
        self._variants: dict[tuple[int | bool, ...], Variant] = {}
        self._merges: dict[tuple[int, bool, bool], KeptConstants] = {}

    def variant(
        self,
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
            heads: query heads.
            q_tokens: queries of a sequence.
            mask: kind of mask.
            readers: sequences that read each sequence of the segments.
            indexed: whether there are `Read.rows`.
            gathered: whether there are `Read.tables`.
            factors: whether keys were divided by factors; see `KeySmoothing`.
            means: whether means were subtracted from them.
        """
        wanted = heads, q_tokens, mask, readers, indexed, gathered, factors, means
        variant = self._variants.get(wanted)
        if variant is None:
            groups = heads // self._kv_heads
            spec = split_spec(
                *self._sides,
                self._block_tokens,
                self._dtype,
                self._kv_heads,
                groups,
                rows_of_program(groups * q_tokens * readers),
                mask,
                self._first,
                self._ends,
                readers > 1,
                indexed,
                self._packed,
                gathered,
                factors,
                means,
            )
            key = self._device, self.shared_memory, spec, self._launch
            variant = _variants.setdefault(key, Variant(spec, self._launch, self._dtype))
            self._variants[wanted] = variant
        return variant

    def merge(self, heads: int, logsumexp: bool, gaps: bool) -> KeptConstants:
        """The constants of the merge kernel for a number of query heads; see `MergeSpec`."""
        constants = self._merges.get((heads, logsumexp, gaps))
        if constants is None:
            spec: MergeSpec = merge_spec(heads, self._sides[1], logsumexp, gaps)
            constants = KeptConstants(SPEC=spec, num_warps=4, enable_fp_fusion=True)
            self._merges[heads, logsumexp, gaps] = constants
        return constants

    def blocks_per_split(self, blocks: int, programs_of_a_split: int) -> int:
        """Blocks of a split among so many, so that all multiprocessors are busy."""
        launch = self._launch
        wanted = -(-self.multiprocessors * launch.programs // programs_of_a_split)
        splits = min(wanted, -(-blocks // launch.minimum_blocks))
        return max(1, -(-blocks // max(1, splits)))


@functools.lru_cache(maxsize=256)
def split_kernels(
    device: torch.device,
    limits: tuple[int, int | None],
    dtype: torch.dtype,
    sides: tuple[SideSpec, SideSpec],
    kv_heads: int,
    block_tokens: int,
    packed: bool,
    first: bool,
    ends: bool,
    launch: Launch,
) -> SplitKernels:
    """The kernels of all segments of one kind. Some segments are new at each step, and only their arguments are."""
    return SplitKernels(device, limits, dtype, sides, kv_heads, block_tokens, packed, first, ends, launch)


class SegmentPlan:
    """Arguments and kernels for one packed segment.

    Attributes:
        obstacle: why the kernel cannot take the segment, `None` if it can.
        launch: how work is divided.
        kernels: the kernels.
        device: device of the codes.
        dtype: dtype of the parameters.
        kv_heads: heads that have keys and values.
        tensors: codes and parameters of the keys and of the values, and the ends of the blocks.
        strides: batch, head and block strides of the first four tensors.
        blocks: number of blocks.
        block_tokens: tokens of a block.
        tokens: tokens that are held.
        first: tokens at the front of the first block that have been evicted.
        value_dim: channels of a value.
        rotation: binary logarithm of the channels that a Hadamard matrix has mixed in values, or 0.
    """

    def __init__(self, segment: PackedSegment, launch: Launch) -> None:
        keys, values = segment.keys, segment.values
        self.device, self.dtype = keys.codes.device, keys.parameters.dtype
        self.obstacle = device_obstacle(self.device)
        if self.obstacle is None and not supports(
            keys.format,
            values.format,
            key_head_dim=keys.head_dim,
            value_head_dim=values.head_dim,
            block_tokens=keys.block_tokens,
            dtype=self.dtype,
            device=self.device,
        ):
            self.obstacle = "the kernel does not support such codes"
        if self.obstacle is not None:
            return
        self.launch = launch
        self.kv_heads, self.blocks = keys.codes.shape[1], segment.blocks
        self.block_tokens, self.tokens, self.first = keys.block_tokens, segment.tokens, segment.first
        self.value_dim = values.head_dim
        key_codes, value_codes = _words(keys.codes), _words(values.codes)
        of_packed = key_codes, keys.parameters, value_codes, values.parameters
        self.strides = tuple(stride for tensor in of_packed for stride in tensor.stride()[:3])
        # Pointers of the right type stand for what is never read.
        ends = _ends_of(segment) if segment.ends is not None else key_codes
        self.tensors = (*of_packed, ends)
        # Not the segment itself: it holds the plan, and the two would outlive each other on the GPU.
        self._has_ends = segment.ends is not None
        self._starts: Tensor | None = None
        sides = (
            side_spec(keys.format, "keys", keys.head_dim, self.block_tokens, self.dtype, launch.assembly),
            side_spec(values.format, "values", values.head_dim, self.block_tokens, self.dtype, launch.assembly),
        )
        self.rotation = sides[1].rotation
        self.kernels = split_kernels(
            self.device,
            (multiprocessors(self.device), shared_memory_limit(self.device)),
            self.dtype,
            sides,
            self.kv_heads,
            self.block_tokens,
            packed=True,
            first=self.first > 0,
            ends=self._has_ends,
            launch=launch,
        )

    def starts(self) -> Tensor:
        """int32 `[blocks]`: the tokens that are held in front of each block, by which masks are indexed."""
        if not self._has_ends:
            return self.tensors[4]
        if self._starts is None:
            ends = self.tensors[4]
            self._starts = torch.cumsum(ends, 0, dtype=torch.int32) - ends
            self._starts[1:] -= self.first
        return self._starts


class DensePlan:
    """Arguments and kernels for one segment in full precision of which pieces are read.

    Attributes: those of a `SegmentPlan`. Keys and values stand for codes, a block is the most tokens of a piece, and
    nothing is rotated.
    """

    def __init__(self, segment: DenseSegment, launch: Launch) -> None:
        keys, values = segment.keys, segment.values
        self.device, self.dtype = keys.device, keys.dtype
        key_dim, self.value_dim = keys.shape[3], values.shape[3]
        self.obstacle = device_obstacle(self.device)
        if self.obstacle is None and (self.dtype not in DTYPES or values.dtype != self.dtype):
            self.obstacle = f"the kernel does not support keys that are {self.dtype}, and values {values.dtype}"
        elif self.obstacle is None and max(key_dim, self.value_dim) > LARGEST_HEAD_DIM:
            self.obstacle = f"the kernel does not support more than {LARGEST_HEAD_DIM} channels"
        if self.obstacle is not None:
            return
        self.launch = launch
        self.kv_heads, self.block_tokens = keys.shape[1], DENSE_PIECE_TOKENS
        self.first = self.rotation = 0
        keys, values, strides = rows_of_channels(keys, values)
        self.tensors = keys, keys, values, values, keys
        nothing = (0, 0, 0)
        self.strides = (*strides[:3], *nothing, *strides[3:], *nothing)
        self.kernels = split_kernels(
            self.device,
            (multiprocessors(self.device), shared_memory_limit(self.device)),
            self.dtype,
            (dense_side_spec(key_dim), dense_side_spec(self.value_dim)),
            self.kv_heads,
            self.block_tokens,
            packed=False,
            first=False,
            ends=False,
            launch=launch,
        )

    def starts(self) -> Tensor:
        """Any pointer: no run of blocks is read."""
        return self.tensors[4]


def plan_of(segment: PackedSegment, launch: Launch = DEFAULT_LAUNCH) -> SegmentPlan:
    """The plan of a segment, made once for as long as its blocks do not change."""
    plan: SegmentPlan | None = segment.kernel_cache.get("triton")
    if plan is None or (plan.obstacle is None and plan.launch is not launch):
        plan = segment.kernel_cache["triton"] = SegmentPlan(segment, launch)
    return plan


def dense_plan_of(segment: DenseSegment, launch: Launch = DEFAULT_LAUNCH) -> DensePlan:
    """The plan of a segment in full precision, made once for it."""
    plan: DensePlan | None = segment.kernel_cache.get("triton")
    if plan is None or (plan.obstacle is None and plan.launch is not launch):
        plan = segment.kernel_cache["triton"] = DensePlan(segment, launch)
    return plan


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
