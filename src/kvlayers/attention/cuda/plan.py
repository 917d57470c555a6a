"""What is prepared once for a packed segment, and used for each launch until the next block is packed."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlayers.attention.cuda.specs import (
    MergeSpec,
    SplitSpec,
    merge_spec,
    rows_of_program,
    side_spec,
    split_spec,
    warps_of_program,
)
from kvlayers.attention.cuda.support import supports
from kvlayers.attention.segment_rows import SegmentRows
from kvlayers.attention.segments import DenseSegment, GatheredSegment, KVSegments, PackedSegment
from kvlayers.utils.triton_support import TritonKernel, device_obstacle, multiprocessors, shared_memory_limit


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
        constants: its compile-time constants; `None` until `fit`.
        obstacle: why it cannot be launched, `None` if it can.
    """

    __slots__ = ("_options", "_spec", "constants", "obstacle", "rows")

    def __init__(self, spec: SplitSpec, launch: Launch, dtype: torch.dtype) -> None:
        self._spec, self.rows = spec, spec.rows
        warps = launch.warps or warps_of_program(spec, dtype)
        # Fused multiply-add is not the default of every version of triton.
        self._options = {"num_warps": warps, "num_stages": launch.stages, "enable_fp_fusion": True}
        self.constants: dict[str, Any] | None = None
        self.obstacle: str | None = None

    def fit(self, device: torch.device, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Find out with how many stages the device has enough shared memory. This compiles the kernel."""
        constants: dict[str, Any] = {"SPEC": self._spec, **self._options}
        self.obstacle = ATTEND_SPLIT.obstacle(device, grid, arguments, constants)
        while self.obstacle is not None and constants["num_stages"] > 1:
            constants["num_stages"] -= 1
            self.obstacle = ATTEND_SPLIT.obstacle(device, grid, arguments, constants)
        self.constants = constants


_variants: dict[tuple[torch.device, int | None, SplitSpec, Launch], Variant] = {}


class SegmentPlan:
    """Arguments and constants for one packed segment.

    Attributes:
        obstacle: why the kernel cannot take the segment, `None` if it can.
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
        multiprocessors: multiprocessors of the device.
        shared_memory: bytes of shared memory that a program can have there, `None` if there is no limit.
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
        self.multiprocessors, self.shared_memory = multiprocessors(self.device), shared_memory_limit(self.device)
        key_codes, value_codes = _words(keys.codes), _words(values.codes)
        of_packed = key_codes, keys.parameters, value_codes, values.parameters
        self.strides = tuple(stride for tensor in of_packed for stride in tensor.stride()[:3])
        # Pointers of the right type stand for what is never read.
        ends = _ends_of(segment) if segment.ends is not None else key_codes
        self.tensors = (*of_packed, ends)
        # Not the segment itself: it holds the plan, and the two would outlive each other on the GPU.
        self._has_ends = segment.ends is not None
        self._starts: Tensor | None = None
        self._specs = (
            side_spec(keys.format, "keys", keys.head_dim, self.block_tokens, self.dtype, launch.assembly),
            side_spec(values.format, "values", values.head_dim, self.block_tokens, self.dtype, launch.assembly),
        )
        self.rotation = self._specs[1].rotation
        self._variants: dict[tuple[int, int, int, int, bool], Variant] = {}
        self._merges: dict[tuple[int, bool], dict[str, Any]] = {}

    def starts(self) -> Tensor:
        """int32 `[blocks]`: the tokens that are held in front of each block, by which masks are indexed."""
        if not self._has_ends:
            return self.tensors[4]
        if self._starts is None:
            ends = self.tensors[4]
            self._starts = torch.cumsum(ends, 0, dtype=torch.int32) - ends
            self._starts[1:] -= self.first
        return self._starts

    def variant(self, heads: int, q_tokens: int, mask: int, readers: int, indexed: bool) -> Variant:
        """The split kernel for numbers of query heads, queries and readers, a kind of mask, and `Read.rows` or none."""
        variant = self._variants.get((heads, q_tokens, mask, readers, indexed))
        if variant is None:
            groups = heads // self.kv_heads
            spec = split_spec(
                *self._specs,
                self.block_tokens,
                self.dtype,
                self.kv_heads,
                groups,
                rows_of_program(groups * q_tokens * readers),
                mask,
                self.first > 0,
                self._has_ends,
                readers > 1,
                indexed,
            )
            key = self.device, self.shared_memory, spec, self.launch
            variant = _variants.setdefault(key, Variant(spec, self.launch, self.dtype))
            self._variants[heads, q_tokens, mask, readers, indexed] = variant
        return variant

    def merge(self, heads: int, logsumexp: bool) -> dict[str, Any]:
        """The constants of the merge kernel for a number of query heads."""
        constants = self._merges.get((heads, logsumexp))
        if constants is None:
            spec: MergeSpec = merge_spec(heads, self._specs[1], logsumexp)
            constants = self._merges[heads, logsumexp] = {"SPEC": spec, "num_warps": 4, "enable_fp_fusion": True}
        return constants

    def blocks_per_split(self, blocks: int, programs_of_a_split: int) -> int:
        """Blocks of a split among so many, so that all multiprocessors are busy."""
        launch = self.launch
        wanted = -(-self.multiprocessors * launch.programs // programs_of_a_split)
        splits = min(wanted, -(-blocks // launch.minimum_blocks))
        return max(1, -(-blocks // max(1, splits)))


def plan_of(segment: PackedSegment, launch: Launch = DEFAULT_LAUNCH) -> SegmentPlan:
    """The plan of a segment, made once for as long as its blocks do not change."""
    plan: SegmentPlan | None = segment.kernel_cache.get("triton")
    if plan is None or (plan.obstacle is None and plan.launch is not launch):
        plan = segment.kernel_cache["triton"] = SegmentPlan(segment, launch)
    return plan


DenseArguments = tuple[Tensor, Tensor, tuple[int, ...], int, int]
"""Keys, values, batch, head and token strides of both, the number of tokens, and their first column of a mask."""


class Read(NamedTuple):
    """What one launch of the split kernel reads.

    Attributes:
        plan: plan of the packed segment, or of another one if the launch reads dense segments only.
        blocks: blocks of the packed segment, or 0.
        column: column of a mask that belongs to its first token.
        readers: sequences side by side that read each sequence of the segments.
        rows: which sequence of the segments each sequence reads, `None` if `readers` says it.
        dense: arguments of at most two dense segments.
    """

    plan: SegmentPlan
    blocks: int
    column: int
    readers: int
    rows: SegmentRows | None
    dense: list[DenseArguments]


def reads_of(segments: KVSegments, launch: Launch = DEFAULT_LAUNCH) -> list[Read] | str:
    """What each launch of the split kernel reads, or why the kernel cannot take the segments. Found once for them."""
    found: tuple[Launch, list[Read] | str] | None = segments.kernel_cache.get("triton")
    if found is None or found[0] is not launch:
        found = segments.kernel_cache["triton"] = launch, _reads_of(segments, launch)
    return found[1]


def _reads_of(segments: KVSegments, launch: Launch) -> list[Read] | str:
    reads: list[Read] = []
    dense: list[tuple[DenseSegment, int, int, SegmentRows | None]] = []
    column = 0
    for segment in segments.in_order:
        rows, readers = segment.rows, 1
        if rows is not None and rows.are_even:
            readers = len(rows) // rows.sequences
            rows = None
        if isinstance(segment, DenseSegment):
            if tokens := segment.tokens:
                dense.append((segment, column, readers, rows))
                column += tokens
            continue
        if isinstance(segment, GatheredSegment):
            return "the kernel does not read gathered segments"
        plan = plan_of(segment, launch)
        if plan.obstacle is not None:
            return plan.obstacle
        reads.append(Read(plan, plan.blocks, column, readers, rows, []))
        column += plan.tokens
    if not reads:
        return "no token is packed yet"
    first = reads[0].plan
    if any(read.plan.dtype != first.dtype or read.plan.rotation != first.rotation for read in reads[1:]):
        return "packed segments have other dtypes, or rotations"
    for segment, start, readers, rows in dense:
        for read in reads:
            if read.readers == readers and read.rows is rows and len(read.dense) < 2:
                break
        else:
            read = Read(first, 0, 0, readers, rows, [])
            reads.append(read)
        keys, values = segment.keys, segment.values
        if keys.dtype != first.dtype or values.dtype != first.dtype:
            return f"scales are {first.dtype}, and states in full precision {keys.dtype} and {values.dtype}"
        key_strides, value_strides = keys.stride(), values.stride()
        if key_strides[3] != 1 or value_strides[3] != 1:
            keys, values = keys.contiguous(), values.contiguous()
            key_strides, value_strides = keys.stride(), values.stride()
        read.dense.append((keys, values, key_strides[:3] + value_strides[:3], keys.shape[2], start))
    return [read for read in reads if read.blocks or read.dense] or reads[:1]


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
