"""Launches the Triton kernels: attention of few queries to packed tokens, and to tokens in full precision around them.

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

from kvlayers.attention.cuda.plan import ATTEND_SPLIT, DENSE_TOKENS, MERGE_SPLITS, Read, Variant
from kvlayers.attention.cuda.specs import ADDED_MASK, BOOL_MASK, NO_MASK, rows_of_program

_LOG2_E = math.log2(math.e)
_NO_STRIDES = (0,) * 6


def kind_of(mask: Tensor | None) -> int:
    """The kind of a mask."""
    return NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK


class SplitCall:
    """The launches of the split kernel, with their arguments.

    Args:
        query: `[batch, heads, queries, key_head_dim]`.
        reads: what each launch reads.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores.
    """

    __slots__ = ("_launches", "_partials", "_plan", "_query", "_splits")

    def __init__(self, query: Tensor, reads: list[Read], mask: Tensor | None, scale: float) -> None:
        if scale <= 0:
            # The kernel takes the largest score before it scales.
            query, scale = query * (-1 if scale else 0), -scale or 1.0
        if query.stride(3) != 1:
            query = query.contiguous()
        batch, heads, q_tokens, _ = query.shape
        plan = reads[0].plan
        divisions = [_Division(read, batch * plan.kv_heads, heads // plan.kv_heads * q_tokens) for read in reads]
        packed_place, dense_place = 0, sum(division.packed for division in divisions)
        splits = sum(division.splits for division in divisions)
        self._splits = dense_place, splits

        kind, entries = kind_of(mask), query
        mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            mask = mask.expand(batch, heads, q_tokens, mask.shape[3])
            mask_strides = mask.stride()
            entries = mask.view(torch.uint8) if kind == BOOL_MASK else mask

        results = batch * heads * q_tokens
        partials = query.new_empty(results * splits * (plan.value_dim + 1), dtype=torch.float32)
        self._plan, self._query, self._partials = plan, query, partials
        nothing = (query, query, _NO_STRIDES, 0)
        self._launches: list[tuple[Variant, tuple[int, ...], tuple[Any, ...]]] = []
        for read, division in zip(reads, divisions, strict=True):
            if not division.splits:
                continue
            of_read = read.plan
            (a, column_a), (b, column_b), *_ = (*read.dense, (None, 0), (None, 0))
            keys_a, values_a, strides_a, tokens_a = nothing if a is None else a.arguments
            keys_b, values_b, strides_b, tokens_b = nothing if b is None else b.arguments
            arguments: tuple[Any, ...] = (
                query,
                *of_read.tensors,
                of_read.starts() if kind != NO_MASK else of_read.tensors[4],
                keys_a,
                values_a,
                keys_b,
                values_b,
                entries,
                partials,
                query.stride(),
                of_read.strides,
                strides_a,
                strides_b,
                *mask_strides,
                read.blocks,
                division.blocks,
                division.packed,
                of_read.first,
                read.column,
                tokens_a,
                division.of_a,
                column_a,
                tokens_b,
                column_b,
                division.tokens,
                packed_place,
                dense_place,
                splits,
                q_tokens,
                read.readers,
                scale * _LOG2_E,
            )
            packed_place += division.packed
            dense_place += division.splits - division.packed
            variant = of_read.variant(heads, division.rows, kind, read.readers > 1)
            if variant.constants is None:
                variant.fit(plan.device, division.grid, arguments)
            self._launches.append((variant, division.grid, arguments))

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
                plan.merge(heads, logsumexp),
            )
        return out.transpose(1, 2), lses


class _Division:
    """How a launch is divided into programs.

    Args:
        read: what the launch reads.
        kv_heads: kv heads of all sequences of the batch.
        rows_of_head: rows of queries of one of them.

    Attributes:
        rows: rows of queries that a program takes.
        blocks: packed blocks of a split.
        tokens: dense tokens of a split.
        packed: splits of the packed segment.
        of_a: splits of the first dense segment.
        splits: all splits.
        grid: programs in each dimension.
    """

    __slots__ = ("blocks", "grid", "of_a", "packed", "rows", "splits", "tokens")

    def __init__(self, read: Read, kv_heads: int, rows_of_head: int) -> None:
        plan, readers = read.plan, read.readers
        rows_of_head *= readers
        kv_heads //= readers
        self.rows = rows_of_program(rows_of_head)
        tiles = -(-rows_of_head // self.rows)
        size = plan.block_tokens
        sizes = [segment.tokens for segment, _ in read.dense]
        longest = max(read.blocks, *(-(-tokens // size) for tokens in sizes), 0)
        self.blocks = plan.blocks_per_split(longest, max(1, kv_heads * tiles))
        self.tokens = max(DENSE_TOKENS, self.blocks * size)
        self.packed = -(-read.blocks // self.blocks)
        of_dense = [-(-tokens // self.tokens) for tokens in sizes]
        self.of_a = of_dense[0] if of_dense else 0
        self.splits = self.packed + sum(of_dense)
        self.grid = self.splits, kv_heads, tiles
