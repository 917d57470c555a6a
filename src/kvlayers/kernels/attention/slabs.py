"""Attention on key-value segments in torch: slab by slab, with one merge by the log-sum-exp of the scores.

It serves what no kernel takes: on a CPU dtypes without a kernel, and machines without a compiler; on an accelerator
prompts behind a cache, long drafts, codes without a kernel, and devices without Triton.

- Consecutive segments with the same rows are read once: the queries of all sequences that read the same sequence of
  them are grouped, as if they were queries of one sequence, as in Hydragen (Juravsky et al. 2024, arXiv:2402.05099).
- On an accelerator a slab is as many packed tokens as may be in full precision at once, in the dtype of the queries. A
  fused kernel of torch attends to it (`fused`).
- Elsewhere two products attend to it, in float32, with an online softmax (Milakov and Gimelshein 2018,
  arXiv:1805.02867). On a CPU, many queries take a few packed blocks in float32 at once. With few, as in a decode step,
  the codes of many blocks are multiplied as they are, and their scales are folded into the other factor. Packed states
  stay rotated there: the queries of a segment are rotated once, and its sums of values.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.kernels.attention import fused
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment, SegmentRows
from kvlayers.kernels.attention.segments import (
    GatheredSegment,
    KVSegments,
    Segment,
)
from kvlayers.kernels.codes.groups import rotate
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import runs_triton

CPU_SCORES_AT_ONCE = 1 << 15
"""Scores of one head that are worth a round of torch calls on a CPU: with fewer, their fixed cost dominates."""

CPU_MINIMUM_BLOCK_TOKENS = 64
"""Fewest tokens at once, however many queries there are."""

CPU_MAXIMUM_TOKENS_AT_ONCE = 512
"""Most tokens that are brought to full precision at once, however few queries there are."""

CPU_MAXIMUM_ROWS_OF_CODES = 32
"""Rows of a KV head, its query heads times their queries, up to which codes are multiplied before they are scaled."""

CPU_CODES_AT_ONCE = 1 << 21
"""Codes of keys, or of values, that are numbers in float32 at once: with fewer, the fixed cost of calls dominates."""

SLAB_BYTES = 1 << 28
"""Bytes of keys, values and mask that are in full precision at once on an accelerator."""

MINIMUM_SLAB_TOKENS = 8192
"""Fewest tokens of a slab there, whatever the batch: with fewer, launches and merging cost more than attention."""

SCORES_AT_ONCE = 1 << 26
"""Most scores that are in memory at once on an accelerator if no fused kernel takes the states."""

UNPACKING_BYTES = 16
"""Bytes that each state takes while plain torch unpacks it: in float32, at several stages at once."""

PARTS_AT_ONCE = 8
"""Results of slabs that are kept until they are merged."""

INTERPRETED = triton_support.is_interpreted()
"""Whether Triton interprets its kernels, so that tests take the paths of accelerators on a CPU."""


def are_of_accelerators(queries: Tensor) -> bool:
    """Whether attention of queries takes the paths of accelerators: there, and where they are tested."""
    return not queries.is_cpu or INTERPRETED


Held = TypeVar("Held", bound=DenseSegment | PackedSegment)


@dataclass(frozen=True, eq=False)
class Slab(Generic[Held]):
    """A few tokens of a segment.

    Attributes:
        position: column of the first token, or that of the gathered segment.
        width: columns of the tokens, or those of the gathered segment.
        segment: the tokens.
        columns: of a gathered segment, as of `GatheredSegment.padded_pieces`.
    """

    position: int
    width: int
    segment: Held
    columns: Tensor | None = None

    @functools.cached_property
    def padding(self) -> Tensor | None:
        """Which tokens of a gathered segment are padding, bool `[batch, kv_heads, 1, tokens]`."""
        return None if self.columns is None else (self.columns == self.width).unsqueeze(2)

    def cleared(self, values: Tensor) -> Tensor:
        """Values with zeros for padding, which may be anything, even nan that a weight of zero would not remove."""
        return values if self.padding is None else values.masked_fill(self.padding.transpose(2, 3), 0)

    def columns_of(self, rows: Tensor) -> Tensor:
        """Entries of `[batch, heads, rows, all tokens]` for the tokens of the slab; any for padding."""
        own = rows.narrow(3, self.position, self.width)
        return own if self.columns is None else own.gather(3, _index(self.columns.clamp(max=self.width - 1), rows))

    def mask_of(self, mask: Tensor | None, heads: int) -> Tensor | None:
        """The mask of the slab, from that of all tokens, which is of size 1 where it is the same; padding is hidden."""
        padding = self.padding
        if padding is None:
            return None if mask is None else self.columns_of(mask)
        hidden = padding.repeat_interleave(heads // padding.shape[1], 1)
        if mask is None:
            return hidden.logical_not()
        part = self.columns_of(mask.expand(hidden.shape[0], heads, -1, -1))
        return part.masked_fill(hidden, False if part.dtype == torch.bool else -torch.inf)


def _index(columns: Tensor, rows: Tensor) -> Tensor:
    """Columns `[batch, kv_heads, tokens]` as an index of `[batch, heads, rows, any]`."""
    copies = rows.shape[1] // columns.shape[1]
    return columns.repeat_interleave(copies, 1).unsqueeze(2).expand(-1, -1, rows.shape[2], -1)


@dataclass(frozen=True, eq=False)
class Slabs(Generic[Held]):
    """A segment in slabs whose states are brought to full precision, rotated back.

    Attributes:
        position: column of the first token.
        segment: the segment.
        tokens: about so many tokens are a slab.
        dtype: the dtype that states are brought to.
    """

    position: int
    segment: Segment
    tokens: int
    dtype: torch.dtype

    def __iter__(self) -> Iterator[Slab[Any]]:
        if isinstance(self.segment, GatheredSegment):
            for padded, columns in self.segment.padded_pieces(self.tokens):
                yield Slab(self.position, self.segment.width, padded, columns)
            return
        position = self.position
        for piece in (some for some in self.segment.pieces(self.tokens) if some.tokens):
            yield Slab(position, piece.tokens, piece)
            position += piece.tokens

    def queries(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries `[batch, heads, rows, head_dim]` for the keys as they are, and what is added to all their products.

        The latter is float32 `[batch, heads, rows, 1]`, or `None`.
        """
        smoothing = self.segment.source.smoothing
        return smoothing.queries(query), smoothing.offsets(query)

    def states(self, slab: Slab[Held], side: Side) -> Tensor:
        """Keys, or values, of a slab, `[batch, kv_heads, tokens, head_dim]`. They are computed anew each time."""
        return slab.segment.states(side, self.dtype)

    def products(self, query: Tensor, slab: Slab[Held]) -> Tensor:
        """Products of `queries` `[batch, kv_heads, rows, head_dim]` and keys: `[batch, kv_heads, rows, tokens]`."""
        return query @ self.states(slab, "keys").transpose(2, 3)

    def combine(self, weights: Tensor, slab: Slab[Held]) -> Tensor:
        """Sums of the values as they are, weighted by `[batch, kv_heads, rows, tokens]`."""
        return weights @ slab.cleared(self.states(slab, "values"))

    def restored(self, sums: Tensor) -> Tensor:
        """Sums `[batch, kv_heads, rows, head_dim]` of the values as they were before they were packed."""
        return sums


class RotatedSlabs(Slabs[PackedSegment]):
    """Packed tokens whose states stay rotated, in float32.

    Products stay the same if both sides are rotated, so the queries of all slabs are rotated once, and the sums.
    """

    @override
    def queries(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        own, offsets = super().queries(query)
        return self._rotated(own, "keys"), offsets

    @override
    def states(self, slab: Slab[PackedSegment], side: Side) -> Tensor:
        return slab.segment.held(slab.segment.side(side).dequantized())

    @override
    def restored(self, sums: Tensor) -> Tensor:
        return self._rotated(sums, "values")

    def _rotated(self, rows: Tensor, side: Side) -> Tensor:
        return rotate(rows) if self.segment.source.side(side).layout.format.rotated else rows  # type: ignore[union-attr]


class SlabsOfCodes(RotatedSlabs):
    """Whole packed blocks whose codes are multiplied, with their scales folded into the other factor.

    No state is computed.
    """

    @override
    def products(self, query: Tensor, slab: Slab[PackedSegment]) -> Tensor:
        keys = slab.segment.keys
        by_block = query.unsqueeze(2).expand(-1, -1, keys.blocks, -1, -1)
        return keys.products(by_block).transpose(2, 3).flatten(3)[..., slab.segment.first :]

    @override
    def combine(self, weights: Tensor, slab: Slab[PackedSegment]) -> Tensor:
        values = slab.segment.values
        if slab.segment.first:
            weights = torch.nn.functional.pad(weights, (slab.segment.first, 0))
        by_block = torch.unflatten(weights, 3, (-1, values.layout.block_tokens)).transpose(2, 3)
        return values.products(by_block).sum(2)


def slabs_on_cpu(segments: KVSegments, rows: int, dtype: torch.dtype) -> Iterator[Slabs[Any]]:
    """All segments in slabs for so many rows of queries of each KV head, of codes where these are few."""
    for position, segment in segments.with_columns:
        source = segment.source
        least = CPU_MINIMUM_BLOCK_TOKENS if isinstance(source, DenseSegment) else source.keys.layout.block_tokens
        tokens = min(max(CPU_SCORES_AT_ONCE // max(rows, 1), least), CPU_MAXIMUM_TOKENS_AT_ONCE)
        # What is smaller is rotated: the states, or the queries and the sums of values.
        kind: type[Slabs[Any]] = RotatedSlabs if isinstance(source, PackedSegment) and rows <= segment.tokens else Slabs
        if (
            isinstance(segment, PackedSegment)
            and rows <= CPU_MAXIMUM_ROWS_OF_CODES
            and segment.ends is None
            and segment.keys.layout.row_group == segment.values.layout.row_group == 1
        ):
            kind = SlabsOfCodes
            tokens = CPU_CODES_AT_ONCE // (segments.batch * segment.kv_heads * max(segment.head_dims))
        yield kind(position, segment, tokens, dtype)


def slabs_on_accelerator(
    segments: KVSegments, dtype: torch.dtype, mask_rows: int = 0, most_tokens: int | None = None
) -> Iterator[Slabs[Any]]:
    """All segments in slabs of a dtype. Dense states are divided only if a mask as long must be converted.

    Args:
        segments: the segments.
        dtype: dtype of the slabs.
        mask_rows: rows of the mask that is read beside them.
        most_tokens: most tokens of a slab, if scores are in memory.
    """
    itemsize = dtype.itemsize if runs_triton(segments.device) else UNPACKING_BYTES
    numbers = segments.batch * segments.kv_heads * sum(segments.head_dims)
    tokens = max(SLAB_BYTES // (numbers * itemsize + mask_rows * dtype.itemsize), MINIMUM_SLAB_TOKENS)
    for position, segment in segments.with_columns:
        at_once = max(segment.tokens, 1) if isinstance(segment, DenseSegment) and not mask_rows else tokens
        yield Slabs(position, segment, min(at_once, most_tokens or at_once), dtype)


@dataclass(frozen=True, eq=False)
class _Part:
    """Consecutive segments with the same rows.

    If rows are uneven, all queries go to each sequence of the segments, and each sequence takes its own result. So
    nothing depends on rows that only the accelerator knows.

    Attributes:
        segments: the segments without their rows.
        rows: the rows, `None` if each sequence of the batch reads its own.
        columns: columns of the tokens.
    """

    segments: KVSegments
    rows: SegmentRows | None
    columns: slice

    def grouped(self, rows: Tensor) -> Tensor:
        """Rows `[batch, heads, queries, any]` of queries, weights or a mask, as rows of the segments' sequences."""
        if self.rows is None:
            return rows
        batch, heads, queries, width = rows.shape
        sequences = self.rows.sequences if self.rows.are_even else 1
        by_sequence = rows.reshape(sequences, batch // sequences, heads, queries, width).transpose(1, 2)
        found = by_sequence.reshape(sequences, heads, batch // sequences * queries, width)
        return found.expand(self.rows.sequences, -1, -1, -1)

    def ungrouped(self, result: Tensor) -> Tensor:
        """Results for grouped rows, `[sequences, kv_heads, heads of a group, rows, ...]`, for each of the batch."""
        if self.rows is None:
            return result
        if self.rows.are_even:
            return torch.unflatten(result, 3, (len(self.rows) // self.rows.sequences, -1)).movedim(3, 1).flatten(0, 1)
        of_rows, positions = self.rows.on(result.device)
        return torch.unflatten(result, 3, (len(self.rows), -1)).movedim(3, 1)[of_rows, positions]


def _parts(segments: KVSegments, on_accelerator: bool) -> Iterator[_Part]:
    """The parts that are not empty.

    On a CPU segments keep uneven rows: each sequence of the batch then reads its own copy of a few tokens at a time.
    """
    position = 0
    for _, group in itertools.groupby(segments.in_order, lambda segment: id(segment.rows)):
        same_rows = tuple(group)
        rows = same_rows[0].rows
        if rows is None or not (rows.are_even or on_accelerator):
            held, rows = KVSegments(same_rows), None
        else:
            held = KVSegments(tuple(_of_sequences(segment, rows) for segment in same_rows))
        start, position = position, position + held.tokens
        if position > start:
            yield _Part(held, rows, slice(start, position))


def _of_sequences(segment: Segment, rows: SegmentRows) -> Segment:
    """A segment without rows, smoothed as all sequences of the batch that read one of its sequences have in common."""

    def of_sequences(vectors: Tensor) -> Tensor:
        own = vectors.new_ones((rows.sequences, *vectors.shape[1:]))
        return own.index_copy_(0, rows.on(vectors.device)[0], vectors)

    held = segment.source.with_rows(None)
    return replace(held, smoothing=held.smoothing.mapped(of_sequences)) if isinstance(held, PackedSegment) else held


def _exact_dtype(states: Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of queries to the tokens of segments.

    Args:
        query: `[batch, heads, queries, key_head_dim]`, heads a multiple of the segments' kv_heads.
        segments: the keys and values.
        mask: bool or additive, `[batch, heads, queries, tokens]` (expanded), or `None`. On an accelerator, a number of
            -1e30 and below (in float16 the lowest) hides a token as `-inf` does.
        scale: factor of the scores.

    Returns:
        `[batch, heads, queries, value_head_dim]` in the dtype of the query, zeros for queries that see no token.
    """
    batch, _, queries, _ = query.shape
    if not query.numel() or not segments.tokens:
        return query.new_zeros((*query.shape[:3], segments.head_dims[1]))
    on_accelerator = are_of_accelerators(query)
    if mask is not None:
        # Nothing is copied for each head if the mask is the same for all.
        mask = fused.unexpanded(mask)
        mask = mask.expand(batch, -1, queries, -1) if segments.shares_rows else mask
    found: list[tuple[Tensor, Tensor]] = []
    for part in _parts(segments, on_accelerator):
        of_part = None if mask is None else part.grouped(mask[..., part.columns])
        for out, logsumexp in _attended(part.grouped(query), part.segments, of_part, scale, on_accelerator):
            found.append((part.ungrouped(out), part.ungrouped(logsumexp)))
            if len(found) == PARTS_AT_ONCE:
                found = [fused.merged(found, _exact_dtype(query), wants_logsumexp=True)]
    may_hide = on_accelerator and (mask is not None or segments.holds_gathered)
    out, logsumexp = fused.merged(found, query.dtype, wants_logsumexp=may_hide)
    if may_hide:
        out = out.masked_fill_((logsumexp <= fused.lowest_score(query.dtype) * 0.9)[..., None], 0)
    return out.flatten(1, 2).to(query.dtype)


def _attended(
    query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float, on_accelerator: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention to each slab of segments without rows, as `fused.attend_dense` returns it."""
    batch, heads, queries, head_dim = query.shape
    kv_heads = segments.kv_heads
    mask_rows = 0 if mask is None else mask.shape[:3].numel()
    has_mask = mask is not None or segments.holds_gathered
    if on_accelerator and fused.takes(query, segments.head_dims, has_mask):
        if query.stride(3) != 1 or any(stride % fused.ALIGNED_NUMBERS for stride in query.stride()[:3]):
            query = query.contiguous()
        for slabs in slabs_on_accelerator(segments, query.dtype, mask_rows):
            own, offsets = slabs.queries(query)
            for slab in slabs:
                keys, values = slabs.states(slab, "keys"), slab.cleared(slabs.states(slab, "values"))
                out, logsumexp = fused.attend_dense(own, keys, values, slab.mask_of(mask, heads), scale)
                yield out, logsumexp if offsets is None else logsumexp + (offsets[..., 0] * scale).view(logsumexp.shape)
        return
    rows, exact = heads // kv_heads * queries, _exact_dtype(query)
    if on_accelerator:
        most_tokens = max(SCORES_AT_ONCE // (batch * kv_heads * rows), CPU_MINIMUM_BLOCK_TOKENS)
        some = slabs_on_accelerator(segments, exact, mask_rows, most_tokens)
    else:
        some = slabs_on_cpu(segments, rows, exact)
    scaled = query.reshape(batch, kv_heads, rows, head_dim).to(exact) * scale
    # A row that sees no token has a finite number as its highest score, as -inf - -inf is not a number.
    highest = scaled.new_full((batch, kv_heads, rows, 1), torch.finfo(torch.float32).min)
    total, nothing = torch.zeros_like(highest), scaled.new_zeros((batch, kv_heads, rows, segments.head_dims[1]))
    sums = nothing
    for slabs in some:
        own, offsets = slabs.queries(scaled)
        before, of_segment = highest, nothing
        for slab in slabs:
            products = slabs.products(own, slab)
            scores = masked(products if offsets is None else products + offsets, slab, mask, queries)
            raised = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - raised), torch.exp(highest - raised)
            total = total * shrink + weights.sum(-1, keepdim=True)
            of_segment, highest = of_segment * shrink + slabs.combine(weights, slab), raised
        sums = sums * torch.exp(before - highest) + slabs.restored(of_segment)
    out, logsumexp = torch.where(total == 0, 0.0, sums / total), highest + total.log().clamp(min=0)
    yield torch.unflatten(out, 2, (-1, queries)), torch.unflatten(logsumexp.squeeze(-1), 2, (-1, queries))


def masked(scores: Tensor, slab: Slab[Any], mask: Tensor | None, queries: int) -> Tensor:
    """Scores of a slab, `[batch, kv_heads, rows, tokens]`, with what the mask of all tokens says."""
    kv_heads, rows = scores.shape[1:3]
    part = slab.mask_of(mask, kv_heads * rows // queries)
    if part is None:
        return scores
    by_query = torch.unflatten(scores, 2, (-1, queries))
    part = torch.unflatten(part, 1, (kv_heads, -1)) if part.shape[1] > 1 else part.unsqueeze(1)
    if part.dtype == torch.bool:
        return by_query.masked_fill(~part, -torch.inf).flatten(2, 3)
    return (by_query + part.to(scores.dtype)).flatten(2, 3)


def scores(query: Tensor, segments: KVSegments) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`.

    They are `-inf` where a column of a gathered segment stands for no token.
    """
    on_accelerator = are_of_accelerators(query)
    exact = query if on_accelerator else query.to(_exact_dtype(query))
    batch, heads, queries, head_dim = query.shape
    kv_heads, tokens = segments.kv_heads, segments.tokens
    # Padding is written as -inf, to the column behind its segment: that of a later slab, or the last one.
    products = exact.new_full((batch, kv_heads, heads // kv_heads * queries, tokens + 1), -torch.inf)
    for part in _parts(segments, on_accelerator):
        grouped = part.grouped(exact)
        own = grouped.reshape(grouped.shape[0], kv_heads, -1, head_dim)
        for slabs in _slabs_of_product(part.segments, grouped, on_accelerator):
            of_keys, offsets = slabs.queries(own)
            for slab in slabs:
                found = slabs.products(of_keys, slab)
                by_query = torch.unflatten(found if offsets is None else found + offsets, 2, (-1, grouped.shape[2]))
                found = part.ungrouped(by_query).flatten(2, 3)
                position = part.columns.start + slab.position
                if slab.columns is None or slab.padding is None:
                    products[..., position : position + found.shape[3]] = found
                else:
                    found = found.masked_fill(slab.padding, -torch.inf).to(products.dtype)
                    products.narrow(3, position, slab.width + 1).scatter_(3, _index(slab.columns, found), found)
    return products[..., :-1].to(query.dtype).reshape(batch, heads, queries, tokens)


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`.

    Weights of columns that stand for no token do not count. Sums of slabs are added in float32 at least.
    """
    on_accelerator = are_of_accelerators(weights)
    exact = weights if on_accelerator else weights.to(_exact_dtype(weights))
    batch, heads, queries, _ = weights.shape
    kv_heads = segments.kv_heads
    sums = exact.new_zeros(
        (batch, kv_heads, heads // kv_heads, queries, segments.head_dims[1]), dtype=_exact_dtype(weights)
    )
    for part in _parts(segments, on_accelerator):
        grouped = part.grouped(exact[..., part.columns])
        by_kv_head = grouped.reshape(grouped.shape[0], kv_heads, -1, grouped.shape[3])
        for slabs in _slabs_of_product(part.segments, grouped, on_accelerator):
            of_segment: Tensor | None = None
            for slab in slabs:
                own = slab.columns_of(by_kv_head)
                if slab.padding is not None:
                    own = own.masked_fill(slab.padding, 0.0)
                found = slabs.combine(own, slab).to(sums.dtype)
                of_segment = found if of_segment is None else of_segment + found
            if of_segment is not None:
                sums = sums + part.ungrouped(torch.unflatten(slabs.restored(of_segment), 2, (-1, grouped.shape[2])))
    return sums.flatten(1, 2).to(weights.dtype)


def _slabs_of_product(segments: KVSegments, rows: Tensor, on_accelerator: bool) -> Iterator[Slabs[Any]]:
    """The slabs that queries, or weights, `[batch, heads, rows, any]` are multiplied with."""
    return (
        slabs_on_accelerator(segments, rows.dtype)
        if on_accelerator
        else slabs_on_cpu(segments, rows.shape[1] // segments.kv_heads * rows.shape[2], rows.dtype)
    )
