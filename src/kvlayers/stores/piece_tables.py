"""Tables that say which pieces of a flat part each KV head of each sequence reads."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.errors import StateMismatchError
from kvlayers.stores.buffer import StateForm


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
