"""Attention to segments that several sequences share, in plain torch and on an accelerator.

Consecutive segments with the same rows are read once: the queries of all sequences that read the same sequence of them
are grouped, as if they were queries of one sequence. Attention to such parts of the tokens is merged by the log-sum-exp
of the scores, as in Hydragen (Juravsky et al. 2024, arXiv:2402.05099).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvlayers.kernels.attention import fused, reference
from kvlayers.kernels.attention.segment_kinds import SegmentRows
from kvlayers.kernels.attention.segments import KVSegments, without_rows
from kvlayers.kernels.codes.smoothing import KeySmoothing

Compute = Callable[[Tensor, KVSegments, Tensor | None], Sequence[Tensor]]


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`."""
    on_accelerator = fused.serves(query)
    if mask is not None and on_accelerator:
        # Nothing is copied for each head if the mask is the same for all.
        mask = fused.unexpanded(mask).expand(query.shape[0], -1, query.shape[2], -1)
    attend_partly = fused.attend_partly if on_accelerator else reference.attend_partly

    def attended(rows: Tensor, part: KVSegments, rows_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return attend_partly(rows, part, rows_mask, scale)

    pairs: list[tuple[Tensor, Tensor]] = []
    for part, rows, columns in _parts(segments, on_accelerator):
        out, logsumexp = _read(part, rows, query, None if mask is None else mask[..., columns], attended)
        pairs.append((out, logsumexp))
    if on_accelerator:
        return fused.attend_all(pairs, mask, segments, query.dtype)
    return reference.merge(*zip(*pairs, strict=True))[0].to(query.dtype)


def scores(query: Tensor, segments: KVSegments) -> Tensor:
    """Products with all keys; arguments and result are those of `reference.scores`."""

    def products(rows: Tensor, part: KVSegments, _: Tensor | None) -> tuple[Tensor]:
        return (reference.scores(rows, part),)

    parts = _parts(segments, fused.serves(query))
    found = [_read(part, rows, query, None, products)[0] for part, rows, _ in parts]
    return found[0] if len(found) == 1 else torch.cat(found, dim=3)


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Weighted sums of all values; arguments and result are those of `reference.combine`."""

    def summed(rows: Tensor, part: KVSegments, _: Tensor | None) -> tuple[Tensor]:
        return (reference.combine(rows, part),)

    on_accelerator = fused.serves(weights)
    # On a CPU, sums are in float32, and rounded once.
    exact = weights if on_accelerator else weights.float()
    parts = _parts(segments, on_accelerator)
    sums = [_read(part, rows, exact[..., columns], None, summed)[0] for part, rows, columns in parts]
    return (sums[0] if len(sums) == 1 else torch.stack(sums).sum(0, dtype=torch.float32)).to(weights.dtype)


def _parts(segments: KVSegments, on_accelerator: bool) -> Iterator[tuple[KVSegments, SegmentRows | None, slice]]:
    """Consecutive segments with the same rows: without these, the rows, and their columns. Empty parts are left out.

    On a CPU segments keep uneven rows: each sequence of the batch then reads its own copy of a few tokens at a time.
    """
    position = 0
    for _, group in itertools.groupby(segments.in_order, lambda segment: id(segment.rows)):
        same_rows = tuple(group)
        rows = same_rows[0].rows
        if rows is None or not (rows.are_even or on_accelerator):
            held, rows = KVSegments(same_rows, segments.smoothing), None
        else:
            held = KVSegments(tuple(map(without_rows, same_rows)), _of_sequences(segments.smoothing, rows))
        start, position = position, position + held.tokens
        if position > start:
            yield held, rows, slice(start, position)


def _of_sequences(smoothing: KeySmoothing | None, rows: SegmentRows) -> KeySmoothing | None:
    """The smoothing of each sequence of segments, which all sequences of the batch that read it have in common."""

    def of_sequences(vectors: Tensor) -> Tensor:
        own = vectors.new_ones((rows.sequences, *vectors.shape[1:]))
        return own.index_copy_(0, rows.on(vectors.device)[0], vectors)

    return None if smoothing is None else smoothing.mapped(of_sequences)


def _read(
    part: KVSegments, rows: SegmentRows | None, queries: Tensor, mask: Tensor | None, compute: Compute
) -> Sequence[Tensor]:
    """Results of `compute` for the queries, `[batch, heads, queries, any]`, of all sequences.

    If rows are uneven, all queries go to each sequence of the segments, and each sequence takes its own result. So
    nothing depends on rows that only the accelerator knows.
    """
    if rows is None:
        return compute(queries, part, mask)
    if rows.are_even:
        grouped_mask = None if mask is None else _group(mask, rows.sequences)
        found = compute(_group(queries, rows.sequences), part, grouped_mask)
        return [_ungroup(result, len(rows)) for result in found]
    grouped = _group(queries, 1).expand(rows.sequences, -1, -1, -1)
    grouped_mask = None if mask is None else _group(mask, 1).expand(rows.sequences, -1, -1, -1)
    of_rows, positions = rows.on(queries.device)
    split = [torch.unflatten(one, 2, (len(rows), queries.shape[2])) for one in compute(grouped, part, grouped_mask)]
    return [result.transpose(1, 2)[of_rows, positions] for result in split]


def _group(rows: Tensor, sequences: int) -> Tensor:
    """Rows `[sequences * sharing, heads, queries, any]` as `[sequences, heads, sharing * queries, any]`."""
    batch, heads, queries, width = rows.shape
    sharing = batch // sequences
    grouped = rows.reshape(sequences, sharing, heads, queries, width).transpose(1, 2)
    return grouped.reshape(sequences, heads, sharing * queries, width)


def _ungroup(result: Tensor, batch: int) -> Tensor:
    """Split the results of grouped queries back into sequences. Inverse of `_group`."""
    sequences, heads, rows, *rest = result.shape
    sharing = batch // sequences
    queries = rows // sharing
    split = result.reshape(sequences, heads, sharing, queries, *rest).transpose(1, 2)
    return split.reshape(batch, heads, queries, *rest)
