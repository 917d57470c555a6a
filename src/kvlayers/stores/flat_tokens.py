"""Tokens of heads of different lengths in one flat buffer: they are read, and never written."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.attention.segment_kinds import DENSE_PIECE_TOKENS, DenseSegment, PackedSegment
from kvlayers.attention.segments import GatheredSegment
from kvlayers.quantizers.smoothing import KeySmoothing
from kvlayers.stores.buffer import StateForm
from kvlayers.stores.contract import BufferSwap, KVPair
from kvlayers.stores.dense import DenseStore, without_spare_room
from kvlayers.stores.packed_blocks import PackedBlocks
from kvlayers.stores.piece_tables import PieceTables


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

    def gathered(self) -> GatheredSegment:
        """The tokens as attention reads them: the same object each time, while they stay where they are."""
        if self._gathered is None:
            tables = self.tables
            source = self._source(*tables.counts.shape[:2])
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
