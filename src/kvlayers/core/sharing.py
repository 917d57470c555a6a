"""Memory that several stores hold: who may write to it, and segments of it that nobody writes to."""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvlayers.core.buffer import StateForm, TokenBuffer, form_of, forms_of_batch
from kvlayers.kernels.attention.segment_kinds import DenseSegment, SegmentRows


class BufferHolder(Protocol):
    """A store, which may write and read other slots later, or a `SharedSegment`, which reads its own slots alone."""

    def reads(self, start: int, end: int) -> bool:
        """Whether any of its tokens is in the slots from `start` to `end`."""


class CopyOnWrite:
    """The holders of one pair of buffers, and the slots of which a caller has views.

    A store that grows writes after its tokens. The first one to do so becomes the writer, and stays it as long as no
    other holder reads those slots; all others go on in memory of their own. Each store may be used by another thread.

    If the writer goes on in other memory, states that it has returned may still read what it wrote, so nobody writes to
    those slots again.

    Nobody can tell how long a caller keeps a view, so slots that a caller has seen are never written again. Buffers
    that a caller has views of belong to one store: the caller may write to a view, and no other store may see that.

    Attributes:
        buffers: the buffers of keys and of values, and the number of their first slot. `trim` replaces all three at
            once; a slot keeps its number.
    """

    def __init__(self, keys: TokenBuffer, values: TokenBuffer) -> None:
        self.buffers = keys, values, 0
        self._lock = threading.Lock()
        self._holders: weakref.WeakSet[BufferHolder] = weakref.WeakSet()
        self._writer: weakref.ref[BufferHolder] | None = None
        self._written_end = 0
        """End of the slots that a writer has claimed."""
        self._kept_end = 0
        """End of the slots that nobody may write to, because a writer that wrote there has left."""
        self._viewed: tuple[int, int] | None = None

    def join(self, holder: BufferHolder) -> None:
        """Add a holder."""
        with self._lock:
            self._holders.add(holder)

    def leave(self, holder: BufferHolder) -> None:
        """Remove a holder."""
        with self._lock:
            self._holders.discard(holder)
            if self._writer is not None and self._writer() is holder:
                self._writer, self._kept_end = None, self._written_end

    def claim(self, holder: BufferHolder, start: int, end: int) -> bool:
        """Whether a store may write to the slots from `start` to `end`. If so, no other store may from now on."""
        with self._lock:
            writer = None if self._writer is None else self._writer()
            if writer is not None and writer is not holder:
                return False
            if self._viewed is not None and start < self._viewed[1] and self._viewed[0] < end:
                return False
            if start < self._kept_end:
                return False
            if any(other is not holder and other.reads(start, end) for other in self._holders):
                return False
            self._writer, self._written_end = weakref.ref(holder), max(self._written_end, end)
            return True

    def record_view(self, start: int, end: int) -> None:
        """Note that a caller has a view of the slots from `start` to `end`: no store may write there again."""
        viewed = self._viewed
        if viewed is not None:
            start, end = min(start, viewed[0]), max(end, viewed[1])
        self._viewed = start, end

    def covers_view(self, start: int, end: int) -> bool:
        """Whether a view of the slots from `start` to `end` has been recorded."""
        return self._viewed is not None and self._viewed[0] <= start and end <= self._viewed[1]

    @property
    def is_viewed(self) -> bool:
        """Whether a caller has a view."""
        return self._viewed is not None

    @property
    def is_over(self) -> bool:
        """Whether a single holder is left, which may write wherever it wants to."""
        return self.has_one_holder and not self.is_viewed and not self._kept_end

    @property
    def has_one_holder(self) -> bool:
        """Whether at most one holder is left."""
        with self._lock:
            return len(self._holders) <= 1

    def segments_beside(self, holder: BufferHolder) -> list[bool]:
        """For each other holder, whether it is a segment."""
        with self._lock:
            return [isinstance(other, SharedSegment) for other in self._holders if other is not holder]

    def trim(self, divisor: int) -> None:
        """Move to smaller buffers if segments alone are left, and more than one slot in `divisor` is not read."""
        with self._lock:
            segments = [holder for holder in self._holders if isinstance(holder, SharedSegment)]
            keys, values, first = self.buffers
            if not segments or len(segments) < len(self._holders):
                return
            start = min(segment.start for segment in segments)
            count = max(segment.end for segment in segments) - start
            if (keys.capacity - count) * divisor > keys.capacity:
                shorter = (buffer.reallocated(start - first, count, count) for buffer in (keys, values))
                self.buffers = *shorter, start  # type: ignore[assignment]
                for segment in segments:
                    # Views of the old buffers would keep their memory.
                    segment._dense = None

    def held_tensors(self) -> Iterator[Tensor]:
        """The tensors of the buffers."""
        keys, values, _ = self.buffers
        yield keys.tensor
        yield values.tensor


class SharedSegment:
    """Consecutive tokens in a range of slots that nobody writes to while the segment exists.

    It never changes, and may be part of many stores, in several threads. `CopyOnWrite.trim` may move its tokens to
    smaller buffers, where they have the same slots.

    Args:
        sharing: the holders of the buffers.
        start: first slot.
        end: slot behind the last one.
        rows: which sequence of the buffers each sequence of the batch reads; `None` if each reads its own.

    Attributes:
        tokens: tokens in the segment.
        sequences: sequences of the buffers.
    """

    __slots__ = ("__weakref__", "_dense", "end", "rows", "sequences", "sharing", "start", "tokens")

    def __init__(self, sharing: CopyOnWrite, start: int, end: int, rows: SegmentRows | None = None) -> None:
        self.sharing, self.start, self.end, self.rows = sharing, start, end, rows
        self.tokens = end - start
        self.sequences = sharing.buffers[0].form.batch_size
        self._dense: tuple[object, DenseSegment] | None = None
        sharing.join(self)

    @classmethod
    def over(cls, keys: TokenBuffer, values: TokenBuffer, rows: SegmentRows | None = None) -> "SharedSegment":
        """A segment over all slots of buffers that nobody else holds."""
        return cls(CopyOnWrite(keys, values), 0, keys.capacity, rows)

    def reads(self, start: int, end: int) -> bool:
        """Whether any of the tokens is in the slots from `start` to `end`."""
        return start < self.end and self.start < end

    def dense(self) -> DenseSegment:
        """The segment as attention reads it: the same object each time, while the buffers are the same."""
        buffers = self.sharing.buffers
        known = self._dense
        if known is not None and known[0] is buffers and not torch.compiler.is_compiling():
            return known[1]
        keys, values, first = buffers
        start, tokens = self.start - first, self.tokens
        dense = DenseSegment(keys.read(start, tokens), values.read(start, tokens), self.rows)
        if not torch.compiler.is_compiling():
            self._dense = buffers, dense
        return dense

    def part(self, skipped: int, tokens: int) -> "SharedSegment":
        """The segment of `tokens` tokens after the first `skipped`."""
        if tokens == self.tokens:
            return self
        start = self.start + skipped
        return SharedSegment(self.sharing, start, start + tokens, self.rows)

    def holds_the_same_as(self, other: "SharedSegment") -> bool:
        """Whether both have the same tokens of the same buffers."""
        return (self.sharing, self.start, self.end) == (other.sharing, other.start, other.end) and (
            self.rows is other.rows
        )

    def read_by(self, rows: SegmentRows, used: tuple[int, ...] | None) -> "SharedSegment":
        """The segment for another batch.

        Args:
            rows: the rows that its sequences read.
            used: the sequences of this segment to keep a copy of, whose places `rows` are then; `None` for no copy.
        """
        if used is None:
            return SharedSegment(self.sharing, self.start, self.end, rows)
        keys, values, first = self.sharing.buffers
        where = torch.tensor(used), self.start - first, self.tokens, self.tokens
        return SharedSegment.over(keys.selected(*where), values.selected(*where), rows)

    def held_tensors(self) -> Iterator[Tensor]:
        """All tensors that keep memory alive."""
        yield from self.sharing.held_tensors()
        if self.rows is not None:
            yield from self.rows.held_tensors()

    def __reduce__(self) -> tuple[Callable[..., "SharedSegment"], tuple[Any, ...]]:
        # Other holders, and slots of other tokens, are not part of the segment.
        keys, values, first = self.sharing.buffers
        live = (buffer.reallocated(self.start - first, self.tokens, self.tokens) for buffer in (keys, values))
        return SharedSegment.over, (*live, self.rows)


@torch.no_grad()
def gathered(pieces: Sequence[DenseSegment], forms: tuple[StateForm, StateForm]) -> tuple[TokenBuffer, TokenBuffer]:
    """New buffers of these forms, which copies of the states of each sequence of the batch fill."""
    tokens = sum([piece.tokens for piece in pieces])
    keys, values = (TokenBuffer.allocate(form, tokens) for form in forms)
    slot = 0
    for piece in pieces:
        for states, buffer in ((piece.keys, keys), (piece.values, values)):
            buffer.write(slot, states if piece.rows is None else piece.rows.select(states))
        slot += piece.tokens
    return keys, values


def tokens_of(segments: Sequence[SharedSegment], start: int, count: int) -> list[SharedSegment]:
    """The segments of `count` tokens from `start`, counted over all segments."""
    found = []
    for segment in segments:
        begin, end = max(start, 0), min(start + count, segment.tokens)
        if begin < end:
            found.append(segment.part(begin, end - begin))
        start -= segment.tokens
    return found


def selected(segments: Sequence[SharedSegment], indices: Tensor) -> list[SharedSegment]:
    """The segments, in which sequence `i` reads what sequence `indices[i]` read before, int64 `[new_batch]`.

    Segments whose rows were one object have one object again, so that attention reads them together.
    """
    chosen: dict[object, tuple[SegmentRows, tuple[int, ...] | None]] = {}
    found = []
    for segment in segments:
        before = segment.sequences if segment.rows is None else segment.rows
        if before not in chosen:
            sequences = segment.sequences
            rows = SegmentRows(sequences, tuple(range(sequences))) if segment.rows is None else segment.rows
            chosen[before] = _without_unread(rows.selected(indices))
        found.append(segment.read_by(*chosen[before]))
    return found


def _without_unread(rows: SegmentRows) -> tuple[SegmentRows, tuple[int, ...] | None]:
    """The rows, and the sequences that are read if half of them or fewer are: then the places among these."""
    used = tuple(sorted(set(rows.known or range(rows.sequences))))
    if len(used) * 2 > rows.sequences:
        # Dropping the others takes a copy.
        return rows, None
    return SegmentRows(len(used), tuple(map(used.index, rows.known or ()))), used


def at_most(maximum: int, segments: Sequence[SharedSegment]) -> Sequence[SharedSegment]:
    """The segments, in which neighbours are merged until there are `maximum` of them: where it copies the least."""
    while len(segments) > max(maximum, 1):
        pairs = list(itertools.pairwise(segments))
        place = min(range(len(pairs)), key=lambda at: _copied_tokens(*pairs[at]))
        segments = [*segments[:place], _merged(*pairs[place]), *segments[place + 2 :]]
    return segments


def _read_alike(first: SharedSegment, second: SharedSegment) -> bool:
    """Whether the sequences of the batch read the same sequences of both."""
    rows, others = first.rows, second.rows
    if rows is others or rows is None or others is None:
        return rows is others
    return rows.known is not None and (rows.known, rows.sequences) == (others.known, others.sequences)


def _copied_tokens(first: SharedSegment, second: SharedSegment) -> int:
    """Tokens of all sequences that one segment for both would hold."""
    sequences = first.sequences if _read_alike(first, second) or first.rows is None else len(first.rows)
    return sequences * (first.tokens + second.tokens)


def _merged(first: SharedSegment, second: SharedSegment) -> SharedSegment:
    """One segment with the tokens of both, in memory of its own."""
    pieces, rows = (first.dense(), second.dense()), None
    if _read_alike(first, second):
        # Each sequence is copied once, however many sequences of the batch read it.
        pieces, rows = (pieces[0].with_rows(None), pieces[1].with_rows(None)), first.rows
    sequences = pieces[0].batch if pieces[0].rows is None else len(pieces[0].rows)
    forms = forms_of_batch((form_of(pieces[0].keys), form_of(pieces[0].values)), sequences)
    return SharedSegment.over(*gathered(pieces, forms), rows)
