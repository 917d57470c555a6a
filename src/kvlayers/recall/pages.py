"""Pages of a layer of recall: their bounds, which a query is compared with, and the segments that it reads."""

import bisect
import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.core.dense_store import DenseStore
from kvlayers.errors import StateMismatchError
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, Segment

MINIMUM_GROWTH = 8
"""Fewest pages for which room is made."""


class PagePlaces(NamedTuple):
    """Where pages are among the tokens of a layer.

    Attributes:
        numbers: number of each page, int64 `[batch, kv_heads, pages]`.
        starts: position of its first token, as `numbers`.
        ends: position behind its last token, as `numbers`. It is the start for a page that is not to be read.
    """

    numbers: Tensor
    starts: Tensor
    ends: Tensor


class PageBounds:
    """The maximum and the minimum of each channel over the keys of each page, as in Quest (Tang et al. 2024,
    arXiv:2406.10774).

    A query's score of a key is at most `sum_d max(q_d * max_d, q_d * min_d)`, which is one product: of the positive
    numbers of the query with the maxima, and of its negative numbers with the minima.

    Pages follow one another from `first` on. They are full, except for pages that were cut while they could not be
    taken apart.

    Args:
        page_tokens: tokens of a full page.
        first: position of the first token of the first page.
    """

    def __init__(self, page_tokens: int, first: int = 0) -> None:
        self.page_tokens = page_tokens
        self.first = first
        self._store = DenseStore(minimum_growth=MINIMUM_GROWTH)
        """The bounds, as keys of a token for each page, whose values have no channels. It never has segments."""
        self._ends: list[int] = []
        self._places: Tensor | None = None
        """Starts and ends of all pages, int64 `[2, pages]`, made when they are first asked for."""

    @property
    def end(self) -> int:
        """Position behind the last page."""
        return self._ends[-1] if self._ends else self.first

    def start_of(self, page: int) -> int:
        """Position of the first token of a page."""
        return self._ends[page - 1] if page else self.first

    def pages_within(self, length: int) -> int:
        """How many pages end at a position up to `length`."""
        return bisect.bisect_right(self._ends, length)

    def pages_from(self, length: int) -> int:
        """How many pages begin before the position `length`."""
        return min(len(self._ends), bisect.bisect_left(self._ends, length) + 1) if self.first < length else 0

    # Adding pages

    def of_keys(self, *parts: Tensor) -> list[Tensor]:
        """Bounds of the full pages of keys, `[batch, kv_heads, pages, 2 * head_dim]`, in a few tensors.

        Args:
            parts: keys `[batch, kv_heads, tokens, head_dim]` in the order of their tokens, from the end of the last
                page on.
        """
        found, size = [], self.page_tokens
        before: list[Tensor] = []
        missing = size
        with torch.no_grad():
            for keys in parts:
                if keys.shape[2] < missing:
                    before.append(keys)
                    missing -= keys.shape[2]
                    continue
                if before:
                    found.append(_bounds_of(torch.cat([*before, keys[:, :, :missing]], 2).unsqueeze(2)))
                    keys, before = keys[:, :, missing:], []
                whole = keys.shape[2] // size
                if whole:
                    found.append(_bounds_of(torch.unflatten(keys[:, :, : whole * size], 2, (whole, size))))
                before, missing = [keys[:, :, whole * size :]], size - (keys.shape[2] - whole * size)
        return found

    def prepare(self, bounds: list[Tensor]) -> None:
        """Make room for more pages, in memory that nobody else reads."""
        # An update that was interrupted may have left bounds of pages whose ends are not known.
        self._store.truncate(len(self._ends))
        if self._store.is_shared:
            # A product reads all bounds in one tensor.
            self._store.compact()
        self._store.validate(bounds[0], bounds[0][..., :0])
        self._store.prepare_slots(sum(part.shape[2] for part in bounds))

    def hold(self, bounds: list[Tensor]) -> None:
        """Hold the bounds of pages for which there is room."""
        for part in bounds:
            self._store.append(part, part[..., :0])
        end, added = self.end, self._store.length - len(self._ends)
        self._places = None
        self._ends += range(end + self.page_tokens, end + added * self.page_tokens + 1, self.page_tokens)

    def truncate(self, length: int, packed: int) -> None:
        """Forget the pages behind the first `length` tokens.

        Args:
            length: tokens that are left.
            packed: tokens, counted from the beginning, that are in blocks. A page of them is cut, and keeps its
                bounds. Any other page is forgotten, since its tokens can be put into a page again.
        """
        kept = self.pages_within(length)
        start = self.start_of(kept)
        if kept < len(self._ends):
            self._places = None
            self._ends[kept:] = [length] if start < length <= packed else []
            self._store.truncate(len(self._ends))

    # The choice

    def best(self, query: Tensor, first: int, last: int, count: int, priority: "PagePriority | None") -> PagePlaces:
        """The `count` pages of each KV head, from page `first` to page `last`, that may matter most to queries.

        Nothing is read by the host.

        Args:
            query: `[batch, heads, 1, head_dim]`, heads a multiple of the kv_heads, or `[batch, kv_heads, group,
                head_dim]`. A page has the highest bound that it has for any of the query heads of a KV head.
            first: the first page to choose from.
            last: the page behind the last one to choose from.
            count: pages to choose.
            priority: which pages come first, and which are not to be read; `None` if none of both.
        """
        batch, _, _, head_dim = query.shape
        bounds = self._store.newest(self._store.length - first)[0][:, :, : last - first]
        rows = query.reshape(batch, bounds.shape[1], -1, head_dim)
        # Torch multiplies half precision so slowly on many CPUs that the conversion pays.
        dtype = torch.float32 if query.is_cpu else torch.promote_types(rows.dtype, bounds.dtype)
        rows, bounds = rows.to(dtype), bounds.to(dtype)
        signed = torch.cat([rows.clamp(min=0), rows.clamp(max=0)], dim=3)
        scores = (signed @ bounds.transpose(2, 3)).amax(2)
        if priority is not None:
            starts, ends = self._all_places(scores.device)[:, first:last]
            scores, most = priority.ordered(scores, starts, ends)
        highest, numbers = scores.topk(count, dim=2, sorted=priority is not None)
        numbers = numbers + first
        if self._ends[-1] == self.first + len(self._ends) * self.page_tokens:
            # Every page is full.
            starts = numbers * self.page_tokens + self.first
            ends = starts + self.page_tokens
        else:
            starts, ends = (places[numbers] for places in self._all_places(scores.device))
        if priority is not None:
            is_read = (highest > -torch.inf) & (torch.arange(count, device=scores.device) < most)
            ends = torch.where(is_read, ends, starts)
        return PagePlaces(numbers, starts, ends)

    def _all_places(self, device: torch.device) -> Tensor:
        if self._places is None or self._places.shape[1] != len(self._ends):
            self._places = torch.tensor([[self.first, *self._ends[:-1]], self._ends], device=device)
        return self._places

    # The batch, copies and state

    def selected(self, indices: Tensor) -> Self:
        """The bounds of the selected sequences; these ones do not change."""
        return self._twin(self._store.selected(indices))

    def fork(self) -> Self:
        """Independent bounds of the same pages. Both hold the same memory until one of them gets another page."""
        return self._twin(self._store.fork())

    def _twin(self, store: DenseStore) -> Self:
        twin = copy.copy(self)
        twin._store, twin._ends = store, list(self._ends)
        return twin

    def trim(self) -> None:
        """Give back spare room if it is more than a part of the pages."""
        self._store.shrink(self._store.capacity_for(len(self._ends), None))

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive."""
        yield from self._store.held_tensors()
        if self._places is not None:
            yield self._places

    def state(self) -> dict[str, Tensor]:
        """Copies of the bounds and of the ends of the pages; empty without pages."""
        if not self._ends:
            return {}
        bounds = self._store.state()["keys"][:, :, : len(self._ends)]
        # On the same device as the other tensors, so that a state moves as a whole.
        return {BOUNDS: bounds, ENDS: torch.tensor(self._ends, dtype=torch.int64, device=bounds.device)}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore a state, which `check_bounds_state` has checked."""
        bounds = tensors[BOUNDS]
        self._store.load_state({"keys": bounds, "values": bounds[..., :0]})
        self._ends = tensors[ENDS].tolist()
        self._places = None


BOUNDS, ENDS = "page_bounds", "page_ends"
"""Names of the tensors of a state."""


class PagePriority(NamedTuple):
    """The pages of padded sequences: padding is not read, and the sinks of each sequence come first.

    Attributes:
        padding: tokens of padding before each sequence, int64 `[batch]`.
        sink_tokens: first tokens behind the padding that are read by every query.
        pages: pages to read besides those of the sinks.
    """

    padding: Tensor
    sink_tokens: int
    pages: int

    def ordered(self, scores: Tensor, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Scores `[batch, kv_heads, pages]`, infinite for sinks and for padding, and how many pages to read at most.

        Args:
            scores: the bounds of the pages.
            starts: position of the first token of each page, int64 `[pages]`.
            ends: position behind its last token, as `starts`.
        """
        padding = self.padding[:, None, None]
        is_padding = ends <= padding
        # Without sinks, the page in which padding ends is one like any other.
        are_sinks = (starts < padding + self.sink_tokens) & ~is_padding & (self.sink_tokens > 0)
        most = are_sinks.sum(2, keepdim=True) + self.pages
        return scores.masked_fill(are_sinks, torch.inf).masked_fill(is_padding, -torch.inf), most


def check_bounds_state(tensors: dict[str, Tensor], keys: Tensor, first: int, length: int, page_tokens: int) -> None:
    """Raise `StateMismatchError` if tensors are not the bounds of the pages of a layer.

    Args:
        tensors: the state of `PageBounds`.
        keys: keys of the layer's state, `[batch, kv_heads, tokens, head_dim]`, of any number of tokens.
        first: position of the first token of the first page.
        length: tokens of the layer.
        page_tokens: tokens of a full page.
    """
    bounds, ends = tensors.get(BOUNDS), tensors.get(ENDS)
    if bounds is None or ends is None:
        raise StateMismatchError(f"A state of recall must have `{BOUNDS}` and `{ENDS}`: take the state again.")
    positions: list[Any] = [first, *ends.tolist()] if ends.dim() == 1 and ends.dtype == torch.int64 else []
    expected = [*keys.shape[:2], len(positions) - 1, 2 * keys.shape[3]]
    if list(bounds.shape) != expected or not bounds.is_floating_point():
        raise StateMismatchError(
            f"`{BOUNDS}` of a state must be floating-point numbers {expected}, got {list(bounds.shape)} of "
            f"{bounds.dtype}: take the state again."
        )
    steps = [end - start for start, end in itertools.pairwise(positions)]
    if not all(0 < step <= page_tokens for step in steps) or positions[-1] > length:
        raise StateMismatchError(
            f"`{ENDS}` of a state must be ends of pages of 1 to {page_tokens} tokens, up to {length}, got "
            f"{positions[1:]}: take the state again."
        )


def _bounds_of(pages: Tensor) -> Tensor:
    """Bounds `[batch, kv_heads, pages, 2 * head_dim]` of keys `[batch, kv_heads, pages, page_tokens, head_dim]`."""
    lowest, highest = torch.aminmax(pages, dim=3)
    return torch.cat([highest, lowest], dim=3)


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
        if begin >= stop or not isinstance(segment, DenseSegment | PackedSegment):
            found.append(segment)
        else:
            found += _cut(segment, 0, begin - start)
            found.append(_gathered(segment, places, start, begin, stop, blocks))
            found += _cut(segment, stop - start, end - start)
        start = end
        blocks += segment.blocks if isinstance(segment, PackedSegment) else 0
    return KVSegments(tuple(found))


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


def _cut(segment: DenseSegment | PackedSegment, begin: int, end: int) -> Iterator[Segment]:
    """A segment from token `begin` to token `end`, of whole blocks if it is packed; nothing if there is no token."""
    if begin >= end:
        return
    if isinstance(segment, DenseSegment):
        yield DenseSegment(segment.keys[:, :, begin:end], segment.values[:, :, begin:end], segment.rows)
        return
    ends = segment.ends or (segment.keys.layout.block_tokens,) * segment.blocks
    starts = list(itertools.accumulate(ends, initial=0))[:-1]
    first, last = (bisect.bisect_left(starts, token) for token in (begin, end))
    blocks = segment.with_tensors(states[:, :, first:last] for states in segment.tensors)
    yield replace(blocks, first=0, ends=None if segment.ends is None else segment.ends[first:last])
