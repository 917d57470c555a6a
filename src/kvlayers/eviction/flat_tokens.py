"""The flat part of a ragged store: one head behind another, and tables of the pieces of each head."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.buffer import StateForm
from kvlayers.core.dense_store import DenseStore, without_spare_room
from kvlayers.core.token_store import BufferSwap, KVPair
from kvlayers.errors import StateMismatchError
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS, DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import GatheredSegment, smoothing_of
from kvlayers.kernels.codes.smoothing import KeySmoothing
from kvlayers.quantized.packed_blocks import PackedBlocks


@dataclass(frozen=True, eq=False)
class PieceTables:
    """The pieces of each KV head of each sequence, in the order of their tokens.

    The tokens of a head are right-aligned: its last token is in the last column.

    Attributes:
        starts: where each piece is in the flat part, int64 `[batch, kv_heads, pieces]`: its first token in a dense
            part, or its block in a packed one.
        counts: tokens of each piece, int64 `[batch, kv_heads, pieces]`; 0 behind the last piece of a head.
        columns: column of the first token of each piece, int64 `[batch, kv_heads, pieces]`.
        width: columns of the flat part, at least the most tokens of any head.
    """

    starts: Tensor
    counts: Tensor
    columns: Tensor
    width: int

    @classmethod
    def of_pieces(cls, starts: Tensor, counts: Tensor, width: int | None = None) -> Self:
        """Tables of pieces whose `starts` and `counts` are known, with the fewest columns if no width is given."""
        ends = counts.cumsum(2)
        tokens = ends[:, :, -1:]
        if width is None:
            width = int(tokens.max())
        columns = torch.where(counts > 0, width - tokens + ends - counts, 0)
        return cls(starts, counts, columns, width)

    @classmethod
    def of_heads(cls, tokens: Tensor, piece_tokens: int) -> Self:
        """Tables of heads one behind the other.

        Args:
            tokens: tokens of each head, int64 `[batch, kv_heads]` on the host. At least one head has a token.
            piece_tokens: most tokens of a piece.
        """
        before = tokens.flatten().cumsum(0).view_as(tokens) - tokens
        skipped = torch.arange(0, int(tokens.max()), piece_tokens)
        counts = (tokens[:, :, None] - skipped).clamp(0, piece_tokens)
        return cls.of_pieces(torch.where(counts > 0, before[:, :, None] + skipped, 0), counts)

    @property
    def tokens(self) -> Tensor:
        """Tokens of each head, int64 `[batch, kv_heads]`."""
        return self.counts.sum(2)

    def on(self, device: torch.device) -> Self:
        """The tables on a device."""
        starts, counts, columns = (table.to(device) for table in (self.starts, self.counts, self.columns))
        return replace(self, starts=starts, counts=counts, columns=columns)

    def selected(self, indices: Tensor) -> Self:
        """The tables of the sequences at `indices`, int64 `[new_batch]`."""
        indices = indices.to(self.starts.device)
        starts, counts, columns = (table.index_select(0, indices) for table in self.held_tensors())
        return replace(self, starts=starts, counts=counts, columns=columns)

    def expanded(self, repeats: int) -> Self:
        """The tables if each sequence is repeated `repeats` times in a row."""
        starts, counts, columns = (table.repeat_interleave(repeats, 0) for table in self.held_tensors())
        return replace(self, starts=starts, counts=counts, columns=columns)

    def columns_of(self, piece_tokens: int, step: int) -> tuple[Tensor, Tensor]:
        """What is in each column.

        Args:
            piece_tokens: most tokens of a piece.
            step: tokens of the flat part from one start to the next.

        Returns:
            The token of the flat part, and the number of the piece, both int64 `[batch, kv_heads, width]`, and -1 in
            columns without a token.
        """
        within = torch.arange(piece_tokens, device=self.starts.device)
        is_token = within < self.counts[..., None]
        # Whatever is no token goes to one more column, which is cut off.
        columns = torch.where(is_token, self.columns[..., None] + within, self.width).flatten(2)
        tokens = (self.starts[..., None] * step + within).flatten(2)
        pieces = torch.arange(self.counts.shape[2], device=tokens.device).repeat_interleave(piece_tokens)
        found = tokens.new_full((2, *tokens.shape[:2], self.width + 1), -1)
        found[0].scatter_(2, columns, tokens)
        found[1].scatter_(2, columns, pieces.expand_as(columns))
        return found[0][..., :-1], found[1][..., :-1]

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """Copies from which the tables can be made again, by `TABLE_NAMES`."""
        tables = (self.starts, self.counts)
        return {name: table.to(device, copy=True) for name, table in zip(TABLE_NAMES, tables, strict=True)}

    def held_tensors(self) -> Iterator[Tensor]:
        """The tables."""
        yield from (self.starts, self.counts, self.columns)

    def compacted(self) -> tuple[Self, Tensor, Tensor]:
        """Tables of a dense flat part without the tokens that no head reads.

        Returns:
            The tables, and the starts and the counts of the pieces that are read, int64 `[read]`, where they are now.
            The tables are for a part in which these pieces lie one behind the other.
        """
        read = self.counts > 0
        starts, places = torch.unique(self.starts[read], return_inverse=True)
        # The longest of pieces with one start, which differ only in a hostile file.
        counts = torch.zeros_like(starts).scatter_reduce(0, places, self.counts[read], "amax")
        new_starts = self.starts.clone()
        new_starts[read] = (counts.cumsum(0) - counts)[places]
        return replace(self, starts=new_starts), starts, counts


TABLE_NAMES = ("piece_starts", "piece_counts")
"""Names of the tables in the state of a store."""


def tables_nbytes(form: StateForm, tokens: int, piece_tokens: int) -> int:
    """Bytes of the tables of heads with `tokens` tokens each."""
    pieces = -(-tokens // piece_tokens)
    return 3 * form.batch_size * form.kv_heads * pieces * torch.int64.itemsize


def check_tables(tensors: dict[str, Tensor], form: StateForm, width: int, most: int, room: int, step: int) -> None:
    """Check the tables in a state.

    Args:
        tensors: the state.
        form: form of the keys of the other tokens.
        width: columns that the state claims to have.
        most: most tokens of a piece.
        room: tokens, or blocks, in the flat part.
        step: 1 if a piece of a dense part takes a place for each token; 0 if a piece is a block.

    Raises:
        StateMismatchError: the tables do not fit the flat part, or one another.
    """
    starts, counts = (tensors[name] for name in TABLE_NAMES)
    shape = (form.batch_size, form.kv_heads)
    for name, table in zip(TABLE_NAMES, (starts, counts), strict=True):
        if table.dtype != torch.int64 or table.dim() != 3 or table.shape[:2] != shape or table.shape != counts.shape:
            raise StateMismatchError(
                f"`{name}` of a state must be [{shape[0]}, {shape[1]}, pieces] of torch.int64, got "
                f"{list(table.shape)} of {table.dtype}: take the state again."
            )
    if not counts.numel() or int(counts.min()) < 0 or int(counts.max()) > most:
        raise StateMismatchError(
            f"`piece_counts` of a state must be 0 to {most} tokens, got others: take the state again."
        )
    # Compared one by one, because the sum of a start and a count of a hostile file may overflow.
    inside = (starts >= 0) & (starts <= room) & (starts <= room - (counts * step if step else (counts > 0).long()))
    if not bool(inside.all()):
        raise StateMismatchError(
            f"Pieces of a state must lie within the {room} places of its flat part: take the state again."
        )
    widest = int(counts.sum(2).max())
    if not 0 < widest <= width <= counts.shape[2] * most:
        raise StateMismatchError(
            f"A state must have a column for each of the {widest} tokens of its longest head, and at most "
            f"{counts.shape[2] * most}, got {width}: take the state again."
        )


class FlatTokens(ABC):
    """Tokens in a flat part, a pseudo batch of one sequence with one head, and the pieces that each head reads.

    The tokens never change, so forks share them, and sequences may read the same ones.

    Args:
        part: the tokens, whose states are `[1, 1, tokens, head_dim]`.
        tables: the pieces of each head, on the device of the states.

    Attributes:
        tables: the pieces of each head.
    """

    def __init__(self, part: DenseStore | PackedBlocks, tables: PieceTables) -> None:
        self._part = part
        self.tables = tables
        self._gathered: GatheredSegment | None = None

    @abstractmethod
    def _source(self, batch: int, kv_heads: int) -> DenseSegment | PackedSegment:
        """The flat part as if each head of each sequence held all of it."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Copies of the held states."""

    @abstractmethod
    def without_unread(self) -> Self:
        """The same tokens in memory of their own, without tokens that no head reads."""

    @abstractmethod
    def padded(self, smoothing: KeySmoothing | None) -> KVPair:
        """Keys and values of each head in its columns, `[batch, kv_heads, width, head_dim]` in full precision.

        They are copies, with zeros in columns without a token.

        Args:
            smoothing: how packed keys were smoothed.
        """

    def block_numbers(self) -> Tensor | None:
        """Number of the packed block in each column, int64 `[batch, kv_heads, width]`, -1 in a column without a token.

        `None` if no token is packed.
        """
        return None

    @property
    @abstractmethod
    def places(self) -> int:
        """Tokens of a dense part, or blocks of a packed one."""

    @property
    @abstractmethod
    def is_shared(self) -> bool:
        """Whether others hold the same memory."""

    @abstractmethod
    def places_read(self) -> int:
        """Places that some head reads."""

    @property
    def width(self) -> int:
        """Columns: the most tokens of any head."""
        return self.tables.width

    def gathered(self, smoothing: KeySmoothing | None) -> GatheredSegment:
        """The tokens as attention reads them: the same object each time, while they stay where they are.

        Args:
            smoothing: how packed keys were smoothed.
        """
        if self._gathered is None or smoothing_of(self._gathered) is not smoothing:
            tables = self.tables
            source = self._source(*tables.counts.shape[:2])
            if isinstance(source, PackedSegment):
                source = replace(source, smoothing=smoothing)
            self._gathered = GatheredSegment(source, tables.starts, tables.counts, tables.columns, tables.width)
        return self._gathered

    def _with(self, part: DenseStore | PackedBlocks, tables: PieceTables) -> Self:
        return self.__class__(part, tables)

    def selected(self, indices: Tensor) -> Self:
        """The tokens of the sequences at `indices`, in the same memory, in place of these."""
        return self._with(self._part, self.tables.selected(indices))

    def expanded(self, repeats: int) -> Self:
        """The tokens if each sequence is repeated `repeats` times in a row, as `selected`."""
        return self._with(self._part, self.tables.expanded(repeats))

    def fork(self) -> Self:
        """The same tokens, in the same memory unless it is offloaded."""
        return self._with(self._part.fork(), self.tables)

    def snapshot(self) -> Self:
        """See `TokenStore.snapshot`."""
        return self._with(self._part.snapshot(), self.tables)

    def swap_buffers(self, swap: BufferSwap) -> None:
        """See `TokenStore.swap_buffers`."""
        self._part.swap_buffers(swap)
        self._gathered = None

    def held_tensors(self) -> Iterator[Tensor]:
        """See `TokenStore.held_tensors`."""
        yield from self._part.held_tensors()
        yield from self.tables.held_tensors()

    def __getstate__(self) -> dict[str, object]:
        # The segment has views of states that are in the part already.
        return {**self.__dict__, "_gathered": None}


class DenseFlatTokens(FlatTokens):
    """Tokens in full precision, `[1, 1, tokens, head_dim]`, in pieces of at most 64."""

    _part: DenseStore

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, tables: PieceTables) -> Self:
        """A copy of keys and values `[1, 1, tokens, head_dim]`, without spare room."""
        return cls(without_spare_room(keys, values), tables.on(keys.device))

    @override
    def _source(self, batch: int, kv_heads: int) -> DenseSegment:
        keys, values = self.states()
        return DenseSegment(keys.expand(batch, kv_heads, -1, -1), values.expand(batch, kv_heads, -1, -1))

    def states(self) -> KVPair:
        """Keys and values `[1, 1, tokens, head_dim]`, as views."""
        return self._part.newest(self._part.length)

    @override
    def padded(self, smoothing: KeySmoothing | None) -> KVPair:
        return _padded(self.states(), self.tables.columns_of(DENSE_PIECE_TOKENS, 1)[0])

    @override
    def state(self) -> dict[str, Tensor]:
        return {f"flat_{name}": states for name, states in self._part.state().items()}

    @property
    @override
    def places(self) -> int:
        return self._part.length

    @property
    @override
    def is_shared(self) -> bool:
        return self._part.is_shared

    @override
    def places_read(self) -> int:
        return int(self.tables.compacted()[2].sum())

    @override
    def without_unread(self) -> Self:
        tables, starts, counts = self.tables.compacted()
        within = torch.arange(DENSE_PIECE_TOKENS, device=starts.device)
        slots = (starts[:, None] + within)[within < counts[:, None]]
        # The tables are on the device that computes, wherever the states are held.
        keys, values = (states.index_select(2, slots.to(states.device)) for states in self.states())
        return self._with(without_spare_room(keys, values), tables)


class PackedFlatTokens(FlatTokens):
    """Tokens in packed blocks `[1, 1, blocks, bytes]`. A piece is a block, or the beginning of one."""

    _part: PackedBlocks

    @override
    def _source(self, batch: int, kv_heads: int) -> PackedSegment:
        segment = self.segment()
        keys, values = (
            replace(
                side,
                codes=side.codes.expand(batch, kv_heads, -1, -1),
                parameters=side.parameters.expand(batch, kv_heads, -1, -1),
            )
            for side in (segment.keys, segment.values)
        )
        return PackedSegment(keys, values)

    def segment(self) -> PackedSegment:
        """The blocks, of one sequence with one head."""
        return next(self._part.segments())

    @property
    def blocks(self) -> PackedBlocks:
        """The blocks."""
        return self._part

    @override
    def padded(self, smoothing: KeySmoothing | None) -> KVPair:
        segment, size = self.segment(), self._part.block_tokens
        states = segment.states("keys", self._part.dtype), segment.states("values", self._part.dtype)
        return _padded(states, self.tables.columns_of(size, size)[0], smoothing)

    @override
    def block_numbers(self) -> Tensor:
        return self.tables.columns_of(self._part.block_tokens, self._part.block_tokens)[1]

    @override
    def state(self) -> dict[str, Tensor]:
        tensors = self._part.state()
        del tensors["block_ends"]
        return {f"flat_{name}": states for name, states in tensors.items()}

    @property
    @override
    def places(self) -> int:
        return len(self._part)

    @property
    @override
    def is_shared(self) -> bool:
        return self._part.is_shared

    @override
    def places_read(self) -> int:
        return int(torch.unique(self.tables.starts[self.tables.counts > 0]).numel())

    @override
    def without_unread(self) -> Self:
        read = self.tables.counts > 0
        blocks, places = torch.unique(self.tables.starts[read], return_inverse=True)
        starts = self.tables.starts.clone()
        starts[read] = places
        return self._with(self._part.taken(blocks.cpu()), replace(self.tables, starts=starts))


def _padded(states: KVPair, tokens: Tensor, smoothing: KeySmoothing | None = None) -> KVPair:
    """Tokens of `[1, 1, tokens, head_dim]` by their numbers, int64 `[batch, kv_heads, columns]`; zeros for -1."""
    absent = (tokens < 0)[..., None]
    keys, values = (side[0, 0, tokens.clamp(min=0)] for side in states)
    if smoothing is not None:
        keys = smoothing.restored(keys)
    return keys.masked_fill(absent, 0), values.masked_fill(absent, 0)


def flat_form(form: StateForm) -> StateForm:
    """The form of the flat part of states of this form."""
    return form._replace(batch_size=1, kv_heads=1)
