"""Random histories of segments of every kind, and attention to them in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment, SegmentRows, of_repeats
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, Segment
from kvlayers.kernels.codes.smoothing import UNSMOOTHED, KeySmoothing
from random_states import check, code_format, packed_states

BLOCK = 16
KV_HEADS = 2
ROUNDED = {torch.float32: None, torch.bfloat16: 0.004, torch.float16: 0.0005}
"""As `SUMS`, where weights are rounded to the dtype of the states, as in torch's attention."""


@dataclass
class Held:
    """A segment, the states of its columns in float64 `[batch, kv_heads, columns, head_dim]`, and which are tokens."""

    segment: Segment
    keys: Tensor
    values: Tensor
    is_token: Tensor


Source = tuple[DenseSegment | PackedSegment, Tensor, Tensor]
"""A segment, and the states of all of its slots, or blocks, in float64."""


def dense_source(
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    head_dim: int = 64,
    value_dim: int | None = None,
    kv_heads: int = KV_HEADS,
    flat: bool = False,
) -> Source:
    """Views of larger buffers, as a store has them; all heads of all sequences read the same ones if they are flat."""
    shape = (1, 1) if flat else (batch, kv_heads)
    keys, values = (
        torch.randn(*shape, tokens + 9, width).to(dtype)[:, :, start : start + tokens].expand(batch, kv_heads, -1, -1)
        for start, width in ((4, head_dim), (2, value_dim or head_dim))
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
    ends: tuple[int, ...] | None = None,
) -> Source:
    """As `dense_source`, in blocks."""
    shape = (*((1, 1) if flat else (batch, KV_HEADS)), blocks * BLOCK, head_dim)
    sides, exact, wide = [], [], (batch, KV_HEADS, -1, -1)
    for side, group in (("keys", (BLOCK, 1)), ("values", (1, 8))):
        packed, states = packed_states(code_format(width, group, rotated), side, shape, BLOCK, dtype)  # type: ignore[arg-type]
        sides.append(replace(packed, codes=packed.codes.expand(wide), parameters=packed.parameters.expand(wide)))
        exact.append(states.expand(wide))
    return PackedSegment(*sides, first, ends), *exact


Pieces = list[tuple[int, int]]
"""Start and count of each piece of a head."""

NOWHERE = 1 << 40
"""Where a piece of no token may start."""


def gathered(source: Source, pieces: list[list[Pieces]], gap: int = 0, spare: int = 0) -> Held:
    """The pieces `[sequence][kv head]` of a source, in columns aligned to the right, with so many in between.

    Before the columns of every head are the `spare` ones.
    """
    segment, keys, values = source
    if segment.rows is not None:
        keys, values = (states[list(segment.rows.known or ())] for states in (keys, values))
    shape = len(pieces), len(pieces[0])
    most = max(len(of_head) for of_sequence in pieces for of_head in of_sequence)
    width = spare + max(sum(count + gap for _, count in of_head) for of_sequence in pieces for of_head in of_sequence)
    starts, counts, columns = (torch.zeros(*shape, most, dtype=torch.int64) for _ in range(3))
    exact = [torch.zeros(*shape, width, states.shape[3], dtype=torch.float64) for states in (keys, values)]
    is_token = torch.zeros(*shape, width, dtype=torch.bool)
    for sequence, of_sequence in enumerate(pieces):
        for head, of_head in enumerate(of_sequence):
            column = width - sum(count + gap for _, count in of_head)
            # Unused entries of the table say nothing but that they have no token.
            starts[sequence, head, len(of_head) :] = NOWHERE
            for index, (start, count) in enumerate(of_head):
                at = sequence, head, index
                starts[at], counts[at], columns[at] = start, count, column
                begin = start
                if isinstance(segment, PackedSegment):
                    begin = start * segment.keys.layout.block_tokens + (segment.first if start == 0 else 0)
                for of_columns, states in zip(exact, (keys, values), strict=True):
                    of_columns[sequence, head, column : column + count] = states[sequence, head, begin : begin + count]
                is_token[sequence, head, column : column + count] = True
                column += count + gap
    return Held(GatheredSegment(segment, starts, counts, columns, width), *exact, is_token)


def ordinary(source: Source, rows: SegmentRows | None = None, are_read: bool = True) -> Held:
    """All tokens of a source, of which each sequence reads its own, or those of another as `rows` say.

    If they are not read, only the device knows them.
    """
    segment, keys, values = source
    if isinstance(segment, PackedSegment):
        size = segment.keys.layout.block_tokens
        ends = segment.ends or (size,) * segment.blocks
        held = [
            block * size + token
            for block, end in enumerate(ends)
            for token in range(0 if block else segment.first, end)
        ]
        keys, values = keys[:, :, held], values[:, :, held]
    if rows is not None:
        chosen = list(rows.known or ())
        unread = SegmentRows(rows.sequences, torch.tensor(chosen))
        segment, keys, values = segment.with_rows(rows if are_read else unread), keys[chosen], values[chosen]
    return Held(segment, keys, values, torch.ones(keys.shape[:3], dtype=torch.bool))


@dataclass
class History:
    """Segments side by side, as `Held`."""

    segments: KVSegments
    keys: Tensor
    values: Tensor
    is_token: Tensor
    dtype: torch.dtype

    def query(self, group: int = 2, queries: int = 1) -> Tensor:
        """As models have it: heads inside of tokens."""
        batch, kv_heads, _, head_dim = self.keys.shape
        return torch.randn(batch, queries, kv_heads * group, head_dim).to(self.dtype).transpose(1, 2)

    def of_query_heads(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values, and which columns are tokens, `[batch, heads, 1, columns]`."""
        group = query.shape[1] // self.keys.shape[1]
        parts = self.keys, self.values, self.is_token.unsqueeze(2)
        keys, values, is_token = (part.repeat_interleave(group, 1) for part in parts)
        return keys, values, is_token

    def attended(self, query: Tensor, mask: Tensor | None, scale: float = 0.2) -> tuple[Tensor, Tensor]:
        """Exact attention, and how large the numbers are that were added up for it."""
        keys, values, is_token = self.of_query_heads(query)
        scores = (query.double() @ keys.transpose(2, 3) * scale).masked_fill(~is_token, -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
        weights = torch.nan_to_num(scores.softmax(-1))
        return weights @ values, weights @ values.norm(dim=-1, keepdim=True)

    def check(
        self, query: Tensor, mask: Tensor | None, seen: Tensor, sums: float | None = None, scale: float = 0.2
    ) -> None:
        """Compare attention with exact attention."""
        check(seen, *self.attended(query, mask, scale), sums)

    def check_products(
        self,
        query: Tensor,
        scores: Callable[[Tensor, KVSegments], Tensor],
        combine: Callable[[Tensor, KVSegments], Tensor],
        sums: float | None = None,
    ) -> None:
        """Compare the products of eager attention with exact ones. Columns that are no tokens have no weight."""
        keys, values, is_token = self.of_query_heads(query)
        products = scores(query, self.segments)
        assert products.shape == (*query.shape[:3], self.segments.tokens)
        assert products.masked_fill(is_token, -torch.inf).eq(-torch.inf).all()
        sizes = query.double().norm(dim=-1, keepdim=True) * keys.norm(dim=-1).unsqueeze(2)
        exact = (query.double() @ keys.transpose(2, 3)).masked_fill(~is_token, 0)
        check(products.masked_fill(~is_token, 0), exact, sizes, sums)
        weights = torch.rand_like(products.float()).to(query.dtype)
        # As the softmax of torch gives it, the memory of weights need not be contiguous.
        weights = weights.transpose(2, 3).contiguous().transpose(2, 3) if query.shape[2] > 1 else weights
        seen = combine(weights.masked_fill(~is_token, torch.nan), self.segments)
        weights = weights.masked_fill(~is_token, 0).double()
        check(seen, weights @ values, weights @ values.norm(dim=-1, keepdim=True), sums)


def side_by_side(parts: list[Held], dtype: torch.dtype) -> History:
    """The history of some segments."""
    keys, values = (torch.cat(states, 2) for states in ([part.keys for part in parts], [part.values for part in parts]))
    is_token = torch.cat([part.is_token for part in parts], 2)
    return History(KVSegments(tuple(part.segment for part in parts)), keys, values, is_token, dtype)


class Draws:
    """Random numbers of a seed, which seeds those of torch too."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def below(self, number: int) -> int:
        return int(torch.randint(number, (1,), generator=self._generator))

    def one_of(self, values: tuple[int, ...]) -> int:
        return values[self.below(len(values))]

    def dense(self, batch: int, dtype: torch.dtype, head_dim: int) -> Source:
        tokens = self.one_of((0, 1, 5, 64, 70, 130))
        source, *exact = dense_source(batch, tokens + 8, dtype, head_dim)
        start = self.below(9)
        # In larger buffers, as a store has them: the buffers themselves, or views.
        segment = DenseSegment(*source.tensors, slots=(start, tokens))
        keys, values = (side[:, :, start : start + tokens] for side in exact)
        return (segment if self.below(2) else DenseSegment(*segment.tensors)), keys, values

    def packed(self, batch: int, dtype: torch.dtype, head_dim: int) -> Source:
        blocks, width = self.one_of((1, 2, 5)), (3, 4, 8, "fp8")[self.below(4)]
        cut = {"first": self.below(3), "ends": tuple(3 + self.below(BLOCK - 2) for _ in range(blocks))}
        return packed_source(
            batch, blocks, dtype, head_dim, width, bool(self.below(2)), **cut if self.below(5) < 3 else {}
        )

    def rows(self, batch: int) -> SegmentRows:
        """Some sequences have several readers, and some have none."""
        sequences = self.one_of(tuple(number for number in (1, 2, 4) if number <= batch))
        if self.below(5) < 2:
            return SegmentRows(sequences, of_repeats(sequences, batch // sequences))
        return SegmentRows(sequences, tuple(self.below(sequences) for _ in range(batch)))

    def pieces(self, segment: DenseSegment | PackedSegment, batch: int, most: int) -> list[list[Pieces]]:
        """Up to so many pieces of each head, none of some heads, in any order."""

        def piece() -> tuple[int, int]:
            if isinstance(segment, DenseSegment):
                start = self.below(segment.tokens)
                return start, min(self.one_of((0, 1, 13, 64)), segment.tokens - start)
            block = self.below(segment.blocks)
            held = BLOCK - (segment.first if block == 0 else 0)
            return block, self.one_of((held, self.below(held + 1)))

        return [[[piece() for _ in range(self.below(most + 1))] for _ in range(KV_HEADS)] for _ in range(batch)]


SINKS, RESIDUAL = 5, 70


def sinks_codes_and_residual(
    batch: int, dtype: torch.dtype, cut: bool = True, smoothing: KeySmoothing = UNSMOOTHED
) -> History:
    """Sinks, packed blocks (with evicted and cropped tokens if `cut`), and a residual."""
    ends = (BLOCK, 0, BLOCK - 7, BLOCK) if cut else None
    packed, keys, values = packed_source(batch, 4, dtype, first=3 if cut else 0, ends=ends)
    smoothed = replace(packed, smoothing=smoothing), smoothing.restored(keys), values
    sinks, residual = (ordinary(dense_source(batch, tokens, dtype)) for tokens in (SINKS, RESIDUAL))
    return side_by_side([sinks, ordinary(smoothed), residual], dtype)


SOURCES = [
    "dense", "flat", "packed 2", "packed 4", "packed 8", "packed fp8", "packed heads", "packed 3", "flat packed",
    "cut packed",
]  # fmt: skip
"""What pieces are of."""

KINDS = [
    *("dense", "packed", "dense packed", "dense rows", "packed rows", "dense packed rows", "dense unread rows"),
    *(f"pieces of {source}" for source in SOURCES),
]
"""Histories of several segments, in full precision or packed, which sequences share if they have rows; or of pieces."""


def history(
    kind: str, seed: int, dtype: torch.dtype = torch.float32, count: int = 6, head_dim: int = 64, most: int = 7
) -> History:
    """A random history of a kind: so many segments, some of no token, or pieces, up to `most` of each head."""
    draws = Draws(seed)
    if kind.startswith("pieces of "):
        batch = 1 + seed % 2
        # Between ordinary segments, as a cache has them: packed tokens, and the newest in full precision.
        source = source_of(kind.removeprefix("pieces of "), batch, dtype, rotated=seed % 2 == 0)
        pieces = gathered(source, draws.pieces(source[0], batch, most), gap=seed % 3)
        newest = ordinary(dense_source(batch, 70, dtype))
        return side_by_side([ordinary(packed_source(batch, 2, dtype)), pieces, newest], dtype)
    batch, held = draws.one_of((2, 4) if "rows" in kind else (1, 2, 4)), []
    while len(held) < count:
        rows = draws.rows(batch) if "rows" in kind and draws.below(5) < 3 else None
        # The next segments have the same rows.
        for _ in range(min(draws.one_of((1, 1, 2, 3)), count - len(held))):
            is_packed = "packed" in kind and ("dense" not in kind or draws.below(2))
            make = draws.packed if is_packed else draws.dense
            source = make(batch if rows is None else rows.sequences, dtype, head_dim)
            held.append(ordinary(source, rows, "unread" not in kind))
    return side_by_side(held, dtype)


def source_of(name: str, batch: int, dtype: torch.dtype, rotated: bool = True) -> Source:
    """A source of pieces, by its name among `SOURCES`."""
    if "packed" not in name:
        return dense_source(batch, 300, dtype, flat=name == "flat")
    width: int | str = name.split()[-1]
    width = width if width in ("fp8", "heads") else int(width) if width != "packed" else 4
    flat, first = name.startswith("flat"), 5 if "cut" in name else 0
    return packed_source(batch, 9, dtype, width=width, rotated=rotated, flat=flat, first=first)


MASKS = ["none", "additive", "by head", "causal", "window", "left padding"]


def random_mask(kind: str, query: Tensor, tokens: int) -> Tensor | None:
    """A mask of such a kind."""
    batch, heads, queries, _ = query.shape
    if kind == "none":
        return None
    if kind == "additive":
        return torch.randn(batch, 1, queries, tokens).masked_fill(torch.rand(1, 1, 1, tokens) > 0.7, -torch.inf)
    if kind == "by head":
        return torch.rand(1, heads, 1, tokens) > 0.3
    seen = torch.ones(batch, 1, queries, tokens, dtype=torch.bool)
    if kind == "causal":
        return seen.tril(tokens - queries)
    if kind == "window":
        return seen.tril(tokens - queries).triu(tokens - queries - 40)
    # Left padding beyond whole segments; the first sequence sees nothing.
    for sequence in range(batch):
        seen[sequence, :, :, : tokens - tokens * sequence // batch] = False
    return seen
