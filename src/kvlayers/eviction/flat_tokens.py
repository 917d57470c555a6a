"""The flat part of a ragged store: one head behind another, tables of the pieces of each head, and their state."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.core.buffer import COUNT_DTYPE, StateForm, form_of
from kvlayers.core.dense_store import DenseStore, without_spare_room
from kvlayers.core.token_store import BufferSwap, KVPair, TokenStore
from kvlayers.errors import StateMismatchError
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS, DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import GatheredSegment
from kvlayers.kernels.codes.smoothing import KeySmoothing
from kvlayers.quantized.packed_blocks import PackedBlocks
from kvlayers.quantized.quantized_store import QuantizedStore

TABLE_NAMES = ("piece_starts", "piece_counts")
COLUMNS_NAME = "ragged_columns"
FLAT = "flat_"
"""What the names of the tensors of the flat part begin with."""


@dataclass(eq=False)
class FlatTokens:
    """Tokens in a flat part, a pseudo batch of one sequence with one head, and the pieces that each head reads.

    The tokens never change, so forks share them, and sequences may read the same ones. The tokens of a head are
    right-aligned: its last token is in the last column.

    Attributes:
        part: the tokens: `[1, 1, tokens, head_dim]` in full precision, or packed blocks `[1, 1, blocks, bytes]`.
        starts: where each piece is, int64 `[batch, kv_heads, pieces]`: its first token in full precision, of at most
            `DENSE_PIECE_TOKENS`, or its packed block, of which it may be the beginning.
        counts: tokens of each piece, int64 `[batch, kv_heads, pieces]`; 0 for no piece.
        columns: column of the first token of each piece, int64 `[batch, kv_heads, pieces]`.
        width: columns, at least the most tokens of any head.
        sinks: how many of the oldest tokens of the tail, behind the flat part, are older than those in it.
        own: how many of the oldest tokens of the tail may be other tokens of the text for each head.
    """

    part: DenseStore | PackedBlocks
    starts: Tensor
    counts: Tensor
    columns: Tensor
    width: int
    sinks: int = 0
    own: int = 0
    _gathered: GatheredSegment | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls,
        part: DenseStore | PackedBlocks,
        starts: Tensor,
        counts: Tensor,
        width: int | None = None,
        sinks: int = 0,
        own: int = 0,
    ) -> Self:
        """Pieces whose `starts` and `counts` are known, with the fewest columns if no width is given."""
        ends = counts.cumsum(2)
        tokens = ends[:, :, -1:]
        if width is None:
            width = int(tokens.max())
        return cls(part, starts, counts, torch.where(counts > 0, width - tokens + ends - counts, 0), width, sinks, own)

    @property
    def tokens(self) -> Tensor:
        """Tokens of each head, int64 `[batch, kv_heads]`."""
        return self.counts.sum(2)

    @property
    def places(self) -> int:
        """Tokens of a dense part, or blocks of a packed one."""
        return len(self.part) if isinstance(self.part, PackedBlocks) else self.part.length

    def gathered(self, smoothing: KeySmoothing) -> GatheredSegment:
        """The tokens as attention reads them: the same object each time, while they stay where they are.

        Args:
            smoothing: how packed keys were smoothed.
        """
        if self._gathered is None or self._gathered.source.smoothing is not smoothing:
            source = self._source(smoothing)
            self._gathered = GatheredSegment(source, self.starts, self.counts, self.columns, self.width)
        return self._gathered

    def _source(self, smoothing: KeySmoothing) -> DenseSegment | PackedSegment:
        """The flat part as if each head of each sequence held all of it."""

        def held_by_all(states: Tensor) -> Tensor:
            return states.expand(*self.counts.shape[:2], -1, -1)

        if isinstance(self.part, DenseStore):
            keys, values = self.part.newest(self.part.length)
            return DenseSegment(held_by_all(keys), held_by_all(values))
        segment = next(self.part.segments())
        packed_keys, packed_values = (
            replace(side, codes=held_by_all(side.codes), parameters=held_by_all(side.parameters))
            for side in (segment.keys, segment.values)
        )
        return PackedSegment(packed_keys, packed_values, smoothing=smoothing)

    # The batch, copies and memory

    def with_tables(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same tokens in the same memory, read by tables in which `change` has moved the sequences."""
        starts, counts, columns = map(change, (self.starts, self.counts, self.columns))
        return replace(self, starts=starts, counts=counts, columns=columns)

    def without_unread(self, most: int) -> Self:
        """The same tokens in memory of their own, if more than `most` places are read by no head; else itself."""
        # A piece of a dense part takes a place for each token, and a packed block one.
        taken = (self.counts > 0).long() if isinstance(self.part, PackedBlocks) else self.counts
        within = torch.arange(DENSE_PIECE_TOKENS, device=taken.device)
        is_read = torch.zeros(self.places, dtype=torch.bool, device=taken.device)
        is_read[(self.starts[..., None] + within)[within < taken[..., None]]] = True
        places = is_read.nonzero().flatten()
        if self.places - len(places) <= most:
            return self
        last = self.starts.clamp(max=self.places - 1)
        starts = torch.where(taken > 0, is_read.cumsum(0)[last] - 1, 0)
        if isinstance(self.part, PackedBlocks):
            # Attention asks a segment of blocks for its form, even if the sequences that are left read none of them.
            return replace(
                self, part=self.part.taken((places if len(places) else places.new_zeros(1)).cpu()), starts=starts
            )
        # The tables are on the device that computes, wherever the states are held.
        keys, values = (side.index_select(2, places.to(side.device)) for side in self.part.newest(self.places))
        return replace(self, part=without_spare_room(keys, values), starts=starts)

    def swap_buffers(self, swap: BufferSwap) -> None:
        """See `TokenStore.swap_buffers`."""
        self.part.swap_buffers(swap)
        self._gathered = None

    def held_tensors(self) -> Iterator[Tensor]:
        """See `TokenStore.held_tensors`."""
        yield from self.part.held_tensors()
        yield from (self.starts, self.counts, self.columns)

    def __getstate__(self) -> dict[str, object]:
        # The segment has views of states that are in the part already.
        return {**self.__dict__, "_gathered": None}

    # State

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """Copies of the states and tables by name. The numbers are on the device, so that a state moves as a whole."""
        tensors = {FLAT + name: states for name, states in self.part.state().items()}
        for name, table in zip(TABLE_NAMES, (self.starts, self.counts), strict=True):
            tensors[name] = table.to(device, copy=True)
        columns = (self.width, self.sinks, self.own)
        return {**tensors, COLUMNS_NAME: torch.tensor(columns, dtype=COUNT_DTYPE, device=device)}

    @classmethod
    def of_state(cls, tensors: dict[str, Tensor], tail: TokenStore) -> Self:
        """The flat part of a state, which has been checked; the tail is an empty one of the kind in the state."""
        store = tail.fork()
        store.load_state(_part_state(tensors))
        store.shrink(store.length)
        part: Any = store.blocks if isinstance(store, QuantizedStore) else store
        starts, counts = (tensors[name].clone() for name in TABLE_NAMES)
        return cls.of(part, starts, counts, *tensors[COLUMNS_NAME].tolist())


def pieces_in_a_row(tokens: Tensor, piece_tokens: int, step: int) -> KVPair:
    """Starts and counts of the pieces of heads one behind the other, int64 `[batch, kv_heads, pieces]`.

    Args:
        tokens: tokens of each head, int64 `[batch, kv_heads]` on the host.
        piece_tokens: most tokens of a piece.
        step: tokens of a place: 1, or those of a packed block.
    """
    places = -(-tokens // step)
    before = places.flatten().cumsum(0).view_as(tokens) - places
    skipped = torch.arange(0, int(tokens.max()), piece_tokens)
    counts = (tokens[:, :, None] - skipped).clamp(0, piece_tokens)
    return torch.where(counts > 0, before[:, :, None] + skipped // step, 0), counts


def tables_nbytes(form: StateForm, tokens: int, piece_tokens: int) -> int:
    """Bytes of the tables of heads with `tokens` tokens each."""
    pieces = -(-tokens // piece_tokens)
    return 3 * form.batch_size * form.kv_heads * pieces * torch.int64.itemsize


def flat_form(form: StateForm) -> StateForm:
    """The form of the flat part of states of this form."""
    return form._replace(batch_size=1, kv_heads=1)


def is_ragged(tensors: dict[str, Tensor]) -> bool:
    """Whether a state has a flat part."""
    return len(tail_state(tensors)) < len(tensors)


def tail_state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of the tail."""
    of_flat = (*TABLE_NAMES, COLUMNS_NAME)
    return {name: states for name, states in tensors.items() if not name.startswith(FLAT) and name not in of_flat}


def _part_state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of the flat part, as that of a store of the kind of the tail. If it is packed, nothing else is held."""
    nothing = {name: tensors[name][:1, :1, :0] for name in ("keys", "values")}
    return nothing | {name.removeprefix(FLAT): held for name, held in tensors.items() if name.startswith(FLAT)}


def check_ragged_state(tensors: dict[str, Tensor], tail: TokenStore, tail_tokens: int) -> int:
    """Tokens in a state that has a flat part.

    Args:
        tensors: the state.
        tail: a tail of the kind whose state it is.
        tail_tokens: tokens of the tail, whose state has been checked.

    Raises:
        StateMismatchError: it is not the state of a ragged store with such a tail.
    """
    is_packed = isinstance(tail, QuantizedStore)
    needed = {"keys", "values", *TABLE_NAMES, COLUMNS_NAME, FLAT + ("block_ends" if is_packed else "keys")}
    if needed - set(tensors):
        raise StateMismatchError(
            f"The tensors {sorted(tensors)} are not the state of a RaggedStore with a {type(tail).__name__} as its "
            "tail: take the state again."
        )
    numbers = tensors[COLUMNS_NAME]
    if numbers.dtype != COUNT_DTYPE or numbers.shape != (3,):
        raise StateMismatchError(
            f"`{COLUMNS_NAME}` of a state must be three numbers of {COUNT_DTYPE}, got {list(numbers.shape)} of "
            f"{numbers.dtype}: take the state again."
        )
    width, sinks, own = map(int, numbers.tolist())
    if not 0 <= sinks <= own <= tail_tokens:
        raise StateMismatchError(
            f"The {tail_tokens} tokens of a tail must include its sinks and its own tokens, got {sinks} sinks and "
            f"{own} own tokens: take the state again."
        )
    forms = form_of(tensors["keys"]), form_of(tensors["values"])
    if forms[0].kv_heads != forms[1].kv_heads:
        raise StateMismatchError(
            f"Keys and values of a ragged state must have the same kv_heads, got {forms}: take the state again."
        )
    part, places = _part_state(tensors), tensors[TABLE_NAMES[1]]
    room, most = tail.check_state(part), DENSE_PIECE_TOKENS
    if tuple(form_of(part[name]) for name in ("keys", "values")) != tuple(map(flat_form, forms)):
        raise StateMismatchError("The flat part of a state must have the form of its other tokens: take it again.")
    if is_packed:
        ends = part["block_ends"][1:]
        room, most, places = len(ends), int(ends.max()), (places > 0).long()
    _check_tables(tensors, forms[0], width, most, room, places)
    return width + tail_tokens


def _check_tables(
    tensors: dict[str, Tensor], form: StateForm, width: int, most: int, room: int, places: Tensor
) -> None:
    """Raise `StateMismatchError` if the tables in a state do not fit the flat part, or one another.

    Args:
        tensors: the state.
        form: form of the keys of the other tokens.
        width: columns that the state claims to have.
        most: most tokens of a piece.
        room: places in the flat part: tokens, or blocks.
        places: how many places each piece takes, of the shape of the counts.
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
    if not bool(((starts >= 0) & (starts <= room) & (starts <= room - places)).all()):
        raise StateMismatchError(
            f"Pieces of a state must lie within the {room} places of its flat part: take the state again."
        )
    widest = int(counts.sum(2).max())
    # Sequences that were selected may have no token in the flat part, whose columns stay.
    if not max(widest, 1) <= width <= counts.shape[2] * most:
        raise StateMismatchError(
            f"A state must have a column for each of the {widest} tokens of its longest head, and at most "
            f"{counts.shape[2] * most}, got {width}: take the state again."
        )
