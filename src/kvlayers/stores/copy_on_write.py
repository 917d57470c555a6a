"""Buffers that several stores share until one of them would overwrite what another one reads."""

import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from kvlayers.stores.buffer import TokenBuffer


class BufferHolder(Protocol):
    """A store, or a segment of one, as far as other stores over the same buffers must know it."""

    def reads(self, start: int, end: int) -> bool:
        """Whether any of its tokens is in the slots from `start` to `end`."""

    @property
    def fixed_slots(self) -> tuple[int, int] | None:
        """Where its slots start and end if it only reads, `None` if it may write, or read other slots later."""

    def note_move(self) -> None:
        """Read the tokens where they are now. Called for holders that only read."""


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

    def trim(self, divisor: int) -> None:
        """Move to smaller buffers if segments alone are left, and more than one slot in `divisor` is not read."""
        with self._lock:
            read = [holder.fixed_slots for holder in self._holders]
            slots = [fixed for fixed in read if fixed is not None]
            keys, values, first = self.buffers
            if not slots or len(slots) < len(read):
                return
            start, end = min(slot[0] for slot in slots), max(slot[1] for slot in slots)
            count = end - start
            if (keys.capacity - count) * divisor > keys.capacity:
                shorter = (buffer.reallocated(start - first, count, count) for buffer in (keys, values))
                self.buffers = *shorter, start  # type: ignore[assignment]
                for holder in self._holders:
                    holder.note_move()

    def held_tensors(self) -> Iterator[Tensor]:
        """The tensors of the buffers."""
        keys, values, _ = self.buffers
        yield keys.tensor
        yield values.tensor
