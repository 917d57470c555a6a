"""All tokens that the queries of one update attend to: segments, each in full precision, packed, or gathered.

Of a gathered segment each KV head attends to its own tokens.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvlayers.errors import UnsupportedLayerError
from kvlayers.kernels.attention.segment_kinds import (
    DENSE_PIECE_TOKENS,
    DenseSegment,
    KernelCache,
    PackedSegment,
    SegmentRows,
)
from kvlayers.kernels.codes.quantizer_contract import Side


@dataclass(frozen=True, eq=False)
class GatheredSegment:
    """Tokens of another segment, of which each KV head of each sequence reads its own, in pieces.

    So heads may hold different tokens and different numbers of them, and a query may read a few pages of many.

    Attributes:
        source: the segment that is read. If all heads read from one flat buffer, its states are expanded: the batch and
            head strides are 0. Its `rows` say which of its sequences each sequence of the batch reads.
        starts: first token of each piece in a dense source, or the block in a packed one, int64
            `[batch, kv_heads, pieces]`. The `ends` of a packed source do not count.
        counts: tokens of each piece, int64 `[batch, kv_heads, pieces]`: 0 to `DENSE_PIECE_TOKENS` of a dense source, or
            0 to all tokens of the block, beginning with its first one that is not evicted. A piece of no token may
            start anywhere.
        columns: column of the first token of each piece, int64 `[batch, kv_heads, pieces]`. A mask has `width` columns
            for the segment, and a column that no piece covers stands for no token.
        width: columns of the segment.
        rows: `None`, as each sequence of the batch has its own pieces.
        kernel_cache: as `DenseSegment.kernel_cache`.
    """

    rows: ClassVar[SegmentRows | None] = None

    source: DenseSegment | PackedSegment
    starts: Tensor
    counts: Tensor
    columns: Tensor
    width: int
    kernel_cache: KernelCache = field(default_factory=KernelCache, init=False, repr=False)

    @property
    def tokens(self) -> int:
        """Columns of the segment, which is what a mask and a score count."""
        return self.width

    @property
    def batch(self) -> int:
        """Sequences of the batch."""
        return self.starts.shape[0]

    @property
    def kv_heads(self) -> int:
        """Heads that have keys and values."""
        return self.starts.shape[1]

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a key, and of a value."""
        return self.source.head_dims

    @property
    def held(self) -> Tensor:
        """Which columns stand for a token, bool `[batch, kv_heads, width]`."""
        held = torch.zeros((*self.starts.shape[:2], self.width + 1), dtype=torch.bool, device=self.starts.device)
        return held.scatter_(2, self._token_columns(slice(None)), True)[..., :-1]

    def padded_pieces(self, tokens: int) -> Iterator[tuple[DenseSegment | PackedSegment, Tensor]]:
        """The pieces of all heads, a few of each head at a time, side by side and padded to the most tokens of a piece.

        Beside them is the column of each token among those of the segment, int64 `[batch, kv_heads, tokens]`; it is
        `width` if the token is padding.

        Args:
            tokens: about so many tokens at a time, or one piece.
        """
        size = DENSE_PIECE_TOKENS if isinstance(self.source, DenseSegment) else self.source.keys.layout.block_tokens
        step = max(tokens // size, 1)
        for first in range(0, self.starts.shape[2] if self.source.tokens and self.width else 0, step):
            some = slice(first, first + step)
            columns = self._token_columns(some)
            starts = torch.where(self.counts[..., some] > 0, self.starts[..., some], 0)
            if isinstance(self.source, DenseSegment):
                tokens_of = (starts[..., None] + torch.arange(size, device=starts.device)).flatten(2)
                starts = torch.where(columns < self.width, tokens_of, 0)
            yield _chosen(self.source, starts), columns

    def _token_columns(self, some: slice) -> Tensor:
        """Column of each token of padded pieces, int64 `[batch, kv_heads, tokens]`: `width` if it is not read."""
        starts, counts, columns = self.starts[..., some], self.counts[..., some], self.columns[..., some]
        size, evicted = DENSE_PIECE_TOKENS, 0
        if isinstance(self.source, PackedSegment):
            size, evicted = self.source.keys.layout.block_tokens, self.source.first
        token = torch.arange(size, device=starts.device).expand(*starts.shape, size)
        if evicted:
            token = token - torch.where(starts == 0, evicted, 0)[..., None]
        is_read = (token >= 0) & (token < counts[..., None])
        return torch.where(is_read, columns[..., None] + token, self.width).flatten(2)

    def states(self, side: Side, dtype: torch.dtype) -> Tensor:
        """States of one side, `[batch, kv_heads, width, head_dim]` of a dtype, rotated back.

        Raises:
            UnsupportedLayerError: a head has fewer tokens than there are columns.
        """
        if not bool(self.held.all()):
            raise UnsupportedLayerError(UNEVEN_HEADS)
        return self.padded_states(side, dtype)

    def padded_states(self, side: Side, dtype: torch.dtype) -> Tensor:
        """As `states`, with zeros in the columns that stand for no token."""
        head_dim = self.head_dims[0 if side == "keys" else 1]
        states = torch.zeros((*self.starts.shape[:2], self.width + 1, head_dim), dtype=dtype, device=self.starts.device)
        for padded, columns in self.padded_pieces(self.width):
            found = padded.states(side, dtype)
            states.scatter_(2, columns[..., None].expand(-1, -1, -1, head_dim), found)
        return states[:, :, :-1]


UNEVEN_HEADS = (
    "These KV heads hold different numbers of tokens, which no tensor in full precision can have: use the attention "
    "implementation 'sdpa', 'eager' or 'kvlayers' without gradients (torch.no_grad()) and without dropout, or a cache "
    "whose heads hold as many tokens each (per_head=False)."
)


def _chosen(source: DenseSegment | PackedSegment, index: Tensor) -> DenseSegment | PackedSegment:
    """Tokens, or blocks, of each head, at int64 `[batch, kv_heads, any]`."""
    batch, kv_heads, _ = index.shape
    own = torch.arange(batch, device=index.device) if source.rows is None else source.rows.on(index.device)[0]
    at = own[:, None, None], torch.arange(kv_heads, device=index.device)[None, :, None], index
    return with_full_blocks(source.with_tensors(states[at] for states in source.tensors).with_rows(None))


def with_full_blocks(segment: DenseSegment | PackedSegment) -> DenseSegment | PackedSegment:
    """The segment with all tokens of each of its blocks, if it is packed."""
    return replace(segment, first=0, ends=None) if isinstance(segment, PackedSegment) else segment


Segment = DenseSegment | PackedSegment | GatheredSegment


# Not frozen: each layer makes one at each step, and a frozen one takes three times as long.
@dataclass(eq=False)
class KVSegments:
    """Segments in the order of their tokens, of any kinds in any order. They are never changed.

    Attributes:
        in_order: the segments, at least one.
        kernel_cache: as `DenseSegment.kernel_cache`.
    """

    in_order: tuple[Segment, ...]
    kernel_cache: KernelCache = field(default_factory=KernelCache, init=False, repr=False)

    @property
    def are_dense(self) -> bool:
        """Whether all segments are dense: none is packed, or gathered."""
        return all(isinstance(segment, DenseSegment) for segment in self.in_order)

    @property
    def holds_packed(self) -> bool:
        """Whether a segment, or the source of one, is packed."""
        return any(isinstance(segment.source, PackedSegment) for segment in self.in_order)

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
        first = self.in_order[0].source
        return first.key_slots.device if isinstance(first, DenseSegment) else first.keys.codes.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows states in full precision. Codes it never follows."""
        sources = (segment.source for segment in self.in_order)
        return any(
            states.requires_grad
            for source in sources
            if isinstance(source, DenseSegment)
            for states in (source.key_slots, source.value_slots)
        )

    def in_full_precision(self, dtype: torch.dtype) -> tuple["KVSegments", Tensor | None]:
        """The tokens as dense segments, and which of them each KV head has, bool `[batch, kv_heads, tokens]`.

        What is packed is unpacked once for all sequences that read it. The second is `None` if all heads have all.
        """
        dense = KVSegments(tuple(_in_full_precision(segment, dtype) for segment in self.in_order))
        if not self.holds_gathered:
            return dense, None
        held = [
            segment.held
            if isinstance(segment, GatheredSegment)
            else torch.ones((self.batch, self.kv_heads, segment.tokens), dtype=torch.bool, device=self.device)
            for segment in self.in_order
        ]
        return dense, torch.cat(held, dim=2)

    def dense(self, side: Side, dtype: torch.dtype) -> Tensor:
        """All states of one side in full precision, `[batch, kv_heads, tokens, head_dim]`.

        Raises:
            UnsupportedLayerError: the heads of a segment hold different numbers of tokens.
        """
        parts = [_of_batch(segment, side, segment.states(side, dtype)) for segment in self.in_order]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _in_full_precision(segment: Segment, dtype: torch.dtype) -> DenseSegment:
    """The segment, unpacked once for all sequences that read it, unless each of them has a smoothing of its own."""
    if isinstance(segment, DenseSegment):
        return segment
    states_of = segment.padded_states if isinstance(segment, GatheredSegment) else segment.states
    keys, values = states_of("keys", dtype), states_of("values", dtype)
    if not segment.source.smoothing.state():
        return DenseSegment(keys, values, segment.rows)
    return DenseSegment(_of_batch(segment, "keys", keys), _of_batch(segment, "values", values))


def _of_batch(segment: Segment, side: Side, states: Tensor) -> Tensor:
    """States of a segment's sequences, for each sequence of the batch, as they were before keys were smoothed."""
    states = states if segment.rows is None else segment.rows.select(states)
    return states if side == "values" else segment.source.smoothing.restored(states)
