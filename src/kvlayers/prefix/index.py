"""The entries of a store, and the memory that they take. Not thread-safe by itself, and it reads and writes no file."""

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvlayers.core.cache import Cache
from kvlayers.errors import CapacityError
from kvlayers.prefix.entry import (
    EvictionOrder,
    EvictionPolicy,
    MemoryAccount,
    MemoryPiece,
    Pin,
    PrefixEntry,
    can_restore,
    packed,
    shares_memory,
    union_bytes,
)
from kvlayers.prefix.keys import PrefixMap, Tokens
from kvlayers.utils.units import exact_bytes

MOST_NEIGHBOURS = 4
"""Entries in files whose blocks a new file may refer to."""

MOST_TRIED = 16
"""Entries that go on behind the same tokens, of which a look-up asks whether they can be rolled back."""

MOST_APART = 3
"""Caches that hold more than so many times the budget do not fit in, whatever they share."""

MOST_PACKED = 2
"""Entries of which one insertion gives back spare room, since this copies."""

MOST_LEFT = 64
"""Prefixes that have left for room, of which `explain` says so."""

LEAST_PART = 32
"""At least one token in so many leaves an entry at a time, since what stays of its own memory is copied."""


class EntryIndex:
    """Entries by label and tokens. The caches in memory never take more than `max_bytes`.

    Args:
        max_bytes: bytes of memory for all caches.
        policy: decides which entry is evicted first.
        has_directory: whether evicted entries are to be written before they leave memory.

    Attributes:
        evictions: how often an entry left memory, is leaving it, or lost its last tokens.
        uses: how often entries were used, which is the time that their uses have.
        left: tokens that have left memory for room, and were not written, the newest last.
        note: is called with each entry whose cache, file or tokens have changed.
        writing: the entry that is being written to a file, which holds its memory.
        stuck: the same one, if that takes too long, so that room is made elsewhere.
        entries: all entries, for reading only.
        in_memory: those of them that are in memory, also while they are leaving it.
        memory: what these hold.
    """

    def __init__(self, max_bytes: int, policy: EvictionPolicy, has_directory: bool) -> None:
        self.max_bytes = max_bytes
        self.has_directory = has_directory
        self.evictions = 0
        self.uses = 0
        self.left: deque[tuple[str, Tokens]] = deque(maxlen=MOST_LEFT)
        self._policy = policy
        # What does nothing, until a listener asks to be told.
        self.note: Callable[[PrefixEntry], object] = id
        self._first_end = math.inf
        self.writing: PrefixEntry | None = None
        self.stuck: PrefixEntry | None = None
        self._start()

    def _start(self) -> None:
        """Have no entries."""
        self.entries = PrefixMap[PrefixEntry]()
        self.in_memory = PrefixMap[PrefixEntry]()
        self._order = EvictionOrder(self._policy)
        self._pinned: dict[PrefixEntry, None] = {}
        self.memory = MemoryAccount()
        self._unpacked: dict[PrefixEntry, None] = {}

    def __contains__(self, entry: PrefixEntry) -> bool:
        return self.entries.get(entry.label, entry.ids) is entry

    # Reading

    def entry_covering(self, label: str, ids: Tokens) -> PrefixEntry | None:
        """An entry in memory that can be rolled back to exactly these tokens, or `None`."""
        tokens, begin_alike = next(self.in_memory.groups(label, ids), (0, ()))
        longer = itertools.islice(begin_alike, MOST_TRIED) if tokens == len(ids) else ()
        return next((entry for entry in longer if can_restore(entry.cache, (tokens,))), None)

    def along(self, label: str, ids: Tokens) -> list[PrefixEntry]:
        """Entries of the first of these tokens, the shortest first, and one that begins with all of them."""
        found = self.entries.prefixes_of(label, ids)
        covering = self.entry_covering(label, ids)
        return found if covering is None or covering in found else [*found, covering]

    def closest_in_memory(
        self, label: str, ids: Tokens, besides: PrefixEntry | None = None
    ) -> tuple[PrefixEntry | None, int]:
        """The entry in memory that begins with most of these tokens, and how many; `None` and 0 without one."""
        return next((each for each in self.in_memory.nearest(label, ids) if each[0] is not besides), (None, 0))

    def neighbours_in_files(self, entry: PrefixEntry) -> list[tuple[str, int]]:
        """Paths of other entries that begin with some of the tokens of `entry`, and how many; the best first."""
        in_files = (
            (each.path, tokens)
            for each, tokens in self.entries.nearest(entry.label, entry.ids)
            if each is not entry and each.path is not None
        )
        return list(itertools.islice(in_files, MOST_NEIGHBOURS))

    def shorter(self, entry: PrefixEntry) -> list[PrefixEntry]:
        """The other entries of the first tokens of an entry, the shortest first."""
        return [old for old in self.entries.prefixes_of(entry.label, entry.ids) if old is not entry]

    # Entries

    def add(self, entry: PrefixEntry) -> None:
        """Add an entry."""
        self.entries.insert(entry.label, entry.ids, entry)
        self.note(entry)

    def touch(self, entry: PrefixEntry, tokens: int) -> None:
        """Record that the first tokens of an entry are used now. If it was leaving memory, it stays."""
        self.uses += 1
        entry.use(tokens, self.uses)
        self.stay(entry)

    def stay(self, entry: PrefixEntry) -> None:
        """Go on holding an entry that was leaving memory."""
        if entry.is_leaving:
            entry.is_leaving = False
            self.memory.stay(entry, 1)
            self._order.add(entry)

    def pin(self, entry: PrefixEntry, pin: Pin) -> None:
        """Pin an entry. If it was leaving memory, it stays."""
        self._first_end = min(self._first_end, pin.until)
        self.stay(entry)
        self.set_pins(entry, (*entry.pins, pin))

    def end_pins(self, ended: Pin | None = None) -> None:
        """Take back the pins whose time is over, and this one."""
        now = time.monotonic()
        if ended is None and now < self._first_end:
            return
        for entry in list(self._pinned):
            self.set_pins(entry, tuple(pin for pin in entry.pins if pin is not ended and pin.until > now))
        self._first_end = min([pin.until for entry in self._pinned for pin in entry.pins], default=math.inf)

    def set_pins(self, entry: PrefixEntry, pins: tuple[Pin, ...]) -> None:
        """Have an entry kept by these pins alone."""
        entry.pins = pins
        self._pinned.pop(entry, None)
        if pins:
            self._pinned[entry] = None
        if entry.cache is not None and not entry.is_leaving:
            self._order.add(entry)

    def remove(self, entry: PrefixEntry) -> None:
        """Remove an entry from the index; its file stays."""
        self.drop_cache(entry)
        self.entries.remove(entry.label, entry.ids)
        self._pinned.pop(entry, None)
        self.note(entry)

    def set_cache(self, entry: PrefixEntry, cache: Cache) -> None:
        """Hold a cache of the tokens of an entry in memory, in place of the one that it may have had."""
        self.drop_cache(entry)
        entry.cache = cache
        self.in_memory.insert(entry.label, entry.ids, entry)
        self.memory.count(entry, cache.storages())
        self._order.add(entry)
        self.note(entry)

    def drop_cache(self, entry: PrefixEntry) -> None:
        """Stop holding the cache of an entry in memory. Memory that it alone has read is given back."""
        if entry.cache is None:
            return
        before = entry.pieces
        entry.cache = None
        self.in_memory.remove(entry.label, entry.ids)
        self._order.discard(entry)
        self.memory.count(entry, {})
        entry.is_leaving = False
        self._unpacked.pop(entry, None)
        self.note(entry)
        # What nobody reads any more of its memory is given back.
        seen: set[MemoryPiece] = set()
        for piece in before:
            # One of the holders trims what all of them share.
            holder = next(iter(piece.holders), None)
            if holder is not None and piece not in seen:
                seen.update(holder.pieces)
                self._trim(holder)

    def _trim(self, entry: PrefixEntry) -> None:
        if entry.cache is not None:
            before = entry.storages
            entry.cache.trim()
            now = entry.cache.storages()
            self.note_moves(before.items() - now.items(), entry)
            self.memory.count(entry, now)

    def note_moves(self, moved: Iterable[tuple[int, int]], by: PrefixEntry | None = None) -> None:
        """Count pieces of memory where they are now, given the addresses and bytes that they had.

        Memory moves for all who hold it, or for the one alone that has moved it. So one of the others is asked, however
        many there are.

        Args:
            moved: address and bytes of each piece.
            by: the entry that has moved them, which is counted later.
        """
        for key in moved:
            piece = self.memory.pieces.get(key)
            one = None if piece is None else next((each for each in piece.holders if each is not by), None)
            if piece is None or one is None or one.cache is None:
                continue
            now = one.cache.storages()
            if now.get(piece.address) == piece.nbytes:
                continue
            places = list(now.items())
            place = places[one.pieces.index(piece)] if len(places) == len(one.pieces) else key
            if place not in self.memory.pieces:
                self.memory.move(piece, *place)
                continue
            # What was there before has not been counted again yet.
            for each in list(piece.holders):
                if each is not by and each.cache is not None:
                    self.memory.count(each, each.cache.storages())

    def leave(self, entry: PrefixEntry) -> None:
        """Stop holding the cache of an entry as soon as the entry is in a file."""
        entry.is_leaving = True
        self.memory.stay(entry, -1)
        self._order.discard(entry)

    def set_file(self, entry: PrefixEntry, path: str, nbytes: int) -> None:
        """Record the file of an entry, which leaves memory if it was to."""
        entry.path, entry.file_bytes = path, nbytes
        self.note(entry)
        if entry.is_leaving:
            self.drop_cache(entry)

    def drop_file(self, entry: PrefixEntry) -> None:
        """Stop using the file of an entry, which is gone or damaged."""
        entry.path, entry.file_bytes = None, 0
        self.note(entry)
        if entry.cache is None and entry in self:
            self.remove(entry)

    def update(self, added: Sequence[PrefixEntry], gone: Collection[str]) -> int:
        """Apply changes that other processes have made to the files.

        Returns:
            Number of entries that were added.
        """
        for entry in list(self.entries):
            if entry.path in gone:
                self.drop_file(entry)
        before = len(self.entries)
        for entry in added:
            known = self.entries.get(entry.label, entry.ids)
            if known is None:
                self.add(entry)
            elif known.path is None and known.boundaries <= entry.boundaries:
                self.set_file(known, str(entry.path), entry.file_bytes)
        return len(self.entries) - before

    def clear(self) -> list[str]:
        """Remove all entries, pinned or not, and return the paths of their files."""
        entries = list(self.entries)
        # At once, or memory would be moved for entries that go next.
        self._start()
        for entry in entries:
            entry.cache, entry.pieces, entry.is_leaving = None, (), False
            self.note(entry)
        return [entry.path for entry in entries if entry.path is not None]

    # Memory

    def use_covering(self, label: str, ids: Tokens) -> bool:
        """Whether an entry in memory can be rolled back to exactly these tokens. If so, it is used now."""
        covering = self.entry_covering(label, ids)
        if covering is not None:
            covering.boundaries.add(len(ids))
            self.touch(covering, len(ids))
        return covering is not None

    def check_room(self, entry: PrefixEntry, cache: Cache, replaced: Sequence[PrefixEntry]) -> None:
        """Raise `CapacityError` unless a cache can enter memory besides the entries that never leave."""
        self.end_pins()
        nbytes = self._bytes_of([(entry, cache)])
        if nbytes > self.max_bytes:
            raise CapacityError(
                f"the cache must fit into the store's max_bytes of {exact_bytes(self.max_bytes)}, got one of "
                f"{exact_bytes(nbytes)}: make the store with a larger max_bytes."
            )
        if self.memory.nbytes + nbytes <= self.max_bytes:
            # Whatever of it is pinned. There may be many thousands of entries.
            return
        pinned = [
            (each, each.cache)
            for each in self._pinned
            if each.cache is not None and each.priority == math.inf and each not in (entry, *replaced)
        ]
        if pinned and self._bytes_of([*pinned, (entry, cache)]) > self.max_bytes:
            raise CapacityError(
                f"there is no room for {exact_bytes(nbytes)}, as {exact_bytes(self._bytes_of(pinned))} of "
                f"{exact_bytes(self.max_bytes)} are pinned: unpin() entries, or make the store with a larger max_bytes."
            )

    def _bytes_of(self, held: Sequence[tuple[PrefixEntry, Cache]]) -> int:
        """Bytes that caches need by themselves. If all that they hold fits, it is counted, whoever reads it."""
        nbytes = union_bytes(cache.storages() for _, cache in held)
        # What others hold too is part of the budget, and spare room is less than what is held.
        if not self.max_bytes < nbytes <= MOST_APART * self.max_bytes:
            return nbytes
        return union_bytes(cache.storages() for cache in _packed_together(held))

    def enter(
        self, entry: PrefixEntry, cache: Cache, replaced: Sequence[PrefixEntry]
    ) -> tuple[bool, list[PrefixEntry]]:
        """Let a cache enter memory, and what it replaces leave, if there is room for it now.

        If not, there is room when what is leaving has left.

        Args:
            entry: the entry that is to hold the cache.
            cache: the cache, to which nobody will write.
            replaced: shorter entries that the cache can be rolled back to.

        Returns:
            Whether it has entered, and entries that must be written before they leave.
        """
        staying = [old for old in replaced if old.cache is not None and not old.is_leaving]
        # Policies go by the uses of an entry, so it has one before it is ranked.
        self.touch(entry, entry.length)
        # Held like all others from the beginning, since to evict may move what it shares with them. Nobody finds it
        # before there is room.
        self.set_cache(entry, cache)
        self._unpacked[entry] = None
        for old in staying:
            self.leave(old)
        gone = [old for old in replaced if old is not self.writing]
        leaving = self.evict(self.max_bytes, entry)
        if len(gone) == len(replaced) and self.memory.staying_bytes > self.max_bytes:
            others = [each for each in self.in_memory if each not in (entry, *replaced)]
            if not any(each.is_leaving or each is self.writing for each in others):
                # All that can leave has left, but these hold memory that it has shared with them.
                self._move_apart((entry, *others))
        if self.memory.bytes_without(gone) > self.max_bytes:
            self.drop_cache(entry)
            for old in staying:
                self.stay(old)
            return False, leaving
        self.add(entry)
        for old in replaced:
            entry.boundaries |= old.boundaries
            entry.hits, old.hits = entry.hits + old.hits, 0
            entry.used = max((used for used in (entry.used, old.used) if used is not None), default=None)
            if old.path is not None:
                # Its file stays until the new entry is in a file.
                self.drop_cache(old)
            elif old is not self.writing:
                self.remove(old)
        return True, leaving

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count all memory anew if an interrupt ends this context, such as by Ctrl-C: it may have come in between.

        What has not entered by then is forgotten, as is what has lost its cache and has no file, and what was leaving
        stays.
        """
        try:
            yield
        except CapacityError:
            # That there is no room is known before anything changes.
            raise
        except BaseException:
            entries = list(self.entries)
            self._start()
            for entry in entries:
                cache, entry.cache, entry.pieces, entry.is_leaving = entry.cache, None, (), False
                self.note(entry)
                if cache is not None or entry.path is not None:
                    self.entries.insert(entry.label, entry.ids, entry)
                    self.set_pins(entry, entry.pins)
                if cache is not None:
                    self.set_cache(entry, cache)
                    self._unpacked[entry] = None
            raise

    def evict(self, most: int, kept: PrefixEntry | None = None) -> list[PrefixEntry]:
        """Evict entries until those that stay take at most `most` bytes, or no other one can leave.

        Args:
            most: bytes; 0 for all entries.
            kept: an entry that stays.

        Returns:
            Entries that must be written before they leave.
        """
        self.end_pins()
        must_be_written: list[PrefixEntry] = []
        # If everything goes, nothing has to be moved.
        unpacked = (each for each in self._unpacked if not each.is_leaving)
        for each in list(itertools.islice(unpacked, MOST_PACKED)) if most > 0 else ():
            if self.memory.staying_bytes > most:
                self._unpacked.pop(each, None)
                self._pack(each, each.length)
        stay = [each for each in (kept, self.stuck) if each is not None]
        for each in stay:
            self._order.discard(each)
        while self.memory.staying_bytes > most and (entry := self._order.first()) is not None:
            self.evictions += 1
            if entry.path is not None:
                self.drop_cache(entry)
            elif self.has_directory:
                self.leave(entry)
                must_be_written.append(entry)
            else:
                self.left.append((entry.label, entry.ids))
                self._shorten(entry, most)
        for each in stay:
            # One that is being written may be leaving already, for an entry that replaces it.
            if each.cache is not None and not each.is_leaving:
                self._order.add(each)
        return must_be_written

    def _shorten(self, entry: PrefixEntry, most: int) -> None:
        """Drop the last tokens of an entry: as many as needed of those that no other entry has, and of the oldest use.

        If none stay, the entry is removed.
        """
        closest, shared = self.closest_in_memory(entry.label, entry.ids, besides=entry)
        least = max([shared, *(length for length in entry.uses if length < entry.length)])
        step = entry.length // LEAST_PART + 1
        stays = most > 0 and entry.cache is not None and shares_memory(entry.cache)
        while stays and entry.length > least and (surplus := self.memory.staying_bytes - most) > 0:
            nbytes = sum(piece.nbytes for piece in entry.pieces)
            length = max(entry.length - max(surplus * entry.length // nbytes, step), least)
            stays = length > shared and can_restore(entry.cache, (length,))
            if stays:
                self._pack(entry, length)
        if stays and entry.length > shared:
            # What stays may have been used later than other entries.
            return
        if closest is not None:
            for tokens, time in entry.uses.items():
                closest.use(min(tokens, shared), time)
        self.remove(entry)

    def _pack(self, entry: PrefixEntry, length: int) -> None:
        """Hold the first tokens of an entry alone: where another entry has them, the others in memory of their own."""
        if self.has_directory:
            # Copies would take memory until what is leaving is in files.
            self._trim(entry)
            return
        if entry.cache is None or not shares_memory(entry.cache):
            return
        closest, shared = self.closest_in_memory(entry.label, entry.ids[:length], besides=entry)
        before, cache, pieces = self.memory.nbytes, entry.cache, entry.pieces
        beside = None if closest is None else closest.cache
        self.set_cache(entry, packed(entry.fork(cache, length), length, beside, shared))
        if self.memory.nbytes > before:
            # What it held stays, as a caller goes on with what others share with it.
            self.set_cache(entry, entry.fork(cache, length))
        del cache, beside
        is_shorter = length < entry.length
        if is_shorter:
            for held in (self.entries, self.in_memory):
                held.remove(entry.label, entry.ids)
            entry.cut(length)
            for held in (self.entries, self.in_memory):
                held.insert(entry.label, entry.ids, entry)
        self._trim(entry)
        if is_shorter and self.memory.nbytes >= before:
            # A caller holds what this entry has left, so the others that read some of it move.
            self._move_apart(dict.fromkeys(holder for piece in pieces for holder in piece.holders))

    def _move_apart(self, entries: Collection[PrefixEntry]) -> None:
        """Hold entries in memory that they share with each other alone, if that is less."""
        in_order = sorted((each for each in entries if each.cache is not None), key=lambda entry: entry.last_use)
        # Nothing else here holds the caches, so each one's memory is free as soon as it is replaced.
        moved = _packed_together([(entry, entry.cache) for entry in in_order if entry.cache is not None])
        before = union_bytes(entry.storages for entry in in_order)
        if union_bytes(cache.storages() for cache in moved) < before:
            for entry, cache in zip(in_order, moved, strict=True):
                self.set_cache(entry, cache)


def _packed_together(held: Sequence[tuple[PrefixEntry, Cache]]) -> list[Cache]:
    """Forks of the caches of entries, which have the memory that they need together, and share it with nobody else."""
    known = PrefixMap[Cache]()
    forks: list[Cache] = []
    for entry, cache in held:
        beside, shared = next(known.nearest(entry.label, entry.ids), (None, 0))
        forks.append(packed(cache.fork(), entry.length, beside, shared))
        known.insert(entry.label, entry.ids, forks[-1])
    return forks
