"""Where the tokens of padded pieces stand among the columns of a gathered segment."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class PieceColumns:
    """Columns of the tokens of padded pieces.

    Attributes:
        of_tokens: column of each token among those of the gathered segment, int64 `[batch, kv_heads, tokens]`; `width`
            if the token is padding.
        width: columns of the gathered segment.
    """

    of_tokens: Tensor
    width: int

    @property
    def is_padding(self) -> Tensor:
        """Which tokens are padding, bool `[batch, kv_heads, 1, tokens]`."""
        return (self.of_tokens == self.width).unsqueeze(2)

    def cleared(self, values: Tensor) -> Tensor:
        """Values with zeros for padding, which may be anything, even nan that a weight of zero would not remove."""
        return values.masked_fill(self.is_padding.transpose(2, 3), 0)

    def read(self, rows: Tensor) -> Tensor:
        """Entries of `[batch, heads, rows, width]` for the tokens, `[batch, heads, rows, tokens]`; any for padding."""
        return rows.gather(3, self._index(rows, self.of_tokens.clamp(max=self.width - 1)))

    def write(self, entries: Tensor, rows: Tensor) -> None:
        """Write `[batch, kv_heads, rows, tokens]` to `[batch, kv_heads, rows, width + 1]`, padding at the end."""
        rows.scatter_(3, self._index(rows, self.of_tokens), entries)

    def _index(self, rows: Tensor, columns: Tensor) -> Tensor:
        batch, heads, count, _ = rows.shape
        copies = heads // columns.shape[1]
        index = columns if copies == 1 else columns.repeat_interleave(copies, 1)
        return index.unsqueeze(2).expand(batch, heads, count, -1)
