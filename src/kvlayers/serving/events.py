"""What a store has and has no longer, told to a listener: for routers that send a prompt where its prefix is."""

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvlayers.errors import OptionError
from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.index import EntryIndex
from kvlayers.prefix.keys import Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreEvent:
    """A prefix that a store has now, or has no longer.

    Attributes:
        kind: "stored" or "removed". A prefix that loses its last tokens is removed, and its beginning is stored.
        key: `key_of(ids)` of its tokens.
        tokens: number of its tokens.
        nbytes: bytes of its memory, or of its files, which others may share.
        namespace: `namespace_mark(namespace)` of its namespace.
        where: "memory" or "files".
        model: a text that is the same for the same model, cache and namespace.
    """

    kind: "Kind"
    key: str
    tokens: int
    nbytes: int
    namespace: str
    where: Literal["memory", "files"]
    model: str


Kind = Literal["stored", "removed"]
Held = tuple[Literal["memory", "files"], str, int, int]
"""Where a prefix is, its key, its tokens and bytes."""


def key_of(ids: Tokens) -> str:
    """The SHA-256 of token ids `[tokens]` as int64, the least byte of each first.

    Example:
        >>> import numpy as np
        >>> key_of(np.array([1, 2]))[:8]
        '0c730b69'
    """
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


class Announcer:
    """Tells a listener what has changed, in a thread of its own, which starts with the first change.

    The listener is called without any lock, one event at a time, in order. What comes and goes in between is not told.

    Args:
        on_event: the listener. If it raises, the first error is logged, and it goes on being told.
        index: the entries of the store.
        lock: the lock of the store.

    Raises:
        OptionError: `on_event` cannot be called.
    """

    def __init__(self, on_event: Callable[[StoreEvent], object], index: EntryIndex, lock: threading.Lock) -> None:
        if not callable(on_event):
            raise OptionError(
                f"`on_event` must be a function of one event, got {on_event!r}: pass one, or leave it out."
            )
        self._on_event, self._index, self._lock = on_event, index, lock
        self._changed: dict[PrefixEntry, None] = {}
        self._told: dict[PrefixEntry, set[Held]] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def note(self, entry: PrefixEntry) -> None:
        """Note that an entry has changed, in a thread that has the lock."""
        self._changed[entry] = None
        self._wake.set()
        # A process that was forked has no threads.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._tell_all, name="kvlayers-prefix-events", daemon=True)
            self._thread.start()

    def _tell_all(self) -> None:
        while self._wake.wait():
            with self._lock:
                self._wake.clear()
                events = [event for entry in self._changed for event in self._news(entry)]
                self._changed.clear()
            for event in events:
                try:
                    self._on_event(event)
                except Exception:
                    if not self._has_failed:
                        logger.exception("The listener of a prefix store has failed; its next errors are not logged")
                    self._has_failed = True

    def _news(self, entry: PrefixEntry) -> list[StoreEvent]:
        before, key = self._told.pop(entry, set[Held]()), key_of(entry.ids)
        now = set[Held]()
        if entry.cache is not None:
            now.add(("memory", key, entry.length, sum(entry.storages.values())))
        if entry.path is not None and entry in self._index:
            now.add(("files", key, entry.length, entry.file_bytes))
        if now:
            self._told[entry] = now
        mark, model = entry.label.rpartition(":")[2], entry.label
        changes: dict[Kind, set[Held]] = {"removed": before - now, "stored": now - before}
        return [
            StoreEvent(kind, own, tokens, nbytes, mark, place, model)
            for kind, held in changes.items()
            for place, own, tokens, nbytes in held
        ]
