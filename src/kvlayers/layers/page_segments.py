"""The segments that a query attends to if it reads some pages of a layer, and what is before and behind them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvlayers.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.attention.segments import GatheredSegment, KVSegments, Segment
from kvlayers.layers.page_bounds import PagePlaces
from kvlayers.layers.token_layer import TokenLayer


def chosen_segments(segments: KVSegments, places: PagePlaces, first: int, last: int) -> KVSegments:
    """Segments with the same columns, of which the tokens from `first` to `last` are read in the chosen pages alone.

    Nothing is copied. Pages may reach from one dense segment into the next. The pages of packed segments are their
    blocks, one by one from the first page on.

    Args:
        segments: all tokens of a layer.
        places: the chosen pages, all of them between `first` and `last`.
        first: position of the first token of the first page that could be chosen.
        last: position behind the last page that could be chosen.
    """
    found: list[Segment] = []
    start = blocks = 0
    for segment in segments.in_order:
        end = start + segment.tokens
        begin, stop = max(start, first), min(end, last)
        if begin >= stop or isinstance(segment, GatheredSegment):
            found.append(segment)
        else:
            cut = _CUTS[type(segment)]
            found += cut(segment, 0, begin - start)
            found.append(_gathered(segment, places, start, begin, stop, blocks))
            found += cut(segment, stop - start, end - start)
        start = end
        blocks += segment.blocks if isinstance(segment, PackedSegment) else 0
    return KVSegments(tuple(found), segments.smoothing)


def _gathered(
    segment: DenseSegment | PackedSegment, places: PagePlaces, start: int, begin: int, stop: int, blocks: int
) -> GatheredSegment:
    """The chosen pages of one segment.

    Args:
        segment: the segment.
        places: the chosen pages.
        start: position of its first token.
        begin: position of its first token that may be in a page.
        stop: position behind its last token that may be in a page.
        blocks: blocks of the packed segments before it.
    """
    starts, ends = places.starts.clamp(min=begin), places.ends.clamp(max=stop)
    counts = (ends - starts).clamp(min=0)
    pieces = starts - start if isinstance(segment, DenseSegment) else places.numbers - blocks
    return GatheredSegment(segment, pieces, counts, starts - begin, stop - begin)


def _cut_dense(segment: DenseSegment, begin: int, end: int) -> Iterator[DenseSegment]:
    if begin < end:
        yield DenseSegment(segment.keys[:, :, begin:end], segment.values[:, :, begin:end], segment.rows)


def _cut_packed(segment: PackedSegment, begin: int, end: int) -> Iterator[PackedSegment]:
    """Whole blocks of a segment, from token `begin` to token `end`."""
    if begin >= end:
        return
    size = segment.keys.block_tokens
    ends = segment.ends or (size,) * segment.blocks
    held, first, last = 0, 0, 0
    for block, tokens in enumerate(ends):
        if held < begin:
            first = block + 1
        if held < end:
            last = block + 1
        held += tokens
    blocks = segment.with_tensors(states[:, :, first:last] for states in segment.tensors)
    yield replace(blocks, first=0, ends=None if segment.ends is None else segment.ends[first:last])


_CUTS: dict[type, Callable[..., Iterator[Segment]]] = {DenseSegment: _cut_dense, PackedSegment: _cut_packed}


def page_tokens_of(layer: TokenLayer, keys: Tensor) -> int | None:
    """Tokens of a page if the queries of new tokens read pages that can be read where they are held; else `None`.

    Args:
        layer: the layer.
        keys: keys of the new tokens, `[batch, kv_heads, tokens, head_dim]`.
    """
    tracked = torch.is_grad_enabled() and keys.requires_grad
    apart = layer.store.holds_pages_apart and not tracked
    return layer.chosen_page_tokens(keys.shape[2]) if apart else None
