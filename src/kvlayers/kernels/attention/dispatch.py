"""Chooses the kernel that attention on key-value segments runs on, and counts the choices.

In plain torch and on an accelerator, consecutive segments with the same rows are read once: the queries of all
sequences that read the same sequence of them are grouped, as if they were queries of one sequence. Attention to such
parts of the tokens is merged by the log-sum-exp of the scores, as in Hydragen (Juravsky et al. 2024, arXiv:2402.05099).
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvlayers.kernels.attention import fused, reference
from kvlayers.kernels.attention.cpu import kernel as cpu_kernel
from kvlayers.kernels.attention.cuda import kernel as cuda_kernel
from kvlayers.kernels.attention.gqa import attend_dense
from kvlayers.kernels.attention.segment_kinds import PackedSegment, SegmentRows
from kvlayers.kernels.attention.segments import KVSegments, Segment, without_rows
from kvlayers.upstream.callers import running_attention_implementation, warn_the_caller
from kvlayers.utils.transforms import without_autocast

CPU = "a compiled kernel on segments"
MANY = "a compiled kernel for many queries"
CUDA = "a Triton kernel on segments"
BLOCKS = "plain torch, block by block"
COPY = "torch's attention on a copy of segments"
SLABS = "slab by slab"
SHARED = "shared segments once for all sequences"
"""Paths on which no state is brought to full precision for longer than it is used."""

PRODUCT = "no kernel takes a single product of eager attention"


READ_AS_HELD = ("sdpa", "eager", "kvlayers")
"""The attention implementations that read codes, and a prefix that sequences share, as they are held."""

Compute = Callable[[Tensor, KVSegments, Tensor | None], Sequence[Tensor]]

_warned: set[str] = set()


class PathCounter:
    """Counts which path attention on the states of a store took.

    Attributes:
        counts: how often each path was taken, by its description.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def record(self, path: str) -> None:
        """Count one more call on this path."""
        self.counts[path] += 1

    def note_dense_read(self, path: str) -> None:
        """Count that states are read in full precision.

        It warns once in a process for each `attn_implementation` of models that cannot do otherwise.

        Args:
            path: what reads the states, and why not as they are held.
        """
        if path not in self.counts:
            name = running_attention_implementation()
            if name is not None and name not in (*READ_AS_HELD, *_warned):
                _warned.add(name)
                warn_the_caller(
                    f"The attention {name!r} reads states in full precision only. So at every step each layer of this "
                    "cache copies all of its states to full precision, which is slower than a DynamicCache and takes "
                    "the memory of one layer's copy. Use model.set_attn_implementation('sdpa'), or 'kvlayers' after "
                    "kvlayers.install(): both read the states as the cache holds them."
                )
        self.record(path)


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float | None, paths: PathCounter) -> Tensor:
    """Softmax attention of queries to the tokens of segments.

    Args:
        query: `[batch, heads, queries, key_head_dim]`, heads a multiple of the segments' kv_heads.
        segments: the keys and values.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(key_head_dim)` if `None`.
        paths: counts the path that is taken.

    Returns:
        `[batch, heads, queries, value_head_dim]` in the dtype of the query.
    """
    batch, heads, queries, head_dim = query.shape
    if mask is not None:
        mask = mask.expand(batch, heads, queries, segments.tokens)
    # Torch takes a tensor for a number, and a kernel would take it for an address.
    scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    if query.is_cpu and not fused.INTERPRETED:
        return _attend_on_cpu(query, segments, mask, scale, paths)
    by_torch = functools.partial(attend_shared if segments.shares_rows else fused.attend, query, segments, mask, scale)
    with without_autocast(query.device):
        found, why = cuda_kernel.attend_or_why(query, segments, mask, scale, by_torch)
        shared = SHARED if segments.shares_rows else SLABS
        paths.record(CUDA if why is None else f"{fused.description(query, segments)}, {shared}, as {why}")
        return by_torch() if found is None else found


def _attend_on_cpu(
    query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float, paths: PathCounter
) -> Tensor:
    obstacle = cpu_kernel.obstacle(query, segments)
    if obstacle is None:
        paths.record(CPU)
        return cpu_kernel.attend(query, segments, mask, scale)
    with without_autocast(query.device):
        if cpu_kernel.takes_many(query, segments):
            paths.record(f"{MANY}, as {obstacle}")
            return cpu_kernel.attend_many(query, segments, mask, scale)
        if _copying_pays(query, segments):
            paths.record(f"{COPY}, as {obstacle}")
            keys, values = segments.dense("keys", query.dtype), segments.dense("values", query.dtype)
            return attend_dense(query, keys, values, mask, False, scale)
        shares = segments.shares_rows
        paths.record(f"{SHARED if shares else BLOCKS}, as {obstacle}")
        return (attend_shared if shares else reference.attend)(query, segments, mask, scale)


def _copying_pays(query: Tensor, segments: KVSegments) -> bool:
    """Whether torch's attention on a copy of all states takes less time than a few of them at once in float32.

    It is slow for a single query of bfloat16, for any number of float16, and keeps all scores if head_dims differ.
    """
    if query.dtype == torch.float16 or segments.shares_rows or segments.holds_gathered:
        return False
    if segments.are_dense:
        return query.shape[2] > 1
    return query.shape[2] > cpu_kernel.CPU_MAXIMUM_QUERIES and len(set(segments.head_dims)) == 1


def scores(query: Tensor, segments: KVSegments, paths: PathCounter) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`."""
    with without_autocast(query.device):
        if _are_compiled(query, segments, paths):
            return cpu_kernel.scores(query, segments)
        parts = _parts(segments, fused.serves(query))
        found = [
            _read(part, rows, query, None, lambda queries, held, _: (reference.scores(queries, held),))[0]
            for part, rows, _ in parts
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=3)


def combine(weights: Tensor, segments: KVSegments, paths: PathCounter) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`."""
    with without_autocast(weights.device):
        if _are_compiled(weights, segments, paths):
            return cpu_kernel.combine(weights, segments)
        on_accelerator = fused.serves(weights)
        # On a CPU, sums are in float32, and rounded once.
        exact = weights if on_accelerator else weights.float()
        parts = _parts(segments, on_accelerator)
        sums = [
            _read(part, rows, exact[..., columns], None, lambda some, held, _: (reference.combine(some, held),))[0]
            for part, rows, columns in parts
        ]
        return (sums[0] if len(sums) == 1 else torch.stack(sums).sum(0, dtype=torch.float32)).to(weights.dtype)


def _are_compiled(queries: Tensor, segments: KVSegments, paths: PathCounter) -> bool:
    """Whether the compiled kernel takes a product of eager attention with queries, or weights. The path is counted."""
    shares = segments.shares_rows
    if fused.serves(queries):
        paths.record(f"{fused.PLAIN}, {SHARED}" if shares else f"{fused.PLAIN}, {SLABS}, as {PRODUCT}")
        return False
    obstacle = cpu_kernel.obstacle(queries, segments)
    paths.record(CPU if obstacle is None else f"{SHARED if shares else BLOCKS}, as {obstacle}")
    return obstacle is None


def attend_shared(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention, if sequences share segments; arguments and result are those of `reference.attend`."""
    on_accelerator = fused.serves(query)
    if mask is not None and on_accelerator:
        # Nothing is copied for each head if the mask is the same for all.
        mask = fused.unexpanded(mask).expand(query.shape[0], -1, query.shape[2], -1)
    attended = functools.partial(fused.attend_partly if on_accelerator else reference.attend_partly, scale=scale)
    pairs = [
        _read(part, rows, query, None if mask is None else mask[..., columns], attended)
        for part, rows, columns in _parts(segments, on_accelerator)
    ]
    if on_accelerator:
        return fused.attend_all(pairs, mask, segments, query.dtype)
    return reference.merge(*zip(*pairs, strict=True))[0].to(query.dtype)


def _parts(segments: KVSegments, on_accelerator: bool) -> Iterator[tuple[KVSegments, SegmentRows | None, slice]]:
    """Consecutive segments with the same rows: without these, the rows, and their columns. Empty parts are left out.

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
            yield held, rows, slice(start, position)


def _of_sequences(segment: Segment, rows: SegmentRows) -> Segment:
    """A segment without rows, smoothed as all sequences of the batch that read one of its sequences have in common."""

    def of_sequences(vectors: Tensor) -> Tensor:
        own = vectors.new_ones((rows.sequences, *vectors.shape[1:]))
        return own.index_copy_(0, rows.on(vectors.device)[0], vectors)

    segment = without_rows(segment)
    if not isinstance(segment, PackedSegment) or segment.smoothing is None:
        return segment
    return replace(segment, smoothing=segment.smoothing.mapped(of_sequences))


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
