"""Attention to segments that several sequences share, in plain torch and on an accelerator.

Consecutive segments with the same rows are read once: the queries of all sequences that read the same sequence of them
are grouped, as if they were queries of one sequence. Attention to such parts of the tokens is merged by the log-sum-exp
of the scores, as in Hydragen (Juravsky et al. 2024, arXiv:2402.05099).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.attention import fused, reference
from kvlayers.attention.segment_rows import SegmentRows
from kvlayers.attention.segments import KVSegments, without_rows
from kvlayers.quantizers.smoothing import KeySmoothing

Compute = Callable[[KVSegments, Tensor, Tensor | None], Sequence[Tensor]]


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`."""
    on_accelerator = fused.serves(query)
    if mask is not None and on_accelerator:
        # Nothing is copied for each head if the mask is the same for all.
        mask = fused.unexpanded(mask).expand(query.shape[0], -1, query.shape[2], -1)
    attend_partly = fused.attend_partly if on_accelerator else reference.attend_partly

    def attended(part: KVSegments, rows: Tensor, rows_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return attend_partly(rows, part, rows_mask, scale)

    pairs: list[tuple[Tensor, Tensor]] = []
    for part in _parts(segments):
        out, logsumexp = part.read(query, None if mask is None else mask[..., part.tokens], attended)
        pairs.append((out, logsumexp))
    if on_accelerator:
        return fused.attend_all(pairs, mask, segments, query.dtype)
    return reference.merge(*zip(*pairs, strict=True))[0].to(query.dtype)


def scores(query: Tensor, segments: KVSegments) -> Tensor:
    """Products with all keys; arguments and result are those of `reference.scores`."""
    products_of = fused.scores if fused.serves(query) else reference.scores
    parts = [part.read(query, None, lambda part, rows, _: (products_of(rows, part),))[0] for part in _parts(segments)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Weighted sums of all values; arguments and result are those of `reference.combine`."""
    on_accelerator = fused.serves(weights)
    sums_of = fused.combine if on_accelerator else reference.combine
    # On a CPU, sums are in float32, and rounded once.
    rows = weights if on_accelerator else weights.float()
    sums = [
        part.read(rows[..., part.tokens], None, lambda part, rows, _: (sums_of(rows, part),))[0]
        for part in _parts(segments)
    ]
    return (sums[0] if len(sums) == 1 else torch.stack(sums).sum(0, dtype=torch.float32)).to(weights.dtype)


def _parts(segments: KVSegments) -> Iterator["_Part"]:
    """The segments, grouped by their rows. Empty parts are left out."""
    position = 0
    for _, group in itertools.groupby(segments.in_order, lambda segment: id(segment.rows)):
        same_rows = tuple(group)
        rows = same_rows[0].rows
        held = KVSegments(same_rows, segments.smoothing)
        if rows is not None:
            held = KVSegments(tuple(map(without_rows, same_rows)), _of_sequences(segments.smoothing, rows))
        start, position = position, position + held.tokens
        if position > start:
            yield _Part(held, rows, slice(start, position))


def _of_sequences(smoothing: KeySmoothing | None, rows: SegmentRows) -> KeySmoothing | None:
    """The smoothing of each sequence of segments, which all sequences of the batch that read it have in common."""

    def of_sequences(vectors: Tensor) -> Tensor:
        own = vectors.new_ones((rows.sequences, *vectors.shape[1:]))
        return own.index_copy_(0, rows.on(vectors.device)[0], vectors)

    return None if smoothing is None else smoothing.mapped(of_sequences)


@dataclass(frozen=True, eq=False)
class _Part:
    """Consecutive segments with the same rows.

    Attributes:
        segments: the segments, without rows.
        rows: their rows.
        tokens: their tokens among those of all segments.
    """

    segments: KVSegments
    rows: SegmentRows | None
    tokens: slice

    def read(self, queries: Tensor, mask: Tensor | None, compute: Compute) -> Sequence[Tensor]:
        """Results of `compute` for the queries, `[batch, heads, queries, any]`, of all sequences."""
        rows = self.rows
        if rows is None:
            return compute(self.segments, queries, mask)
        if rows.are_even:
            grouped_mask = None if mask is None else _group(mask, rows.sequences)
            found = compute(self.segments, _group(queries, rows.sequences), grouped_mask)
            return [_ungroup(result, len(rows)) for result in found]
        if fused.serves(queries):
            return self._read_all(rows, queries, mask, compute)
        pieces: list[Sequence[Tensor]] = []
        order: list[int] = []
        known = rows.known or ()
        for sequence in sorted(set(known)):
            members = [row for row, read in enumerate(known) if read == sequence]
            index = torch.tensor(members, device=queries.device)
            grouped_mask = None if mask is None else _group(mask.index_select(0, index), 1)
            grouped = _group(queries.index_select(0, index), 1)
            found = compute(self.segments.of_sequence(sequence), grouped, grouped_mask)
            pieces.append([_ungroup(result, len(members)) for result in found])
            order += members
        back = torch.tensor(order, device=queries.device).argsort()
        return [torch.cat(results).index_select(0, back) for results in zip(*pieces, strict=True)]

    def _read_all(self, rows: SegmentRows, queries: Tensor, mask: Tensor | None, compute: Compute) -> Sequence[Tensor]:
        """As `read`: all queries go to each sequence of the segments, and each sequence takes its own result.

        So nothing depends on rows that only the accelerator knows.
        """
        grouped = _group(queries, 1).expand(rows.sequences, -1, -1, -1)
        grouped_mask = None if mask is None else _group(mask, 1).expand(rows.sequences, -1, -1, -1)
        found = compute(self.segments, grouped, grouped_mask)
        of_rows, positions = rows.on(queries.device)
        split = [torch.unflatten(result, 2, (len(rows), queries.shape[2])) for result in found]
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
