"""The tokens that the queries of one update attend to: segments, each in full precision or packed."""

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlayers.attention.dense_segment import DenseSegment, KernelCache
from kvlayers.attention.gathered_segment import GatheredSegment
from kvlayers.attention.packed_segment import PackedSegment
from kvlayers.quantizers.contract import Side
from kvlayers.quantizers.smoothing import KeySmoothing

Segment = DenseSegment | PackedSegment | GatheredSegment


# Not frozen: each layer makes one at each step, and a frozen one takes three times as long.
@dataclass(eq=False)
class KVSegments:
    """Segments in the order of their tokens, of any kinds in any order. They are never changed.

    Attributes:
        in_order: the segments, at least one.
        smoothing: how the keys of all packed segments were smoothed, for each sequence of the batch; `None` if there is
            no such segment.
        kernel_cache: as `DenseSegment.kernel_cache`.
    """

    in_order: tuple[Segment, ...]
    smoothing: KeySmoothing | None = None
    kernel_cache: KernelCache = field(default_factory=KernelCache, init=False, repr=False)

    @property
    def are_dense(self) -> bool:
        """Whether all segments are dense: none is packed, or gathered."""
        return all(isinstance(segment, DenseSegment) for segment in self.in_order)

    @property
    def holds_packed(self) -> bool:
        """Whether a segment, or the source of one, is packed."""
        return any(map(is_packed, self.in_order))

    @property
    def holds_gathered(self) -> bool:
        """Whether there is a segment of which each head reads its own tokens."""
        return any(isinstance(segment, GatheredSegment) for segment in self.in_order)

    @property
    def with_columns(self) -> list[tuple[int, Segment]]:
        """The segments, with the column at which each begins."""
        first = itertools.accumulate((segment.tokens for segment in self.in_order), initial=0)
        return list(zip(first, self.in_order, strict=False))

    @property
    def only_dense(self) -> DenseSegment | None:
        """The segment, if there is only one, in full precision, and each sequence reads its own part of it."""
        first = self.in_order[0]
        if isinstance(first, DenseSegment) and first.rows is None and len(self.in_order) == 1:
            return first
        return None

    @property
    def shares_rows(self) -> bool:
        """Whether sequences of the batch share sequences of a segment."""
        return any(segment.rows is not None for segment in self.in_order)

    @property
    def most_readers(self) -> int:
        """Most sequences of the batch that read the same sequence of a segment."""
        return max((1 if segment.rows is None else segment.rows.most_readers) for segment in self.in_order)

    def with_prefix(self, segment: DenseSegment) -> "KVSegments":
        """The same segments with another one in front."""
        return KVSegments((segment, *self.in_order), self.smoothing)

    @property
    def tokens(self) -> int:
        """Tokens in all segments."""
        return sum(segment.tokens for segment in self.in_order)

    @property
    def batch(self) -> int:
        """Sequences side by side."""
        first = self.in_order[0]
        return first.batch if first.rows is None else len(first.rows)

    @property
    def kv_heads(self) -> int:
        """Heads that have keys and values."""
        return self.in_order[0].kv_heads

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a key, and of a value."""
        return self.in_order[0].head_dims

    @property
    def device(self) -> torch.device:
        """Device of the states."""
        first = _source(self.in_order[0])
        return first.key_slots.device if isinstance(first, DenseSegment) else first.keys.codes.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows states in full precision. Codes it never follows."""
        sources = map(_source, self.in_order)
        return any(segment.requires_grad for segment in sources if isinstance(segment, DenseSegment))

    def dense(self, side: Side, dtype: torch.dtype) -> Tensor:
        """All states of one side in full precision, `[batch, kv_heads, tokens, head_dim]`.

        Raises:
            UnsupportedLayerError: the heads of a segment hold different numbers of tokens.
        """
        parts = []
        for segment in self.in_order:
            states = segment.side(side) if isinstance(segment, DenseSegment) else segment.states(side, dtype)
            if segment.rows is not None:
                states = segment.rows.select(states)
            if side == "keys" and self.smoothing is not None and is_packed(segment):
                states = self.smoothing.restored(states)
            parts.append(states)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def is_packed(segment: Segment) -> bool:
    """Whether the states of a segment, or of its source, are packed."""
    return isinstance(_source(segment), PackedSegment)


def _source(segment: Segment) -> DenseSegment | PackedSegment:
    """The segment that holds the states."""
    return segment.source if isinstance(segment, GatheredSegment) else segment


def without_rows(segment: Segment) -> Segment:
    """The segment with as many sequences as it holds."""
    return segment if isinstance(segment, GatheredSegment) else segment.with_rows(None)
