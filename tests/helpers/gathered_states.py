"""Random gathered segments, and attention to them in float64, one query of one head after another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, Segment
from random_states import check, code_format, packed_states

BLOCK = 16
KV_HEADS = 2


@dataclass
class Held:
    """A segment, the states of its columns in float64 `[batch, kv_heads, columns, head_dim]`, and which are tokens."""

    segment: Segment
    keys: Tensor
    values: Tensor
    is_token: Tensor


def dense_source(
    batch: int, tokens: int, dtype: torch.dtype, head_dim: int = 64, flat: bool = False
) -> tuple[DenseSegment, Tensor, Tensor]:
    """A view of a larger buffer, as a store has it; all heads of all sequences read the same one if it is flat."""
    shape = (1, 1) if flat else (batch, KV_HEADS)
    keys, values = (
        torch.randn(*shape, tokens + 9, head_dim)
        .to(dtype)[:, :, start : start + tokens]
        .expand(batch, KV_HEADS, -1, -1)
        for start in (4, 2)
    )
    return DenseSegment(keys, values), keys.double(), values.double()


def packed_source(
    batch: int,
    blocks: int,
    dtype: torch.dtype,
    head_dim: int = 64,
    width: int | str = 4,
    rotated: bool = True,
    flat: bool = False,
    first: int = 0,
) -> tuple[PackedSegment, Tensor, Tensor]:
    """As `dense_source`, in blocks."""
    shape = (*((1, 1) if flat else (batch, KV_HEADS)), blocks * BLOCK, head_dim)
    sides, exact = [], []
    for side, group in (("keys", (BLOCK, 1)), ("values", (1, 8))):
        packed, states = packed_states(code_format(width, group, rotated), side, shape, BLOCK, dtype)  # type: ignore[arg-type]
        sides.append(packed)
        exact.append(states.expand(batch, KV_HEADS, -1, -1))
    if flat:
        for packed in sides:
            object.__setattr__(packed, "codes", packed.codes.expand(batch, KV_HEADS, -1, -1))
            object.__setattr__(packed, "parameters", packed.parameters.expand(batch, KV_HEADS, -1, -1))
    return PackedSegment(*sides, first), *exact


Pieces = list[tuple[int, int]]
"""Start and count of each piece of a head."""


def gathered(
    source: tuple[DenseSegment | PackedSegment, Tensor, Tensor], pieces: list[list[Pieces]], gap: int = 0
) -> Held:
    """The pieces `[sequence][kv head]` of a source, in columns aligned to the right, with so many in between."""
    segment, keys, values = source
    if segment.rows is not None:
        keys, values = (states[list(segment.rows.known or ())] for states in (keys, values))
    batch, most = len(pieces), max(len(of_head) for of_sequence in pieces for of_head in of_sequence)
    width = max(sum(count + gap for _, count in of_head) for of_sequence in pieces for of_head in of_sequence)
    starts, counts, columns = (torch.zeros(batch, KV_HEADS, most, dtype=torch.int64) for _ in range(3))
    exact = [torch.zeros(batch, KV_HEADS, width, states.shape[3], dtype=torch.float64) for states in (keys, values)]
    is_token = torch.zeros(batch, KV_HEADS, width, dtype=torch.bool)
    for sequence, of_sequence in enumerate(pieces):
        for head, of_head in enumerate(of_sequence):
            column = width - sum(count + gap for _, count in of_head)
            # Unused entries of the table say nothing but that they have no token.
            starts[sequence, head, len(of_head) :] = 1 << 40
            for index, (start, count) in enumerate(of_head):
                table = starts, counts, columns
                for entries, entry in zip(table, (start, count, column), strict=True):
                    entries[sequence, head, index] = entry
                begin = start
                if isinstance(segment, PackedSegment):
                    begin = start * BLOCK + (segment.first if start == 0 else 0)
                for of_columns, states in zip(exact, (keys, values), strict=True):
                    of_columns[sequence, head, column : column + count] = states[sequence, head, begin : begin + count]
                is_token[sequence, head, column : column + count] = True
                column += count + gap
    return Held(GatheredSegment(segment, starts, counts, columns, width), *exact, is_token)


def random_pieces(
    segment: DenseSegment | PackedSegment, batch: int, most: int, generator: torch.Generator
) -> list[list[Pieces]]:
    """Up to so many pieces of each head, none of some heads, in any order."""

    def draw(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    def piece() -> tuple[int, int]:
        if isinstance(segment, DenseSegment):
            start = draw(segment.tokens)
            return start, min((0, 1, 13, 64)[draw(4)], segment.tokens - start)
        block = draw(segment.blocks)
        held = BLOCK - (segment.first if block == 0 else 0)
        return block, (held, draw(held + 1))[draw(2)]

    return [[[piece() for _ in range(draw(most + 1))] for _ in range(KV_HEADS)] for _ in range(batch)]


def ordinary(source: tuple[DenseSegment | PackedSegment, Tensor, Tensor]) -> Held:
    """All tokens of a source."""
    segment, keys, values = source
    return Held(segment, keys, values, torch.ones(keys.shape[:3], dtype=torch.bool))


@dataclass
class Mixed:
    """Segments of several kinds, as `Held`."""

    segments: KVSegments
    keys: Tensor
    values: Tensor
    is_token: Tensor
    dtype: torch.dtype

    def query(self, group: int, queries: int) -> Tensor:
        """As models have it: heads inside of tokens."""
        batch, kv_heads, _, head_dim = self.keys.shape
        return torch.randn(batch, queries, kv_heads * group, head_dim).to(self.dtype).transpose(1, 2)

    def check(
        self, query: Tensor, mask: Tensor | None, seen: Tensor, scale: float = 0.2, sums: float | None = None
    ) -> None:
        """Compare attention with sums over the tokens that each query of each head sees."""
        batch, heads, queries, _ = query.shape
        group = heads // self.keys.shape[1]
        wanted = torch.zeros(*query.shape[:3], self.values.shape[3], dtype=torch.float64)
        magnitude = torch.zeros(*query.shape[:3], 1, dtype=torch.float64)
        full = None if mask is None else mask.expand(batch, heads, queries, -1)
        for sequence in range(batch):
            for head in range(heads):
                of_head = sequence, head // group
                for row in range(queries):
                    tokens = self.is_token[of_head]
                    bias = torch.zeros(tokens.shape, dtype=torch.float64)
                    if full is not None and full.dtype == torch.bool:
                        tokens = tokens & full[sequence, head, row]
                    elif full is not None:
                        bias = full[sequence, head, row].double()
                        tokens = tokens & (bias > -torch.inf)
                    keys, values = self.keys[of_head][tokens], self.values[of_head][tokens]
                    if len(keys):
                        weights = (keys @ query[sequence, head, row].double() * scale + bias[tokens]).softmax(0)
                        wanted[sequence, head, row] = weights @ values
                        magnitude[sequence, head, row] = weights @ values.norm(dim=-1)
        check(seen, wanted, magnitude, sums)


def mixed(parts: list[Held], dtype: torch.dtype) -> Mixed:
    """Segments side by side."""
    keys, values = (torch.cat(states, 2) for states in ([part.keys for part in parts], [part.values for part in parts]))
    is_token = torch.cat([part.is_token for part in parts], 2)
    return Mixed(KVSegments(tuple(part.segment for part in parts)), keys, values, is_token, dtype)
