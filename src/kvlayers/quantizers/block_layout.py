"""The layout of a block of packed codes, which stores reserve, quantizers write and attention reads.

A block holds `block_tokens` tokens as rows of codes, packed by `packing`. Keys have one row per channel, along the
tokens; values have one row per token, along the channels. So attention sums over the rows in both products, and the
codes that it unpacks at once are neighbouring columns of its result.
"""

from dataclasses import dataclass

from kvlayers.quantizers.contract import CodeFormat, Side
from kvlayers.quantizers.packing import row_bytes


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of the blocks of one side.

    Attributes:
        format: the meaning of the codes.
        side: keys or values.
        head_dim: channels of a token.
        block_tokens: tokens of a block.
    """

    format: CodeFormat
    side: Side
    head_dim: int
    block_tokens: int

    def _oriented(self, of_tokens: int, of_channels: int) -> tuple[int, int]:
        """The numbers for the rows and for the columns of a block."""
        return (of_channels, of_tokens) if self.side == "keys" else (of_tokens, of_channels)

    @property
    def rows(self) -> int:
        """Rows of a block: channels of keys, tokens of values."""
        return self._oriented(self.block_tokens, self.head_dim)[0]

    @property
    def columns(self) -> int:
        """Columns of a block: tokens of keys, channels of values."""
        return self._oriented(self.block_tokens, self.head_dim)[1]

    @property
    def row_group(self) -> int:
        """Neighbouring rows that share a scale."""
        return self._oriented(self.format.group_tokens, self.format.group_channels)[0]

    @property
    def column_group(self) -> int:
        """Neighbouring columns that share a scale."""
        return self._oriented(self.format.group_tokens, self.format.group_channels)[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes."""
        return row_bytes(self.columns, self.format.bits)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a block, for each head."""
        return self.rows * self.row_bytes

    @property
    def parameters(self) -> int:
        """Scales and zeros of a block, for each head."""
        groups = self.block_tokens // self.format.group_tokens * (self.head_dim // self.format.group_channels)
        return self.format.parameters * groups
