"""The tokens that the queries of one update attend to: segments, each in full precision or packed."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.piece_columns import PieceColumns
from kvlayers.attention.segment_rows import SegmentRows
from kvlayers.errors import UnsupportedLayerError
from kvlayers.quantizers.contract import Side
from kvlayers.quantizers.packed_side import PackedSide


class KernelCache(dict[str, Any]):
    """Arguments that kernels have prepared for a segment and may use again, by the kernel's name.

    A copy of the segment has other addresses, so the cache of a copy is empty.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "KernelCache":
        return KernelCache()

    def __reduce__(self) -> tuple[type["KernelCache"], tuple[()]]:
        return KernelCache, ()


class DenseSegment:
    """Tokens in full precision, in all slots of two tensors or in some. It is never changed.

    Views of some slots are made when something reads them. The CPU kernel needs addresses alone, and a view for each
    layer and token would take a tenth of the time of its Python code.

    Args:
        key_slots: `[batch, kv_heads, slots, key_head_dim]`.
        value_slots: `[batch, kv_heads, slots, value_head_dim]`.
        rows: see the attributes.
        start: first slot of the segment.
        tokens: slots of the segment; all of them if it is not given.

    Attributes:
        key_slots: the slots that hold the keys.
        value_slots: the slots that hold the values.
        rows: which sequence of the segment each sequence of the batch reads; `None` if each reads its own.
        start: first slot of the segment.
        kernel_cache: what kernels have prepared for the segment.
    """

    def __init__(
        self,
        key_slots: Tensor,
        value_slots: Tensor,
        rows: SegmentRows | None = None,
        start: int = 0,
        tokens: int | None = None,
    ) -> None:
        self.key_slots = key_slots
        self.value_slots = value_slots
        self.rows = rows
        self.start = start
        self.kernel_cache = KernelCache()
        self._tokens = tokens
        self._states = (key_slots, value_slots) if tokens is None else None

    @property
    def tokens(self) -> int:
        """Tokens in the segment."""
        return int(self.key_slots.shape[2]) if self._tokens is None else self._tokens

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The keys and the values, `[batch, kv_heads, tokens, head_dim]`."""
        if self._states is None:
            slots = self.key_slots, self.value_slots
            keys, values = (states.narrow(2, self.start, self.tokens) for states in slots)
            self._states = keys, values
        return self._states

    @property
    def keys(self) -> Tensor:
        """The keys, `[batch, kv_heads, tokens, key_head_dim]`."""
        return self.tensors[0]

    @property
    def values(self) -> Tensor:
        """The values, `[batch, kv_heads, tokens, value_head_dim]`."""
        return self.tensors[1]

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows the keys or the values."""
        return self.key_slots.requires_grad or self.value_slots.requires_grad

    @property
    def batch(self) -> int:
        """Sequences of the segment."""
        return self.key_slots.shape[0]

    @functools.cached_property
    def kv_heads(self) -> int:
        """Heads that have keys and values."""
        return self.key_slots.shape[1]

    @functools.cached_property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a key, and of a value."""
        return self.key_slots.shape[3], self.value_slots.shape[3]

    def side(self, side: Side) -> Tensor:
        """Keys or values."""
        return self.keys if side == "keys" else self.values

    def with_tensors(self, tensors: Iterable[Tensor]) -> "DenseSegment":
        """The segment with other `tensors`, in the same order."""
        keys, values = tensors
        return DenseSegment(keys, values, self.rows)

    def with_rows(self, rows: SegmentRows | None) -> "DenseSegment":
        """The segment with other `rows`."""
        return DenseSegment(self.key_slots, self.value_slots, rows, self.start, self._tokens)


@dataclass(frozen=True, eq=False)
class PackedSegment:
    """Tokens in packed blocks, not all of which need be full.

    Attributes:
        keys: packed keys.
        values: packed values.
        first: tokens at the beginning of the first block that have been evicted.
        ends: for each block the tokens that it holds, counted from its beginning; `None` if all are full.
        rows: as `DenseSegment.rows`.
        kernel_cache: as `DenseSegment.kernel_cache`.
    """

    keys: PackedSide
    values: PackedSide
    first: int = 0
    ends: tuple[int, ...] | None = None
    rows: SegmentRows | None = None
    kernel_cache: KernelCache = field(default_factory=KernelCache, init=False, repr=False)

    @property
    def batch(self) -> int:
        """Sequences of the segment."""
        return self.keys.codes.shape[0]

    @functools.cached_property
    def kv_heads(self) -> int:
        """Heads that have keys and values."""
        return self.keys.codes.shape[1]

    @functools.cached_property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a key, and of a value."""
        return self.keys.head_dim, self.values.head_dim

    @property
    def blocks(self) -> int:
        """Blocks in the segment."""
        return int(self.keys.codes.shape[2])

    @property
    def tokens(self) -> int:
        """Tokens in the segment."""
        held = self.blocks * self.keys.block_tokens if self.ends is None else sum(self.ends)
        return held - self.first

    def side(self, side: Side) -> PackedSide:
        """Keys or values."""
        return self.keys if side == "keys" else self.values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes and parameters of the keys, and of the values, `[batch, kv_heads, blocks, ...]`."""
        return self.keys.codes, self.keys.parameters, self.values.codes, self.values.parameters

    def with_tensors(self, tensors: Iterable[Tensor]) -> "PackedSegment":
        """The segment with other `tensors`, in the same order."""
        key_codes, key_parameters, codes, parameters = tensors
        keys = replace(self.keys, codes=key_codes, parameters=key_parameters)
        return replace(self, keys=keys, values=replace(self.values, codes=codes, parameters=parameters))

    def with_rows(self, rows: SegmentRows | None) -> "PackedSegment":
        """The segment with other `rows`."""
        return replace(self, rows=rows)

    def pieces(self, blocks: int) -> Iterator["PackedSegment"]:
        """The segment in pieces of at most `blocks` blocks."""
        for start in range(0, self.blocks, blocks):
            some = slice(start, start + blocks)
            piece = self.with_tensors(states[:, :, some] for states in self.tensors)
            first = self.first if start == 0 else 0
            yield replace(piece, first=first, ends=None if self.ends is None else self.ends[some], rows=None)

    def dequantized(self, side: Side) -> Tensor:
        """States of one side, float32 `[batch, kv_heads, tokens, head_dim]`, still rotated if they were packed so."""
        return self._held(self.side(side).dequantized())

    def states(self, side: Side, dtype: torch.dtype) -> Tensor:
        """States of one side, `[batch, kv_heads, tokens, head_dim]` of a dtype, rotated back."""
        return self._held(self.side(side).states(dtype))

    def _held(self, states: Tensor) -> Tensor:
        """The states of held tokens, among those of whole blocks."""
        if self.ends is None:
            return states[:, :, self.first :]
        runs = [[self.first, 0]]
        for block, end in enumerate(self.ends):
            start = block * self.keys.block_tokens
            if block and runs[-1][1] != start:
                runs.append([start, start])
            runs[-1][1] = start + end
        held = [states[:, :, start:end] for start, end in runs]
        return held[0] if len(held) == 1 else torch.cat(held, 2)


DENSE_PIECE_TOKENS = 64
"""Most tokens of a piece of a dense segment: what kernels read at once."""


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
        return any(isinstance(_source(segment), PackedSegment) for segment in self.in_order)

    @property
    def gathered(self) -> list[tuple[int, GatheredSegment]]:
        """The segments of which each head reads its own tokens, with the column at which each begins."""
        first = itertools.accumulate((segment.tokens for segment in self.in_order), initial=0)
        pairs = zip(first, self.in_order, strict=False)
        return [(column, segment) for column, segment in pairs if isinstance(segment, GatheredSegment)]

    @property
    def only_dense(self) -> DenseSegment | None:
        """The segment, if there is only one, in full precision, and each sequence reads its own part of it."""
        first = self.in_order[0]
        is_only = len(self.in_order) == 1 and isinstance(first, DenseSegment) and first.rows is None
        return first if is_only and isinstance(first, DenseSegment) else None

    @property
    def shares_rows(self) -> bool:
        """Whether sequences of the batch share sequences of a segment."""
        return any(segment.rows is not None for segment in self.in_order)

    @property
    def most_readers(self) -> int:
        """Most sequences of the batch that read the same sequence of a segment."""
        return max((1 if segment.rows is None else segment.rows.most_readers) for segment in self.in_order)

    def of_sequence(self, index: int) -> "KVSegments":
        """The segments of one sequence, a batch of one. The host must know their rows."""
        return KVSegments(tuple(_of_sequence(segment, index) for segment in self.in_order))

    def with_prefix(self, segment: DenseSegment) -> "KVSegments":
        """The same segments with another one in front."""
        return KVSegments((segment, *self.in_order))

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
            parts.append(states if segment.rows is None else states.index_select(0, segment.rows.on(states.device)[0]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _source(segment: Segment) -> DenseSegment | PackedSegment:
    """The segment that holds the states."""
    return segment.source if isinstance(segment, GatheredSegment) else segment


def without_rows(segment: Segment) -> Segment:
    """The segment with as many sequences as it holds."""
    return segment if isinstance(segment, GatheredSegment) else segment.with_rows(None)


def _of_sequence(segment: Segment, index: int) -> Segment:
    if isinstance(segment, GatheredSegment):
        raise ValueError("the sequences of a gathered segment are not shared: read all of them.")
    if segment.rows is not None:
        if segment.rows.known is None:
            raise ValueError("index must be that of a sequence whose rows the host knows: read all sequences.")
        index = segment.rows.known[index]
    one = slice(index, index + 1)
    return segment.with_tensors(states[one] for states in segment.tensors).with_rows(None)
