"""Buffers that several stores hold, until one of them writes where another one reads."""

import threading
import weakref
from typing import Protocol


class Holder(Protocol):
    """A store, as far as those that hold the same buffers must know it."""

    def reads(self, start: int, end: int) -> bool:
        """Whether any of its tokens is in the slots from `start` to `end`."""


class Sharing:
    """The stores that hold one pair of buffers.

    A store that goes on writes behind its tokens. The first to do so is the writer, and may stay for as long as nobody
    else reads there; all others go on in memory of their own. Stores may be used by a thread each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._writer: weakref.ref[Holder] | None = None

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
            if any(other is not holder and other.reads(start, end) for other in self._holders):
                return False
            self._writer = weakref.ref(holder)
            return True

    @property
    def has_one_holder(self) -> bool:
        """Whether no more than one store is left."""
        with self._lock:
            return len(self._holders) <= 1
