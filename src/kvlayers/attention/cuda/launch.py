"""Launches the Triton kernels: attention of few queries to packed or gathered tokens, and to dense ones around them.

The tokens are divided among enough programs to keep all multiprocessors busy (flash-decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html): each program attends to a split of one segment, and a second
kernel merges the results of the splits. All query heads and query tokens that share a kv head are rows of one product,
so its codes are read once. A scale that a whole row of keys shares is multiplied into the queries, and one that a whole
row of values shares into the weights: each single code is only unpacked.

The first call imports triton; `import kvlayers` never does.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.cuda.plan import ATTEND_SPLIT, DENSE_TOKENS, MERGE_SPLITS, SegmentPlan, Variant
from kvlayers.attention.cuda.reads import Read
from kvlayers.attention.cuda.specs import ADDED_MASK, BOOL_MASK, NO_MASK
from kvlayers.attention.fused import unexpanded

_LOG2_E = math.log2(math.e)
_NO_STRIDES = (0,) * 6


def kind_of(mask: Tensor | None) -> int:
    """The kind of a mask."""
    return NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK


def variant_of(read: Read, heads: int, q_tokens: int, mask: int) -> Variant:
    """The kernel of a launch, for numbers of query heads and queries, and a kind of mask."""
    indexed, gathered, smoothing = read.rows is not None, read.tables is not None, read.smoothing
    factors = smoothing is not None and smoothing.factor is not None
    means = smoothing is not None and smoothing.mean is not None
    return read.plan.kernels.variant(heads, q_tokens, mask, read.readers, indexed, gathered, factors, means)


class SplitCall:
    """The launches of the split kernel, with their arguments.

    Args:
        query: `[batch, heads, queries, key_head_dim]`.
        reads: what each launch reads.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores.
    """

    __slots__ = ("_gaps", "_launches", "_partials", "_plan", "_query", "_splits")

    def __init__(self, query: Tensor, reads: list[Read], mask: Tensor | None, scale: float) -> None:
        if scale <= 0:
            # The kernel takes the largest score before it scales.
            query, scale = query * (-1 if scale else 0), -scale or 1.0
        if query.stride(3) != 1:
            query = query.contiguous()
        batch, heads, q_tokens, _ = query.shape
        plan = reads[0].plan
        kind, entries = kind_of(mask), query
        divisions: list[tuple[Variant, tuple[int, int, int], int, int, int, int]] = []
        packed_place = packed_splits = splits = 0
        for read in reads:
            division = _divided(read, batch, heads, q_tokens, kind)
            divisions.append(division)
            splits += division[1][0]
            packed_splits += division[2] if isinstance(read.plan, SegmentPlan) else 0
        dense_place = packed_splits

        mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            if any(division[0].wide_mask for division in divisions):
                mask = unexpanded(mask).to(torch.int16)
            mask = mask.expand(batch, heads, q_tokens, mask.shape[3])
            mask_strides = mask.stride()
            entries = mask.view(torch.uint8) if mask.dtype == torch.bool else mask

        results = batch * heads * q_tokens
        partials = query.new_empty(results * splits * (plan.value_dim + 1), dtype=torch.float32)
        self._plan, self._query, self._splits, self._partials = plan, query, (packed_splits, splits), partials
        self._gaps = any(read.tables is not None for read in reads)
        nothing = query, query, _NO_STRIDES, 0, 0
        self._launches: list[tuple[Variant, tuple[int, ...], tuple[Any, ...]]] = []
        for read, (variant, grid, in_blocks, blocks, of_a, tokens) in zip(reads, divisions, strict=True):
            if not grid[0]:
                continue
            of_read = read.plan
            keys_a, values_a, strides_a, tokens_a, column_a = read.dense[0] if read.dense else nothing
            keys_b, values_b, strides_b, tokens_b, column_b = read.dense[1] if len(read.dense) > 1 else nothing
            if isinstance(of_read, SegmentPlan):
                block_place, packed_place = packed_place, packed_place + in_blocks
            else:
                # Sums of values in full precision are not rotated back.
                block_place, dense_place = dense_place, dense_place + in_blocks
            arguments: tuple[Any, ...] = (
                query,
                *of_read.tensors[:4],
                *_tables_of(read, kind),
                keys_a,
                values_a,
                keys_b,
                values_b,
                entries,
                partials,
                query if read.rows is None else read.rows.on(plan.device)[0],
                *_vectors_of(read, query),
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
            if variant.constants is None:
                variant.fit(plan.device, grid, arguments)
            self._launches.append((variant, grid, arguments))

    def run(self, dtype: torch.dtype, logsumexp: bool) -> tuple[Tensor, Tensor]:
        """Launch the kernels.

        Args:
            dtype: dtype of the attended values.
            logsumexp: whether the log-sum-exp is wanted.

        Returns:
            `[batch, heads, q_tokens, value_head_dim]`, zeros if a query sees no token; and the log-sum-exp of the
            scores, float32 `[batch, heads, q_tokens]`, `-inf` if a query sees no token (or an unused tensor).
        """
        plan, query = self._plan, self._query
        partials = self._partials
        batch, heads, q_tokens, _ = query.shape
        # In the memory layout of torch's own attention, so that the transpose after it costs nothing.
        out = query.new_empty((batch, q_tokens, heads, plan.value_dim), dtype=dtype)
        lses = query.new_empty((batch, heads, q_tokens), dtype=torch.float32) if logsumexp else partials
        if out.numel():
            for variant, grid, arguments in self._launches:
                ATTEND_SPLIT.launch(plan.device, grid, arguments, variant.constants or {})
            MERGE_SPLITS.launch(
                plan.device,
                (batch * heads * q_tokens,),
                (partials, out, lses, *self._splits, q_tokens),
                plan.kernels.merge(heads, logsumexp, self._gaps),
            )
        return out.transpose(1, 2), lses


def _tables_of(read: Read, kind: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of blocks or pieces, their first columns of the mask, and where pieces are. Any pointers may stand for
    what is never read.
    """
    if read.tables is None:
        ends = read.plan.tensors[4]
        return ends, ends if kind == NO_MASK else read.plan.starts(), ends
    counts = read.tables.counts
    return counts, counts if kind == NO_MASK else read.tables.columns(), read.tables.pieces


def _vectors_of(read: Read, query: Tensor) -> tuple[Tensor, Tensor]:
    """The factors and the means of packed keys. Any pointer stands for what is never read."""
    smoothing = read.smoothing
    if smoothing is None:
        return query, query
    factor, mean = smoothing.factor, smoothing.mean
    return query if factor is None else factor, query if mean is None else mean


def _divided(
    read: Read, batch: int, heads: int, q_tokens: int, kind: int
) -> tuple[Variant, tuple[int, int, int], int, int, int, int]:
    """How a launch is divided into programs.

    Returns:
        Its kernel; its programs in each dimension, all splits in the first; the splits of blocks; blocks of a split;
        splits of the first dense segment; and dense tokens of a split.
    """
    plan = read.plan
    # Kv heads of unequal numbers of pieces have programs that do nothing: those of the average head fill the device.
    blocks = read.blocks if read.tables is None else min(read.blocks, read.tables.filled)
    variant = variant_of(read, heads, q_tokens, kind)
    kv_heads = batch * plan.kv_heads // read.readers
    tiles = -(-heads // plan.kv_heads * q_tokens * read.readers // variant.rows)
    for _, _, _, tokens, _ in read.dense:
        blocks = max(blocks, -(-tokens // plan.block_tokens))
    per_split = plan.kernels.blocks_per_split(blocks, max(1, kv_heads * tiles))
    tokens_per_split = max(DENSE_TOKENS, per_split * plan.block_tokens)
    in_blocks = splits = -(-read.blocks // per_split)
    of_a = 0
    for _, _, _, tokens, _ in read.dense:
        of_b = -(-tokens // tokens_per_split)
        of_a = of_a or of_b
        splits += of_b
    return variant, (splits, kv_heads, tiles), in_blocks, per_split, of_a, tokens_per_split
