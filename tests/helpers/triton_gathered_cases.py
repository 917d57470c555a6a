"""Cases of the split kernel over gathered segments, run by `test_triton_gathered` in a process of its own.

As in `triton_decode_cases`, triton decides at its import whether it interprets.
"""

import itertools
import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from histories import Held, side_by_side
from kvlayers.kernels.attention.cuda import plan
from kvlayers.kernels.attention.cuda.plan import Launch
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment, SegmentRows
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, Segment
from kvlayers.kernels.codes.quantizer_contract import Side
from matrix import to_run
from packed_reference import counted_launches
from random_states import hadamard
from triton_decode_cases import (
    FLOAT8,
    SIDES,
    Case,
    attended_in_float32,
    held_in_float64,
    native,
    quantized,
)

PIECE_TOKENS = 64
NOWHERE = 10**12
"""Where a piece of no token may start."""


@dataclass
class Gathered:
    """A gathered segment, with the segments around it.

    Attributes:
        packed: formats of keys and values in packed blocks; `None` for a source in full precision.
        case: sizes, dtype, and options of the source, as for the kernel of packed segments. `blocks` are those of the
            source, or pieces of a dense one.
        pieces: for each kv head, how many pieces it reads; the same for all sequences but the first, which reads one
            fewer.
        table: entries of the tables.
        flat: whether all heads read from one buffer.
        right_aligned: whether the tokens of a head have the last columns; otherwise the columns have gaps.
        packed_after: whether a packed segment follows, of other states.
        gathered_after: whether another gathered segment follows, in full precision.
        tail_rows: rows of the dense segment behind all, which has fewer sequences then.
    """

    packed: dict[str, Any] | None
    pieces: tuple[int, ...] = (2, 1)
    table: int = 3
    case: dict[str, Any] = field(default_factory=dict)
    flat: bool = False
    right_aligned: bool = True
    packed_after: bool = False
    gathered_after: bool = False
    tail_rows: tuple[int, ...] = ()

    @property
    def sizes(self) -> Case:
        sizes = {"kv_heads": len(self.pieces), "blocks": 4, "after": (9,), **self.case}
        return Case(**(self.packed or native(4)), **sizes)


BATCH: dict[str, Any] = {"batch": 3}
MASKED: dict[str, Any] = {"batch": 2, "mask_shape": (2, 1, 1)}
ROTATED4 = native(4, rotated=True)
ROTATED8 = {"keys": replace(FLOAT8[0], rotated=True), "values": replace(FLOAT8[1], rotated=True)}

CASES: dict[str, Gathered] = {
    "dense": Gathered(None),
    "dense, bfloat16": Gathered(None, case={"dtype": torch.bfloat16}),
    "dense, float16, head_dim 128": Gathered(None, case={"dtype": torch.float16, "key_dim": 128, "value_dim": 128}),
    "dense, other head_dims": Gathered(None, case={"key_dim": 80, "value_dim": 48}),
    "dense, alone": Gathered(None, case={"after": ()}),
    "dense, between": Gathered(None, case={"before": (5,), "after": (70,)}),
    "dense, four segments around": Gathered(None, case={"before": (5, 3), "after": (9, 70)}),
    "dense, flat": Gathered(None, flat=True, case=BATCH),
    "dense, uneven heads": Gathered(None, (34, 0), 34, flat=True, case={"blocks": 40}),
    "dense, no head has a piece": Gathered(None, (0, 0)),
    "dense, no entry": Gathered(None, (0, 0), 0),
    "dense, several queries": Gathered(None, case={"q_tokens": 5, "groups": 3}),
    "dense, rows of several programs": Gathered(None, case={"q_tokens": 7, "groups": 5}),
    "dense, gaps": Gathered(None, right_aligned=False, case={**MASKED, "q_tokens": 2}),
    "dense, mask": Gathered(None, case={**MASKED, "q_tokens": 2, "before": (5,)}),
    "dense, mask of heads": Gathered(None, flat=True, case={"batch": 2, "mask_shape": (2, 4, 2), "q_tokens": 2}),
    "dense, added mask": Gathered(None, case={**MASKED, "mask_dtype": torch.float32}),
    "dense, sequences read others": Gathered(None, case={"batch": 2, "rows": (1, 0, 1), "mask_shape": (3, 1, 1)}),
    "dense, shared tail": Gathered(None, (1, 1), 1, case={"batch": 4}, tail_rows=(0, 0, 1, 1)),
    "dense, unevenly shared tail": Gathered(None, case={"batch": 3}, tail_rows=(1, 0, 1)),
    "dense, two gathered segments": Gathered(None, gathered_after=True, case=MASKED),
    "2 bits": Gathered(native(2)),
    "8 bits": Gathered(native(8), case={"value_dim": 128}),
    "float8": Gathered({"keys": FLOAT8[0], "values": FLOAT8[1]}),
    "4 bits, bfloat16, head_dim 128": Gathered(
        native(4), case={"dtype": torch.bfloat16, "key_dim": 128, "value_dim": 128}
    ),
    "4 bits, flat": Gathered(native(4), flat=True, case={"batch": 2}),
    "4 bits, uneven heads": Gathered(native(4), (7, 0, 2), 7, flat=True, case={"blocks": 9, "before": (5,)}),
    "4 bits, no head has a piece": Gathered(native(4), (0, 0)),
    "4 bits, gaps": Gathered(native(4), right_aligned=False, case={"mask_shape": (1, 1, 1)}),
    "4 bits, added mask of heads": Gathered(
        native(4), case={"mask_shape": (1, 4, 1), "mask_dtype": torch.float32, "before": (5,)}
    ),
    "4 bits, sequences read others": Gathered(native(4), case={"batch": 2, "rows": (1, 0, 1), "mask_shape": (3, 1, 1)}),
    "4 bits, packed tail": Gathered(native(4), packed_after=True, case={"mask_shape": (1, 1, 1)}),
    "rotated": Gathered(ROTATED4, flat=True),
    "rotated, mask": Gathered(ROTATED4, case={"mask_shape": (1, 1, 1), "dtype": torch.bfloat16}),
    "rotated, packed tail": Gathered(ROTATED4, packed_after=True, case={"options": {"tail": ROTATED4}}),
    "rotated, gathered states in full precision": Gathered(ROTATED4, gathered_after=True),
    "rotated, float8": Gathered(ROTATED8),
    "rotated, evicted tokens": Gathered(
        ROTATED4, case={"mask_shape": (1, 1, 2), "q_tokens": 2, "options": {"first": 17}}
    ),
    "scales of each token": Gathered(
        {"keys": replace(native(4)["values"], group_channels=32), "values": native(4)["values"]}
    ),
    "longer blocks": Gathered(native(4), case={"block_tokens": 128}),
}


def source_of(gathered: Gathered) -> DenseSegment | PackedSegment:
    """The segment that pieces are of; what no piece has is nan in a dense one."""
    case = gathered.sizes
    if gathered.flat:
        case = replace(case, batch=1, kv_heads=1)
    if gathered.packed is None:
        tokens = case.blocks * PIECE_TOKENS
        sides = [
            torch.randn(case.batch, tokens, case.kv_heads, dim).transpose(1, 2).to(case.dtype)
            for dim in (case.key_dim, case.value_dim)
        ]
        keys, values = (side.expand(gathered.sizes.batch, len(gathered.pieces), -1, -1) for side in sides)
        return DenseSegment(*((keys, values) if gathered.flat else sides), rows=rows_of(case))
    # What `first` hides counts as forgotten: it holds nan.
    sides_of = [
        quantized(case.keys, "keys", case.key_dim, case),
        quantized(case.values, "values", case.value_dim, case),
    ]
    if gathered.flat:
        shape = gathered.sizes.batch, len(gathered.pieces), -1, -1
        sides_of = [
            replace(side, codes=side.codes.expand(shape), parameters=side.parameters.expand(shape)) for side in sides_of
        ]
    return PackedSegment(*sides_of, first=case.options.get("first", 0), rows=rows_of(case))


def rows_of(case: Case) -> SegmentRows | None:
    return SegmentRows(case.batch, case.rows) if case.rows else None


def gathered_of(gathered: Gathered) -> GatheredSegment:
    """Random pieces of a source: each table has its empty pieces anywhere."""
    case, source = gathered.sizes, source_of(gathered)
    batch, heads = len(case.rows) or case.batch, len(gathered.pieces)
    shape = batch, heads, gathered.table
    starts, counts, columns = (torch.full(shape, NOWHERE), torch.zeros(shape, dtype=torch.int64), torch.zeros(shape))
    size = case.block_tokens if gathered.packed else PIECE_TOKENS
    first = case.options.get("first", 0)
    held = torch.zeros(batch, heads, dtype=torch.int64)
    for sequence in range(batch):
        for head, pieces in enumerate(gathered.pieces):
            number = max(pieces - (sequence == 0 and batch > 1), 0)
            entries = sorted(torch.randperm(gathered.table)[:number].tolist())
            blocks = torch.randperm(case.blocks)[:number].tolist()
            if blocks and first and 0 not in blocks:
                blocks[0] = 0
            for entry, block in zip(entries, blocks, strict=True):
                most = size - (first if gathered.packed and block == 0 else 0)
                # Some are full.
                count = most if torch.rand(()) < 0.5 else int(torch.randint(1, most + 1, ()))
                starts[sequence, head, entry] = (
                    block if gathered.packed else block * size + int(torch.randint(0, size - count + 1, ()))
                )
                counts[sequence, head, entry] = count
    held = counts.sum(2)
    if gathered.right_aligned:
        width = int(held.max()) + 2 if held.numel() and gathered.table else 2
        columns = width - held[..., None] + counts.cumsum(2) - counts
    else:
        width = gathered.table * size
        columns = torch.arange(gathered.table).flip(0).expand(shape) * size
    return GatheredSegment(source, starts, counts, columns.to(torch.int64), width)


def states_of(gathered: Gathered) -> KVSegments:
    """Random segments of a case."""
    case = gathered.sizes
    batch = len(case.rows) or case.batch

    def dense(tokens: int, rows: SegmentRows | None = None) -> DenseSegment:
        sequences = batch if rows is None else rows.sequences
        sides = [
            torch.randn(sequences, tokens, case.kv_heads, dim).transpose(1, 2).to(case.dtype)
            for dim in (case.key_dim, case.value_dim)
        ]
        return DenseSegment(*sides, rows=rows)

    segments: list[Segment] = [*map(dense, case.before), gathered_of(gathered)]
    if gathered.packed_after:
        formats = case.options.get("tail", native(4))
        tail = replace(case, batch=batch, blocks=2, options={}, **formats)
        keys, values = (
            quantized(tail.keys, "keys", tail.key_dim, tail),
            quantized(tail.values, "values", tail.value_dim, tail),
        )
        segments.append(PackedSegment(keys, values, 3))
    if gathered.gathered_after:
        segments.append(gathered_of(replace(gathered, packed=None)))
    if gathered.tail_rows:
        segments.append(dense(11, SegmentRows(max(gathered.tail_rows) + 1, gathered.tail_rows)))
    return KVSegments((*segments, *map(dense, case.after)))


def columns_in_float64(segment: Segment) -> Held:
    """A segment with the states of its columns, zeros where there is no token."""
    if not isinstance(segment, GatheredSegment):
        return held_in_float64(segment)
    source = segment.source
    block_tokens = source.keys.layout.block_tokens if isinstance(source, PackedSegment) else 1
    states = [states_of_source(source, side) for side in SIDES]
    batch, heads, pieces = segment.starts.shape
    found = [torch.zeros(batch, heads, segment.width, side.shape[3], dtype=torch.float64) for side in states]
    is_token = torch.zeros(batch, heads, segment.width, dtype=torch.bool)
    for sequence, head, piece in itertools.product(range(batch), range(heads), range(pieces)):
        of_source = sequence if source.rows is None else (source.rows.known or ())[sequence]
        start, count, column = (
            int(table[sequence, head, piece]) for table in (segment.starts, segment.counts, segment.columns)
        )
        token = start * block_tokens
        if isinstance(source, PackedSegment) and start == 0:
            token += source.first
        for place in range(count):
            assert not is_token[sequence, head, column + place]
            is_token[sequence, head, column + place] = True
            for of_columns, side in zip(found, states, strict=True):
                of_columns[sequence, head, column + place] = side[of_source, head, token + place]
    return Held(segment, *found, is_token)


def states_of_source(source: DenseSegment | PackedSegment, side: Side) -> Tensor:
    """All states of a source in float64, as they were before they were packed."""
    if isinstance(source, DenseSegment):
        return source.states(side, torch.float64)
    packed = source.side(side)
    states = packed.dequantized().double()
    return states @ hadamard(packed.layout.head_dim) if packed.layout.format.rotated else states


def mask_of(case: Case, tokens: int) -> Tensor | None:
    """A random mask, of which the last of several rows hides all."""
    if case.mask_shape is None:
        return None
    shown = torch.rand(*case.mask_shape, tokens) > 0.3
    if case.mask_shape != (1, 1, 1):
        shown[-1, -1, -1] = False
    if case.mask_dtype == torch.bool:
        return shown
    return torch.randn(shown.shape).masked_fill(~shown, -torch.inf).to(case.mask_dtype)


def errors(gathered: Gathered) -> dict[str, float]:
    """Errors of a case, each as a share of what it may be, and how many kernels are launched."""
    torch.manual_seed(1)
    case, segments = gathered.sizes, states_of(gathered)
    batch, heads = len(case.rows) or case.batch, case.kv_heads * case.groups
    query = torch.randn(batch, case.q_tokens, heads, case.key_dim).transpose(1, 2).to(case.dtype)
    mask = mask_of(case, sum(segment.tokens for segment in segments.in_order))
    scale = case.key_dim**-0.5
    with counted_launches() as launches:
        out = attended_in_float32(query, segments, mask, scale)
    parts = [columns_in_float64(segment) for segment in segments.in_order]
    expected, size = side_by_side(parts, case.dtype).attended(query, mask, scale)
    assert not out[(size == 0).expand_as(out)].any()
    # As in the cases of packed segments.
    rounding = torch.finfo(case.dtype).eps if case.dtype != torch.float32 else 8 * torch.finfo(torch.float32).eps
    score_limit = rounding * (1 + 2 * abs(float(query.double().norm(dim=-1).amax() * scale)))
    largest = max((float(part.values.nan_to_num(0).abs().amax()) for part in parts if part.values.numel()), default=1.0)
    return {
        "out": float((out - expected).abs().amax() / (max(largest, 1e-9) * (score_limit + rounding))),
        "launches": sum(launches.values()),
    }


FEW_SPLITS = ("dense, uneven heads", "4 bits, uneven heads")
"""Cases that also run with several pieces a split."""


def check_cases() -> dict[str, Any]:
    # As many splits as pieces: merging is part of every case.
    runs = [(name, name, Launch(programs=10**6, minimum_blocks=1)) for name in to_run(CASES)]
    runs += [(f"{name}, few splits", name, Launch(minimum_blocks=3)) for name in FEW_SPLITS]
    found: dict[str, Any] = {}
    for name, case, launch in runs:
        try:
            with mock.patch.object(plan, "LAUNCH", launch):
                found[name] = errors(CASES[case])
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({"cases": check_cases()}, sys.stdout)
