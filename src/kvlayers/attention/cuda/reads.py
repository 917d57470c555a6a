"""What each launch of the split kernel reads of segments, found once for them."""

from typing import NamedTuple

from torch import Tensor

from kvlayers.attention.cuda.plan import (
    DEFAULT_LAUNCH,
    DensePlan,
    Launch,
    SegmentPlan,
    dense_plan_of,
    plan_of,
    rows_of_channels,
)
from kvlayers.attention.dense_segment import DENSE_PIECE_TOKENS, DenseSegment
from kvlayers.attention.gathered_segment import GatheredSegment
from kvlayers.attention.packed_segment import PackedSegment
from kvlayers.attention.segment_rows import SegmentRows
from kvlayers.attention.segments import KVSegments
from kvlayers.quantizers.smoothing import KeySmoothing

DenseArguments = tuple[Tensor, Tensor, tuple[int, ...], int, int]
"""Keys, values, batch, head and token strides of both, the number of tokens, and their first column of a mask."""


class TableArguments:
    """The tables of a gathered segment, with an entry for each piece of each kv head of each sequence, in this order.

    Attributes:
        pieces: first tokens, or blocks, of pieces.
        counts: their tokens.
        filled: how many pieces of an average kv head have tokens, as far as the host can tell.
    """

    def __init__(self, segment: GatheredSegment) -> None:
        self.pieces, self.counts = segment.starts.contiguous(), segment.counts.contiguous()
        self._columns, self._are_aligned = segment.columns, False
        batch, kv_heads, pieces = segment.starts.shape
        source = segment.source
        states = source.keys if isinstance(source, DenseSegment) else source.keys.codes
        self.filled = pieces
        if batch * kv_heads > 1 and not states.stride(0) and not states.stride(1):
            # All heads read from one flat buffer, which has about as many blocks as they have pieces.
            block_tokens = 1 if isinstance(source, PackedSegment) else DENSE_PIECE_TOKENS
            self.filled = min(pieces, -(-states.shape[2] // (block_tokens * batch * kv_heads)))

    def columns(self) -> Tensor:
        """Columns of the mask of the first tokens of pieces, counted from the first of the segment."""
        if not self._are_aligned:
            self._columns, self._are_aligned = self._columns.contiguous(), True
        return self._columns


class Read(NamedTuple):
    """What one launch of the split kernel reads.

    Attributes:
        plan: plan of the segment that is read in blocks, or of another one if the launch reads dense segments only.
        blocks: its blocks, or the pieces of each kv head, or 0.
        column: column of a mask that belongs to its first token.
        readers: sequences side by side that read each sequence of the segments.
        rows: which sequence of the segments each sequence reads, `None` if `readers` says it.
        tables: which pieces each kv head reads, `None` if it reads all blocks.
        dense: arguments of at most two dense segments.
        smoothing: how the keys of its blocks were smoothed, `None` if they were not.
    """

    plan: SegmentPlan | DensePlan
    blocks: int
    column: int
    readers: int
    rows: SegmentRows | None
    tables: TableArguments | None
    dense: list[DenseArguments]
    smoothing: KeySmoothing | None = None


def reads_of(segments: KVSegments, launch: Launch = DEFAULT_LAUNCH) -> list[Read] | str:
    """What each launch of the split kernel reads, or why the kernel cannot take the segments. Found once for them.

    Launches that read packed segments are in front, and one of these is first.
    """
    found: tuple[Launch, list[Read] | str] | None = segments.kernel_cache.get("triton")
    if found is None or found[0] is not launch:
        found = segments.kernel_cache["triton"] = launch, _reads_of(segments, launch)
    return found[1]


def _reads_of(segments: KVSegments, launch: Launch) -> list[Read] | str:
    packed: list[Read] = []
    gathered: list[Read] = []
    dense: list[tuple[DenseSegment, int, int, SegmentRows | None]] = []
    column = 0
    for segment in segments.in_order:
        if isinstance(segment, GatheredSegment):
            read = _gathered_read(segment, column, launch)
            if isinstance(segment.source, PackedSegment):
                packed.append(read._replace(smoothing=segments.smoothing))
            else:
                gathered.append(read)
        elif isinstance(segment, PackedSegment):
            plan = plan_of(segment, launch)
            blocks = plan.blocks if plan.obstacle is None else 0
            packed.append(Read(plan, blocks, column, *_readers(segment.rows), None, [], segments.smoothing))
        elif segment.tokens:
            dense.append((segment, column, *_readers(segment.rows)))
        column += segment.tokens
    reads = packed + gathered
    if not reads:
        if not dense:
            return "there are no tokens"
        # A launch without blocks, with the plan that any of the segments would have.
        segment, _, readers, rows = dense[0]
        reads = [Read(dense_plan_of(segment, launch), 0, 0, readers, rows, None, [])]
    for read in reads:
        if read.plan.obstacle is not None:
            return read.plan.obstacle
    first = reads[0].plan
    if any(read.plan.dtype != first.dtype or read.plan.rotation != first.rotation for read in packed[1:]):
        return "packed segments have other dtypes, or rotations"
    for read in gathered:
        if read.plan.dtype != first.dtype:
            return f"scales are {first.dtype}, and gathered states {read.plan.dtype}"
    for segment, start, readers, rows in dense:
        keys, values = segment.keys, segment.values
        if keys.dtype != first.dtype or values.dtype != first.dtype:
            return f"scales are {first.dtype}, and states in full precision {keys.dtype} and {values.dtype}"
        for read in reads:
            if read.readers == readers and read.rows is rows and len(read.dense) < 2:
                break
        else:
            read = Read(first, 0, 0, readers, rows, None, [])
            reads.append(read)
        keys, values, strides = rows_of_channels(keys, values)
        read.dense.append((keys, values, strides, keys.shape[2], start))
    return [read for read in reads if read.blocks or read.dense] or reads[:1]


def _readers(rows: SegmentRows | None) -> tuple[int, SegmentRows | None]:
    """Sequences that read each sequence of a segment, and the rows if it is not so even."""
    if rows is not None and rows.are_even:
        return len(rows) // rows.sequences, None
    return 1, rows


def _gathered_read(segment: GatheredSegment, column: int, launch: Launch) -> Read:
    source = segment.source
    plan = plan_of(source, launch) if isinstance(source, PackedSegment) else dense_plan_of(source, launch)
    tables: TableArguments | None = segment.kernel_cache.get("triton")
    if tables is None:
        tables = segment.kernel_cache["triton"] = TableArguments(segment)
    # Each sequence reads its own pieces, so several are not rows of one product even if they share a source.
    return Read(plan, segment.starts.shape[2] if source.tokens else 0, column, 1, source.rows, tables, [])
