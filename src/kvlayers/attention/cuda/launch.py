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

from kvlayers.attention.cuda.plan import (
    ATTEND_SPLIT,
    DENSE_TOKENS,
    MERGE_SPLITS,
    DenseArguments,
    SegmentPlan,
    Variant,
    dense_arguments,
)
from kvlayers.attention.cuda.specs import ADDED_MASK, BOOL_MASK, NO_MASK, rows_of_program
from kvlayers.attention.segments import KVSegments

_LOG2_E = math.log2(math.e)
_NO_STRIDES = (0,) * 6


def kind_of(mask: Tensor | None) -> int:
    """The kind of a mask."""
    return NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK


class SplitCall:
    """One launch of the split kernel, with its arguments.

    Attributes:
        variant: the kernel to launch.
    """

    __slots__ = ("_arguments", "_grid", "_partials", "_plan", "_query", "_splits", "variant")

    def __init__(
        self, query: Tensor, segments: KVSegments, plan: SegmentPlan, mask: Tensor | None, scale: float
    ) -> None:
        """Arguments are those of `kernel.attend`; `plan` is that of the packed segment."""
        if scale <= 0:
            # The kernel takes the largest score before it scales.
            query, scale = query * (-1 if scale else 0), -scale or 1.0
        if query.stride(3) != 1:
            query = query.contiguous()
        batch, heads, q_tokens, _ = query.shape
        kv_heads = plan.kv_heads
        rows_of_head = heads // kv_heads * q_tokens
        rows = rows_of_program(rows_of_head)
        tiles = -(-rows_of_head // rows)
        per_split = plan.blocks_per_split(max(1, batch * kv_heads * tiles))
        packed_splits = -(-plan.blocks // per_split)
        tokens_per_split = max(DENSE_TOKENS, per_split * plan.block_tokens)

        before: DenseArguments = (query, query, _NO_STRIDES, 0)
        after = before
        if segments.before:
            if plan.before is None or plan.before[0] is not segments.before:
                plan.before = segments.before, dense_arguments(segments.before)
            before = plan.before[1]
        if segments.after:
            after = dense_arguments(segments.after)
        splits_before, splits_after = -(-before[3] // tokens_per_split), -(-after[3] // tokens_per_split)
        splits = packed_splits + splits_before + splits_after

        kind, entries = kind_of(mask), query
        mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            mask = mask.expand(batch, heads, q_tokens, mask.shape[3])
            mask_strides = mask.stride()
            entries = mask.view(torch.uint8) if kind == BOOL_MASK else mask

        results = batch * heads * q_tokens
        partials = query.new_empty(results * splits * (plan.value_dim + 1), dtype=torch.float32)
        self.variant: Variant = plan.variant(heads, rows, kind)
        self._plan, self._query, self._splits, self._partials = plan, query, (packed_splits, splits), partials
        self._grid = splits, batch * kv_heads, tiles
        self._arguments: tuple[Any, ...] = (
            query,
            *plan.tensors,
            plan.starts() if kind != NO_MASK else plan.tensors[4],
            before[0],
            before[1],
            after[0],
            after[1],
            entries,
            partials,
            query.stride(),
            plan.strides,
            before[2],
            after[2],
            *mask_strides,
            plan.blocks,
            per_split,
            packed_splits,
            plan.first,
            plan.tokens,
            before[3],
            splits_before,
            after[3],
            splits_after,
            tokens_per_split,
            q_tokens,
            scale * _LOG2_E,
        )
        if self.variant.constants is None:
            self.variant.fit(plan.device, self._grid, self._arguments)

    def run(self, dtype: torch.dtype, logsumexp: bool) -> tuple[Tensor, Tensor]:
        """Launch both kernels.

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
        packed_splits, splits = self._splits
        constants = self.variant.constants
        if out.numel() and constants is not None:
            ATTEND_SPLIT.launch(plan.device, self._grid, self._arguments, constants)
            MERGE_SPLITS.launch(
                plan.device,
                (batch * heads * q_tokens,),
                (partials, out, lses, packed_splits, splits, q_tokens),
                plan.merge(heads, logsumexp),
            )
        return out.transpose(1, 2), lses
