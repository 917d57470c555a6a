"""Launches the Triton kernels: attention of few queries to packed or gathered tokens, and to dense ones around them.

The tokens are divided among enough programs to keep all multiprocessors busy (flash-decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html): each program attends to a split of one segment, and a second
kernel merges the results of the splits. All query heads and query tokens that share a kv head are rows of one product,
so its codes are read once. A scale that a whole row of keys shares is multiplied into the queries, and one that a whole
row of values shares into the weights: each single code is only unpacked.

The first call imports triton; `import kvlayers` never does.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlayers.kernels.attention.cuda.plan import (
    ATTEND_SPLIT,
    DENSE_TOKENS,
    MERGE_SPLITS,
    SegmentPlan,
    Variant,
    merge_constants,
    plan_of,
    rows_of_channels,
    variant_for,
)
from kvlayers.kernels.attention.cuda.specs import ADDED_MASK, BOOL_MASK, NO_MASK, rows_of_program
from kvlayers.kernels.attention.fused import unexpanded
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS, DenseSegment, PackedSegment, SegmentRows
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments
from kvlayers.kernels.codes.smoothing import UNSMOOTHED, KeySmoothing

logger = logging.getLogger(__name__)

_LOG2_E = math.log2(math.e)
_NO_STRIDES = (0,) * 6


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
        self._columns = segment.columns
        batch, kv_heads, pieces = segment.starts.shape
        source = segment.source
        states = source.keys if isinstance(source, DenseSegment) else source.keys.codes
        self.filled = pieces
        if batch * kv_heads > 1 and not states.stride(0) and not states.stride(1):
            # All heads read from one flat buffer, which has about as many blocks as they have pieces.
            block_tokens = 1 if isinstance(source, PackedSegment) else DENSE_PIECE_TOKENS
            self.filled = min(pieces, -(-states.shape[2] // (block_tokens * batch * kv_heads)))

    @functools.cached_property
    def columns(self) -> Tensor:
        """Columns of the mask of the first tokens of pieces, counted from the first of the segment."""
        return self._columns.contiguous()


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
        smoothing: how the keys of its blocks were smoothed.
    """

    plan: SegmentPlan
    blocks: int
    column: int
    readers: int
    rows: SegmentRows | None
    tables: TableArguments | None
    dense: list[DenseArguments]
    smoothing: KeySmoothing = UNSMOOTHED


def reads_of(segments: KVSegments) -> list[Read] | str:
    """What each launch of the split kernel reads, or why the kernel cannot take the segments. Found once for them.

    Launches that read packed segments are in front, and one of these is first.
    """
    return segments.kernel_cache.kept("triton", lambda: _reads_of(segments))  # type: ignore[no-any-return]


def _reads_of(segments: KVSegments) -> list[Read] | str:
    packed: list[Read] = []
    gathered: list[Read] = []
    dense: list[tuple[DenseSegment, int, int, SegmentRows | None]] = []
    for column, segment in segments.with_columns:
        if isinstance(segment, DenseSegment):
            if segment.tokens:
                dense.append((segment, column, *_readers(segment.rows)))
            continue
        source = segment.source
        plan = plan_of(source)
        if isinstance(plan, str):
            return plan
        if isinstance(segment, GatheredSegment):
            # Each sequence reads its own pieces, so several are not rows of one product even if they share a source.
            pieces = segment.starts.shape[2] if source.tokens else 0
            tables = segment.kernel_cache.kept("triton", functools.partial(TableArguments, segment))
            read = Read(plan, pieces, column, 1, source.rows, tables, [], source.smoothing)
        else:
            read = Read(plan, plan.blocks, column, *_readers(segment.rows), None, [], source.smoothing)
        (packed if isinstance(source, PackedSegment) else gathered).append(read)
    reads = packed + gathered
    if not reads:
        if not dense:
            return "there are no tokens"
        # A launch without blocks, with the plan that any of the segments would have.
        one, _, readers, rows = dense[0]
        plan = plan_of(one)
        if isinstance(plan, str):
            return plan
        reads = [Read(plan, 0, 0, readers, rows, None, [])]
    first = reads[0].plan
    kinds = [read.plan.kind for read in packed]
    if len({(kind.dtype, kind.values.rotation) for kind in kinds}) > 1:
        return "packed segments have other dtypes, or rotations"
    for read in gathered:
        if read.plan.kind.dtype != first.kind.dtype:
            return f"scales are {first.kind.dtype}, and gathered states {read.plan.kind.dtype}"
    for one, start, readers, rows in dense:
        keys, values = one.keys, one.values
        if keys.dtype != first.kind.dtype or values.dtype != first.kind.dtype:
            return f"scales are {first.kind.dtype}, and states in full precision {keys.dtype} and {values.dtype}"
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


def kind_of(mask: Tensor | None) -> int:
    """The kind of a mask."""
    return NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK


def variant_of(read: Read, heads: int, q_tokens: int, mask: int) -> Variant:
    """The kernel of a launch, for numbers of query heads and queries, and a kind of mask."""
    kind, smoothing = read.plan.kind, read.smoothing
    groups = heads // kind.kv_heads
    return variant_for(
        kind,
        groups,
        rows_of_program(groups * q_tokens * read.readers),
        mask,
        read.readers > 1,
        read.rows is not None,
        read.tables is not None,
        smoothing.factor is not None,
        smoothing.mean is not None,
    )


def split_call(
    query: Tensor, reads: list[Read], variants: list[Variant], mask: Tensor | None, scale: float
) -> Callable[[torch.dtype], Tensor]:
    """Prepares the launches of the split kernel. It finds out whether the device can run variants that are new.

    Args:
        query: `[batch, heads, queries, key_head_dim]`.
        reads: what each launch reads.
        variants: the kernel of each launch.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores.

    Returns:
        What launches the kernels, given the dtype of the attended values `[batch, heads, q_tokens, value_head_dim]`.
        They are zeros if a query sees no token.
    """
    if scale <= 0:
        # The kernel takes the largest score before it scales.
        query, scale = query * (-1 if scale else 0), -scale or 1.0
    if query.stride(3) != 1:
        query = query.contiguous()
    batch, heads, q_tokens, _ = query.shape
    kind = reads[0].plan.kind
    mask_kind, entries = kind_of(mask), query
    divisions = [
        _divided(read, batch, heads, q_tokens, variant.rows) for read, variant in zip(reads, variants, strict=True)
    ]
    splits = sum(grid[0] for grid, *_ in divisions)
    packed_splits = sum(
        in_blocks for read, (_, in_blocks, *_) in zip(reads, divisions, strict=True) if read.plan.kind.packed
    )
    packed_place, dense_place = 0, packed_splits

    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        if any(variant.wide_mask for variant in variants):
            mask = unexpanded(mask).to(torch.int16)
        mask = mask.expand(batch, heads, q_tokens, mask.shape[3])
        mask_strides = mask.stride()
        entries = mask.view(torch.uint8) if mask.dtype == torch.bool else mask

    results = batch * heads * q_tokens
    partials = query.new_empty(results * splits * (kind.values.head_dim + 1), dtype=torch.float32)
    nothing = query, query, _NO_STRIDES, 0, 0
    launches: list[tuple[Variant, tuple[int, ...], tuple[Any, ...]]] = []
    for read, variant, (grid, in_blocks, blocks, of_a, tokens) in zip(reads, variants, divisions, strict=True):
        if not grid[0]:
            continue
        of_read = read.plan
        keys_a, values_a, strides_a, tokens_a, column_a = read.dense[0] if read.dense else nothing
        keys_b, values_b, strides_b, tokens_b, column_b = read.dense[1] if len(read.dense) > 1 else nothing
        if of_read.kind.packed:
            block_place, packed_place = packed_place, packed_place + in_blocks
        else:
            # Sums of values in full precision are not rotated back.
            block_place, dense_place = dense_place, dense_place + in_blocks
        arguments: tuple[Any, ...] = (
            query,
            *of_read.tensors[:4],
            *_table_pointers(read, mask_kind),
            keys_a,
            values_a,
            keys_b,
            values_b,
            entries,
            partials,
            query if read.rows is None else read.rows.on(kind.device)[0],
            # Any pointer stands for what is never read.
            *(query if vectors is None else vectors for vectors in (read.smoothing.factor, read.smoothing.mean)),
            query.stride(),
            of_read.strides,
            strides_a,
            strides_b,
            *mask_strides,
            read.blocks,
            blocks,
            in_blocks,
            of_read.first,
            read.column,
            tokens_a,
            of_a,
            column_a,
            tokens_b,
            column_b,
            tokens,
            block_place,
            dense_place,
            splits,
            q_tokens,
            read.readers,
            scale * _LOG2_E,
        )
        dense_place += grid[0] - in_blocks
        if not variant.is_fitted:
            variant.fit(kind.device, grid, arguments)
        launches.append((variant, grid, arguments))

    def run(dtype: torch.dtype) -> Tensor:
        # In the memory layout of torch's own attention, so that the transpose after it costs nothing.
        out = query.new_empty((batch, q_tokens, heads, kind.values.head_dim), dtype=dtype)
        if out.numel():
            for variant, grid, arguments in launches:
                ATTEND_SPLIT.launch(kind.device, grid, arguments, variant.constants)
            constants = merge_constants(kind.device, kind.values, heads, any(read.tables is not None for read in reads))
            merged = partials, out, packed_splits, splits, q_tokens
            MERGE_SPLITS.launch(kind.device, (results,), merged, constants)
        return out.transpose(1, 2)

    return run


def _table_pointers(read: Read, mask: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of blocks or pieces, their first columns of the mask, and where pieces are. Any pointers may stand for
    what is never read.
    """
    if read.tables is None:
        ends = read.plan.tensors[4]
        return ends, ends if mask == NO_MASK else read.plan.starts, ends
    counts = read.tables.counts
    return counts, counts if mask == NO_MASK else read.tables.columns, read.tables.pieces


def _divided(
    read: Read, batch: int, heads: int, q_tokens: int, rows: int
) -> tuple[tuple[int, int, int], int, int, int, int]:
    """How a launch is divided into programs, each of so many rows.

    Returns:
        Its programs in each dimension, all splits in the first; the splits of blocks; blocks of a split;
        splits of the first dense segment; and dense tokens of a split.
    """
    kind = read.plan.kind
    # Kv heads of unequal numbers of pieces have programs that do nothing: those of the average head fill the device.
    blocks = read.blocks if read.tables is None else min(read.blocks, read.tables.filled)
    kv_heads = batch * kind.kv_heads // read.readers
    tiles = -(-heads // kind.kv_heads * q_tokens * read.readers // rows)
    for _, _, _, tokens, _ in read.dense:
        blocks = max(blocks, -(-tokens // kind.block_tokens))
    # So many that all multiprocessors are busy.
    wanted = -(-kind.facts.multiprocessors * kind.launch.programs // max(1, kv_heads * tiles))
    splits = min(wanted, -(-blocks // kind.launch.minimum_blocks))
    per_split = max(1, -(-blocks // max(1, splits)))
    tokens_per_split = max(DENSE_TOKENS, per_split * kind.block_tokens)
    in_blocks = splits = -(-read.blocks // per_split)
    of_a = 0
    for _, _, _, tokens, _ in read.dense:
        of_b = -(-tokens // tokens_per_split)
        of_a = of_a or of_b
        splits += of_b
    return (splits, kv_heads, tiles), in_blocks, per_split, of_a, tokens_per_split


MAXIMUM_ROWS = 256
"""Queries of one kv head, over all heads that share it, up to which reading packed codes pays."""

LARGEST_ERROR = 0.1
"""Norm of the difference from torch's result, relative to that, from which on a result is wrong.

Both round to the dtype of the states, which makes a difference below 0.01; code that multiplies wrong numbers makes one
of about 1.
"""

MAXIMUM_HEADS = 65535
"""Kv heads of all sequences up to which CUDA can launch the kernel, in the second dimension of a grid."""


def attend(
    query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float, by_torch: Callable[[], Tensor]
) -> Tensor | str:
    """Softmax attention, or why the kernel cannot compute it; arguments are those of `slabs.attend`.

    The first call for a kind of states compiles the kernel, to see how much shared memory it needs, and compares its
    result with what `by_torch` gives.

    Returns:
        The result has the memory layout of torch's own attention, `[batch, queries, heads, value_head_dim]`.
    """
    reads = reads_of(segments)
    if isinstance(reads, str):
        return reads
    kind, mask_kind = reads[0].plan.kind, kind_of(mask)
    batch, heads, queries, _ = query.shape
    if heads // kind.kv_heads * queries * max(read.readers for read in reads) > MAXIMUM_ROWS:
        return f"there are more than {MAXIMUM_ROWS} queries for a kv head, as in a prompt"
    if batch * kind.kv_heads > MAXIMUM_HEADS:
        return f"there are more than {MAXIMUM_HEADS} kv heads in all sequences"
    if query.dtype != kind.dtype:
        return f"queries are {query.dtype}, and scales {kind.dtype}"
    variants = [variant_of(read, heads, queries, mask_kind) for read in reads]
    if (why := _obstacle(variants)) is not None:
        return why
    run = split_call(query, reads, variants, mask, scale)
    if (why := _obstacle(variants)) is not None:
        return why
    out = run(query.dtype)
    new = [variant for variant in variants if not variant.compared]
    # Comparing waits for the device, which cannot be while a CUDA graph is recorded.
    if not new or not out.numel() or out.is_meta or (out.is_cuda and torch.cuda.is_current_stream_capturing()):
        return out
    return compare(new, out, by_torch()) or out


def _obstacle(variants: list[Variant]) -> str | None:
    """Why one of the variants cannot be launched, `None` if all can, as far as is known."""
    return next((variant.obstacle for variant in variants if variant.obstacle is not None), None)


def compare(variants: list[Variant], seen: Tensor, expected: Tensor) -> str | None:
    """Why the variants that gave a result are never launched again, `None` if it is the expected one.

    Nothing is decided if the expected result is not finite.
    """
    error, size = torch.stack([(seen.float() - expected.float()).norm(), expected.float().norm()]).tolist()
    if not math.isfinite(size):
        return None
    found: str | None = None
    if not error <= LARGEST_ERROR * size:
        found = f"the first result of the kernel was {error:.2g} from that of torch, whose norm is {size:.2g}"
        logger.warning("triton's code is wrong on %s, so another path is taken: %s", seen.device, found)
    for variant in variants:
        variant.compared, variant.obstacle = True, found
    return found
