"""Tokens of which each KV head attends to its own."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvlayers.attention.dense_segment import DENSE_PIECE_TOKENS, DenseSegment, KernelCache
from kvlayers.attention.packed_segment import PackedSegment
from kvlayers.attention.piece_columns import PieceColumns
from kvlayers.attention.segment_rows import SegmentRows
from kvlayers.errors import UnsupportedLayerError
from kvlayers.quantizers.contract import Side


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
        kernel_cache: as `DenseSegment.kernel_cache`.
    """

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
    def rows(self) -> SegmentRows | None:
        """`None`: each sequence of the batch has its own pieces."""
        return None

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

    def padded_pieces(self, tokens: int) -> Iterator[tuple[DenseSegment | PackedSegment, PieceColumns]]:
        """The pieces of all heads, a few of each head at a time, side by side and padded to the most tokens of a piece.

        Args:
            tokens: about so many tokens at a time, or one piece.
        """
        size = DENSE_PIECE_TOKENS if isinstance(self.source, DenseSegment) else self.source.keys.block_tokens
        step = max(tokens // size, 1)
        for first in range(0, self.starts.shape[2] if self.source.tokens and self.width else 0, step):
            some = slice(first, first + step)
            columns = self._token_columns(some)
            starts = torch.where(self.counts[..., some] > 0, self.starts[..., some], 0)
            if isinstance(self.source, DenseSegment):
                tokens_of = (starts[..., None] + torch.arange(size, device=starts.device)).flatten(2)
                starts = torch.where(columns < self.width, tokens_of, 0)
            yield _chosen(self.source, starts), PieceColumns(columns, self.width)

    def _token_columns(self, some: slice) -> Tensor:
        """Column of each token of padded pieces, int64 `[batch, kv_heads, tokens]`: `width` if it is not read."""
        starts, counts, columns = self.starts[..., some], self.counts[..., some], self.columns[..., some]
        size, evicted = DENSE_PIECE_TOKENS, 0
        if isinstance(self.source, PackedSegment):
            size, evicted = self.source.keys.block_tokens, self.source.first
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
        head_dim = self.head_dims[0 if side == "keys" else 1]
        shape = (*self.starts.shape[:2], self.width + 1, head_dim)
        states = torch.empty(shape, dtype=dtype, device=self.starts.device)
        for padded, columns in self.padded_pieces(self.width):
            found = padded.side(side) if isinstance(padded, DenseSegment) else padded.states(side, dtype)
            states.scatter_(2, columns.of_tokens[..., None].expand(-1, -1, -1, head_dim), found.to(dtype))
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
