"""Buffers that several stores hold, until one of them writes where another one reads."""

import threading
import weakref
from typing import Protocol


class Holder(Protocol):
    """A store, as far as those that hold the same buffers must know it."""

    def reads(self, start: int, end: int) -> bool:
        """Whether any of its tokens is in the slots from `start` to `end`."""


class CopyOnWrite:
    """The stores that hold one pair of buffers, and the slots that the caller has views of.

    A store that goes on writes behind its tokens. The first to do so is the writer, and may stay for as long as nobody
    else reads there; all others go on in memory of their own. Stores may be used by a thread each.

    Nobody can tell how long the caller keeps a view, so a slot that was handed out is not written again. Buffers of
    which views were handed out have one store: the caller may write to a view, and no other store may see it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._writer: weakref.ref[Holder] | None = None
        self._handed_out: tuple[int, int] | None = None

    def join(self, holder: Holder) -> None:
        """Count a store among the holders."""
        with self._lock:
            self._holders.add(holder)

    def leave(self, holder: Holder) -> None:
        """Count it no more."""
        with self._lock:
            self._holders.discard(holder)
            if self._writer is not None and self._writer() is holder:
                self._writer = None

    def may_write(self, holder: Holder, start: int, end: int) -> bool:
        """Whether a store may write to the slots from `start` to `end`; from then on, no other one may."""
        with self._lock:
            writer = None if self._writer is None else self._writer()
            if writer is not None and writer is not holder:
                return False
            if self._handed_out is not None and start < self._handed_out[1] and self._handed_out[0] < end:
                return False
            if any(other is not holder and other.reads(start, end) for other in self._holders):
                return False
            self._writer = weakref.ref(holder)
            return True

    def hand_out(self, start: int, end: int) -> None:
        """Note that the caller is given a view of the slots from `start` to `end`: no store may write there again."""
        handed_out = self._handed_out
        if handed_out is not None:
            start, end = min(start, handed_out[0]), max(end, handed_out[1])
        self._handed_out = start, end

    def shows(self, start: int, end: int) -> bool:
        """Whether the caller was given a view of the slots from `start` to `end` before."""
        return self._handed_out is not None and self._handed_out[0] <= start and end <= self._handed_out[1]

    @property
    def is_handed_out(self) -> bool:
        """Whether the caller was given a view."""
        return self._handed_out is not None

    @property
    def has_one_holder(self) -> bool:
        """Whether no more than one store is left."""
        with self._lock:
            return len(self._holders) <= 1
