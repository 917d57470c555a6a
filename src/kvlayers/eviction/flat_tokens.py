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
from kvlayers.kernels.attention.segments import GatheredSegment, with_full_blocks
from kvlayers.kernels.codes.smoothing import KeySmoothing
from kvlayers.quantized.packed_blocks import PackedBlocks
from kvlayers.quantized.quantized_store import QuantizedStore

TABLE_NAMES = ("piece_starts", "piece_counts", "columns")
"""The names of the tables in the state of a flat part. The third one has its width, its sinks, and its own tokens."""

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
            part: DenseSegment | PackedSegment = (
                DenseSegment(*self.part.newest(self.part.length))
                if isinstance(self.part, DenseStore)
                else with_full_blocks(replace(next(self.part.segments()), smoothing=smoothing))
            )
            # As if each head of each sequence held all of it.
            source = part.with_tensors(states.expand(*self.counts.shape[:2], -1, -1) for states in part.tensors)
            self._gathered = GatheredSegment(source, self.starts, self.counts, self.columns, self.width)
        return self._gathered

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

    def state(self, tail: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the states and tables by name, for a state that has those of the tail already.

        The numbers are on the device of the states, so that a state moves as a whole.
        """
        # As of a store of the kind of the tail. If the flat part is packed, it holds nothing in full precision.
        tensors = {name: tail[name][:1, :1, :0] for name in ("keys", "values")} | self.part.state()
        numbers = torch.tensor((self.width, self.sinks, self.own))
        for name, table in zip(TABLE_NAMES, (self.starts, self.counts, numbers), strict=True):
            tensors[name] = table.to(tail["keys"].device, copy=True)
        return {FLAT + name: held for name, held in tensors.items()}

    @classmethod
    def of_state(cls, flat: dict[str, Tensor], tail: TokenStore) -> Self:
        """The flat part of a state, which has been checked; the tail is one of the kind in the state."""
        part, (starts, counts, numbers) = _part_and_tables(flat)
        store = tail.fork()
        store.load_state(part)
        store.shrink(store.length)
        held: Any = store.blocks if isinstance(store, QuantizedStore) else store
        return cls.of(held, starts.clone(), counts.clone(), *numbers.tolist())


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


def split_state(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of the tail, and that of the flat part, which is empty if there is none."""
    flat = {name.removeprefix(FLAT): held for name, held in tensors.items() if name.startswith(FLAT)}
    return {name: held for name, held in tensors.items() if not name.startswith(FLAT)}, flat


def _part_and_tables(flat: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The states of a flat part, as those of a store of the kind of the tail, and its tables."""
    rest = dict(flat)
    tables = [rest.pop(name) for name in TABLE_NAMES]
    return rest, tables


def check_flat_state(flat: dict[str, Tensor], of_tail: dict[str, Tensor], tail: TokenStore, held: int) -> int:
    """Columns of the flat part of a state.

    Args:
        flat: the state of the flat part.
        of_tail: the state of the tail, which has been checked.
        tail: a tail of the kind whose state it is.
        held: tokens of the tail.

    Raises:
        StateMismatchError: it is not the state of a flat part before such a tail.
    """
    is_packed = isinstance(tail, QuantizedStore)
    if not of_tail or not flat.keys() >= {*TABLE_NAMES, "keys", "values", *(("block_ends",) if is_packed else ())}:
        raise StateMismatchError(
            f"The tensors {sorted(flat)} are not the flat part of a RaggedStore with a {type(tail).__name__} as its "
            "tail: take the state again."
        )
    part, tables = _part_and_tables(flat)
    starts, counts, numbers = tables
    room, most, places = tail.check_state(part), DENSE_PIECE_TOKENS, counts
    of_part, forms = ([form_of(state[name]) for name in ("keys", "values")] for state in (part, of_tail))
    if of_part != list(map(flat_form, forms)) or forms[0].kv_heads != forms[1].kv_heads:
        raise StateMismatchError(
            f"The flat part of a state must have the form of its other tokens, with as many kv_heads of keys as of "
            f"values, got {of_part} and {forms}: take the state again."
        )
    pieces = forms[0].batch_size, forms[0].kv_heads, counts.shape[2] if counts.dim() == 3 else 0
    for name, table, shape in zip(TABLE_NAMES, tables, (pieces, pieces, (3,)), strict=True):
        if table.dtype != COUNT_DTYPE or table.shape != shape:
            raise StateMismatchError(
                f"`{FLAT}{name}` of a state must be {list(shape)} of {COUNT_DTYPE}, got {list(table.shape)} of "
                f"{table.dtype}: take the state again."
            )
    if is_packed:
        ends = part["block_ends"][1:]
        room, most, places = len(ends), int(ends.max()), (counts > 0).long()
    if not counts.numel() or int(counts.min()) < 0 or int(counts.max()) > most:
        raise StateMismatchError(f"Pieces of a state must have 0 to {most} tokens, got others: take the state again.")
    # Compared one by one, because the sum of a start and a count of a hostile file may overflow.
    if not bool(((starts >= 0) & (starts <= room) & (starts <= room - places)).all()):
        raise StateMismatchError(
            f"Pieces of a state must lie within the {room} places of its flat part: take the state again."
        )
    widest, (width, sinks, own) = int(counts.sum(2).max()), map(int, numbers.tolist())
    # Sequences that were selected may have no token in the flat part, whose columns stay.
    if not max(widest, 1) <= width <= counts.shape[2] * most or not 0 <= sinks <= own <= held:
        raise StateMismatchError(
            f"A flat part must have {max(widest, 1)} to {counts.shape[2] * most} columns, and its sinks and own tokens "
            f"be among the {held} tokens of the tail, got {width} columns, {sinks} sinks and {own} own tokens: take "
            "the state again."
        )
    return width
