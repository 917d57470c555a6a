"""Whether what kvlayers changes elsewhere is in place: by explicit calls, and for the length of blocks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Presence:
    """Something that is put in place by the first who wants it, and taken back once nobody does.

    Args:
        put: puts it in place, and is called again where it is there already.
        take_back: takes back what there is of it, which may be a part or nothing.
    """

    def __init__(self, put: Callable[[], None], take_back: Callable[[], None]) -> None:
        self._put, self._take_back = put, take_back
        self._lock = threading.RLock()
        self._explicit = False
        self._blocks: set[object] = set()
        self._calls: set[object] = set()

    def __bool__(self) -> bool:
        return self._explicit or bool(self._blocks)

    @property
    def is_in_place(self) -> bool:
        """Whether somebody wants it, or a call that began while somebody did has not ended."""
        return bool(self) or bool(self._calls)

    @contextmanager
    def call(self) -> Iterator[bool]:
        """The length of a call, which is told whether it is wanted: if so, it stays in place until the call ends.

        So no other thread takes it back in the middle of the call.
        """
        token = object()
        try:
            with self._lock:
                wanted = bool(self)
                if wanted:
                    self._calls.add(token)
            yield wanted
        finally:
            self._end_call(token)

    @contextmanager
    def own_call(self) -> Iterator[None]:
        """The length of a call that puts it in place for itself alone: that does not make it wanted."""
        token = object()
        try:
            with self._lock:
                self._calls.add(token)
                self._put()
            yield
        finally:
            self._end_call(token)

    def _end_call(self, token: object) -> None:
        with self._lock:
            if token in self._calls:
                self._calls.discard(token)
                self._take_back_unwanted()

    def begin(self) -> None:
        """Put it in place, until `end`."""
        with self._lock:
            before, self._explicit = self._explicit, True
            try:
                self._put()
            except BaseException:
                self._explicit = before
                self._take_back_unwanted()
                raise

    def end(self) -> None:
        """Take it back, also inside of a block, as soon as no call needs it."""
        with self._lock:
            self._explicit = False
            self._blocks.clear()
            self._take_back_unwanted()

    @contextmanager
    def block(self) -> Iterator[None]:
        """`begin` for the length of a `with` block. Blocks nest and overlap: the last one to end takes it back."""
        token = object()
        try:
            with self._lock:
                self._blocks.add(token)
                self._put()
            yield
        finally:
            with self._lock:
                self._blocks.discard(token)
                self._take_back_unwanted()

    def _take_back_unwanted(self) -> None:
        if not self.is_in_place:
            self._take_back()
