"""A shared prefix as segments with rows; stores make such segments themselves."""

from dataclasses import replace

from kvlayers.attention.segment_rows import SegmentRows
from kvlayers.attention.segments import KVSegments


class SharedPrefixSegments(KVSegments):
    """The segments of `prefix`, each with the rows `numbers`, and those of `own`."""

    def __init__(self, prefix: KVSegments, own: KVSegments | None, numbers: SegmentRows) -> None:
        shared = tuple(replace(segment, rows=numbers) for segment in prefix.in_order)
        super().__init__((*shared, *(() if own is None else own.in_order)))
