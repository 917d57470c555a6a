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

    def __bool__(self) -> bool:
        return self._explicit or bool(self._blocks)

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
        """Take it back, also inside of a block."""
        with self._lock:
            self._explicit = False
            self._blocks.clear()
            self._take_back()

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
        if not self:
            self._take_back()
