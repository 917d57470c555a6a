"""Cases of the split kernel over gathered segments, and its others, run by `test_triton_decode` in one process.

As in `triton_decode_cases`, triton decides at its import whether it interprets.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

import histories
from histories import NOWHERE, Held, History, Pieces, Source, side_by_side
from interpreted_kernels import tried
from kvlayers.kernels.attention.cuda import plan
from kvlayers.kernels.attention.cuda.plan import Launch
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment, SegmentRows
from kvlayers.kernels.attention.segments import GatheredSegment
from matrix import to_run
from packed_reference import counted_launches
from triton_decode_cases import (
    FLOAT8,
    Case,
    attended_in_float32,
    before_packing,
    check_attention,
    dense_segment,
    held_in_float64,
    mask_of,
    native,
    quantized,
    query_of,
    results,
)

PIECE_TOKENS = 64


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


def source_of(gathered: Gathered) -> Source:
    """The segment that pieces are of, with all of its states."""
    case, shape = gathered.sizes, (gathered.sizes.batch, len(gathered.pieces), -1, -1)
    if gathered.flat:
        case = replace(case, batch=1, kv_heads=1)
    rows = SegmentRows(case.batch, case.rows) if case.rows else None
    if gathered.packed is None:
        dense = dense_segment(case, case.blocks * PIECE_TOKENS, case.batch)
        sides = [side.expand(shape) if gathered.flat else side for side in dense.tensors]
        return DenseSegment(*sides, rows=rows), *(side.double() for side in sides)
    # What `first` hides counts as forgotten: it holds nan.
    packed = [
        quantized(case.keys, "keys", case.key_dim, case),
        quantized(case.values, "values", case.value_dim, case),
    ]
    if gathered.flat:
        packed = [
            replace(side, codes=side.codes.expand(shape), parameters=side.parameters.expand(shape)) for side in packed
        ]
    segment = PackedSegment(*packed, first=case.options.get("first", 0), rows=rows)
    return segment, *map(before_packing, packed)


def pieces_of(gathered: Gathered, number: int) -> Pieces:
    """Random pieces of a head, some of them whole, and empty ones to fill its table."""
    case = gathered.sizes
    size, first = (case.block_tokens, case.options.get("first", 0)) if gathered.packed else (PIECE_TOKENS, 0)
    blocks = torch.randperm(case.blocks)[:number].tolist()
    if blocks and first and 0 not in blocks:
        blocks[0] = 0
    pieces = []
    for block in blocks:
        most = size - (first if block == 0 else 0)
        count = most if torch.rand(()) < 0.5 else int(torch.randint(1, most + 1, ()))
        start = block if gathered.packed else block * size + int(torch.randint(0, size - count + 1, ()))
        pieces.append((start, count))
    return pieces + [(NOWHERE, 0)] * (gathered.table - len(pieces))


def gathered_of(gathered: Gathered) -> Held:
    """Random pieces of a source, which each table has in any order."""
    batch = len(gathered.sizes.rows) or gathered.sizes.batch
    pieces = [
        [pieces_of(gathered, max(number - (sequence == 0 and batch > 1), 0)) for number in gathered.pieces]
        for sequence in range(batch)
    ]
    held = histories.gathered(source_of(gathered), pieces, gap=0 if gathered.right_aligned else 9, spare=2)
    order = torch.randperm(gathered.table)
    tables = (table[:, :, order] for table in (held.segment.starts, held.segment.counts, held.segment.columns))
    return replace(held, segment=GatheredSegment(held.segment.source, *tables, held.segment.width))


def states_of(gathered: Gathered) -> History:
    """Random segments of a case."""
    case = gathered.sizes
    batch = len(case.rows) or case.batch
    parts = [dense_segment(case, tokens, batch) for tokens in case.before]
    behind: list[DenseSegment | PackedSegment] = []
    if gathered.packed_after:
        tail = replace(case, batch=batch, blocks=2, options={}, **case.options.get("tail", native(4)))
        sides = quantized(tail.keys, "keys", tail.key_dim, tail), quantized(tail.values, "values", tail.value_dim, tail)
        behind.append(PackedSegment(*sides, 3))
    others = [gathered_of(replace(gathered, packed=None))] if gathered.gathered_after else []
    if gathered.tail_rows:
        rows = SegmentRows(max(gathered.tail_rows) + 1, gathered.tail_rows)
        behind.append(dense_segment(case, 11, rows.sequences).with_rows(rows))
    behind += [dense_segment(case, tokens, batch) for tokens in case.after]
    held = [*map(held_in_float64, parts), gathered_of(gathered), *others, *map(held_in_float64, behind)]
    return side_by_side(held, case.dtype)


def launches_of(gathered: Gathered) -> int:
    """How many kernels are launched for a case, whose attention is that of the reference."""
    torch.manual_seed(1)
    case, held = gathered.sizes, states_of(gathered)
    query, mask, scale = query_of(case), mask_of(case, held.segments), case.key_dim**-0.5
    with counted_launches() as launches:
        out = attended_in_float32(query, held.segments, mask, scale)
    check_attention(case, held, query, mask, scale, out)
    return launches.total()


FEW_SPLITS = ("dense, uneven heads", "4 bits, uneven heads")
"""Cases that also run with several pieces a split."""


def check_cases() -> dict[str, Any]:
    # As many splits as pieces: merging is part of every case.
    runs = [(name, name, Launch(programs=10**6, minimum_blocks=1)) for name in to_run(CASES)]
    runs += [(f"{name}, few splits", name, Launch(minimum_blocks=3)) for name in FEW_SPLITS]
    found: dict[str, Any] = {}
    for name, case, launch in runs:
        with mock.patch.object(plan, "LAUNCH", launch):
            found[name] = tried(launches_of, CASES[case])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({**results(), "gathered": check_cases()}, sys.stdout)
