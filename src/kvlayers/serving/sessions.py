"""Sessions: what one conversation holds in a store, by a name, and the file that takes it to another host."""

import json
import logging
import math
import os
import re
import time
import zipfile
from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

import torch
from typing_extensions import Self

from kvlayers.errors import CacheFileError, CachePathError, OptionError, PrefixError
from kvlayers.persistence.atomic_file import replacing
from kvlayers.persistence.node_file import SUFFIX
from kvlayers.persistence.tensor_file import check_regular
from kvlayers.prefix import PrefixStore
from kvlayers.prefix.backends.local import LocalBackend
from kvlayers.prefix.directory import Directory, NeedsConfigError
from kvlayers.prefix.entry import Pin, PrefixEntry, union_bytes
from kvlayers.prefix.keys import PrefixMap, Tokens, common_tokens, namespace_mark
from kvlayers.prefix.lookup import IN_SESSION, EntryAccess
from kvlayers.utils.units import readable_bytes

logger = logging.getLogger(__name__)

NAME_FIELD, OPTIONS_FIELD = "prompt_cache_key", "metadata"
"""The field with the name of a session, and the one with `cache_ttl` and `cache_priority`, numbers as texts."""

MOST_BRANCHES = 16
"""Texts of a session that do not begin with each other, as answers that were asked for again. The oldest ones go."""

MOST_SECONDS = 3600.0
"""Seconds without use after which a session expires that says nothing else."""

_NODE = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))


def pin_of(ttl: float | None, priority: float | None) -> Pin:
    """A pin that lasts from now on, for good without `ttl`, and keeps from any eviction without `priority`.

    Raises:
        OptionError: `ttl` is no positive number of seconds, or `priority` is not a finite number.
    """
    for name, number in (("ttl", ttl), ("priority", priority)):
        if number is not None and (not isinstance(number, int | float) or not math.isfinite(number)):
            raise OptionError(f"`{name}` must be a finite number, or None, got {number!r}: pass one.")
    if ttl is not None and ttl <= 0:
        raise OptionError(f"`ttl` must be a number of seconds above 0, or None, got {ttl!r}: pass for example 3600.")
    until = math.inf if ttl is None else time.monotonic() + ttl
    return Pin(until, math.inf if priority is None else float(priority))


class Session:
    """What one conversation holds in a store. `PrefixStore.session` makes it.

    In a `with` block, what this thread inserts belongs to the session: by calls of `generate()`, or turns of a `Chat`.
    It leaves the store as everything does, unless the session is pinned. A session that was not used for `ttl` seconds
    has expired, and names nothing any more.

    Attributes:
        name: its name, any text. It never becomes part of a path.
        ttl: seconds without use after which it expires, unless it is pinned for longer.
        access: the entries of its store.

    Example:
        >>> import torch, kvlayers
        >>> store, cache = kvlayers.PrefixStore("1MiB"), kvlayers.DynamicCache()
        >>> _ = cache.update(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), layer_idx=0)
        >>> with store.session("user-17") as session:
        ...     _ = store.insert(torch.arange(5), cache, model="mine")
        >>> session
        Session('user-17', 5 tokens, 1.25 KiB)
    """

    def __init__(self, name: str, ttl: float, access: EntryAccess) -> None:
        self.name, self.ttl, self.access = name, ttl, access
        self._end = time.monotonic() + ttl
        self._texts: list[tuple[str, Tokens]] = []
        self._pin: Pin | None = None

    def __enter__(self) -> Self:
        # Threads and tasks may be in it at the same time, each in a context of its own.
        IN_SESSION.set((*IN_SESSION.get(), self))
        with self.access.lock:
            self._texts = self._texts if self.seconds_left else []
            self._end = time.monotonic() + self.ttl
        return self

    def __exit__(self, *error: object) -> None:
        IN_SESSION.set(IN_SESSION.get()[:-1])

    @property
    def seconds_left(self) -> float:
        """Seconds until it expires if nobody uses it; 0 if it has expired, and infinity if it is pinned for good."""
        return max(self._end - time.monotonic(), *(pin.until - time.monotonic() for pin in self.pins), 0.0)

    def pins_in(self, access: EntryAccess) -> list[Pin]:
        """What keeps what is inserted into a store now."""
        return self.pins if access is self.access else []

    @property
    def pins(self) -> list[Pin]:
        """What keeps its entries: nothing, or one pin."""
        return [] if self._pin is None or self._pin.until <= time.monotonic() else [self._pin]

    def add(self, access: EntryAccess, label: str, ids: Tokens) -> None:
        """Note that tokens were inserted into a store, by a thread that has its lock. Only those of its own count."""
        if access is not self.access:
            return
        texts = [(own, text, common_tokens(text, ids) if own == label else 0) for own, text in self._texts]
        if not any(tokens == len(ids) for _, _, tokens in texts):
            others = [(own, text) for own, text, tokens in texts if tokens < len(text)]
            self._texts = [*others, (label, ids)][-MOST_BRANCHES:]
        # Also if it has expired since its block began, as a turn may take longer.
        self._end = time.monotonic() + self.ttl
        self._pin_all()

    def _entries(self) -> dict[PrefixEntry, Tokens]:
        """What is stored of its texts, the shortest first, and those of the tokens that are its own."""
        found: dict[PrefixEntry, Tokens] = {}
        for label, text in self._texts if self.seconds_left else ():
            found |= {entry: text[: entry.length] for entry in self.access.index.along(label, text)}
        return dict(sorted(found.items(), key=lambda item: len(item[1])))

    def _pin_all(self) -> None:
        for pin in self.pins:
            for entry in self._entries():
                if pin not in entry.pins:
                    self.access.index.pin(entry, pin)

    @property
    def tokens(self) -> int:
        """Tokens of its texts that the store has, in memory or in files. What several begin with counts once."""
        trees = PrefixMap[bool]()
        with self.access.lock:
            for entry, ids in self._entries().items():
                trees.insert(entry.label, ids, True)
        return trees.tokens

    @property
    def bytes(self) -> int:
        """Bytes of memory of the entries that have these tokens, which others may share."""
        with self.access.lock:
            return union_bytes(entry.storages for entry in self._entries())

    def pin(self, ttl: float | None = None, priority: float | None = None) -> None:
        """Keep all that the store has of the session, and what is inserted for it later. It replaces an earlier pin.

        Args:
            ttl: seconds after which this ends, as for `PrefixStore.pin`.
            priority: as for `PrefixStore.pin`.

        Raises:
            OptionError: as `PrefixStore.pin`.
        """
        pin = pin_of(ttl, priority)
        with self.access.lock:
            self.access.index.end_pins(self._pin)
            self._pin = pin
            self._pin_all()

    def unpin(self) -> None:
        """End `pin`, if it was called."""
        with self.access.lock:
            self.access.index.end_pins(self._pin)
            self._pin = None

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write all that the store has of the session to one file, for `PrefixStore.import_session` on any host.

        Args:
            path: the file. An existing file is replaced as a whole.

        Returns:
            Number of tokens that were written; what several texts begin with counts once.

        Raises:
            PrefixError: the store has nothing of it any more, or it has expired; or it has texts of several namespaces.
            CachePathError: the file cannot be written.
            KVLayersError: its caches are of a kind that cannot be loaded from a file.
        """
        with self.access.lock:
            wanted = [(entry.label, ids) for entry, ids in self._entries().items()]
        if len({label.rpartition(":")[2] for label, _ in wanted}) > 1:
            raise PrefixError(
                f"the session {self.name!r} must have texts of one namespace to be exported, got several, into none of "
                "which a file of them could be imported: use a session for each."
            )
        trees, paths = PrefixMap[str](), list[str]()
        with replacing(os.fspath(path)) as temporary, TemporaryDirectory(ignore_cleanup_errors=True) as place:
            directory = Directory(LocalBackend(place))
            for label, ids in wanted:
                hit = self.access.find(label, ids, None, None, MOST_SECONDS)
                if hit.cache is not None:
                    ids = ids[: hit.covered]
                    paths.append(
                        directory.write(label, ids, {len(ids)}, hit.cache, list(trees.nearest(label, ids))[:4])[0]
                    )
                    trees.insert(label, ids, paths[-1])
            if not paths:
                raise PrefixError(f"the store has nothing of the session {self.name!r}: it has left, or has expired.")
            with zipfile.ZipFile(temporary, "w") as archive:
                archive.comment = json.dumps(self.name).encode()
                for name in sorted(os.listdir(place)):
                    archive.write(os.path.join(place, name), name)
        return trees.tokens

    def __repr__(self) -> str:
        return f"Session({self.name!r}, {self.tokens} tokens, {readable_bytes(self.bytes)})"


def session_of(access: EntryAccess, name: str, namespace: str, ttl: float) -> Session:
    """As `PrefixStore.session`, given the entries of the store."""
    # An exported file has it in its comment.
    is_name = isinstance(name, str) and name and len(json.dumps(name)) <= zipfile.ZIP_MAX_COMMENT
    if not is_name or not isinstance(namespace, str):
        raise OptionError(
            f"`name` must be a text of at most {zipfile.ZIP_MAX_COMMENT} bytes, and `namespace` a text, got "
            f"{name!r:.60} and {namespace!r:.60}: pass str(name), for example."
        )
    if ttl != math.inf:
        pin_of(ttl, None)
    with access.lock:
        # Sessions that have ended go whenever one is made.
        access.sessions = {key: own for key, own in access.sessions.items() if own.seconds_left}
        session: Session = access.sessions.setdefault((namespace, name), Session(name, ttl, access))
        session.ttl = ttl
        return session


def import_session(
    access: EntryAccess,
    path: str | os.PathLike[str],
    name: str | None,
    config: object | None,
    namespace: str,
    device: torch.device | str | None,
    wait_seconds: float,
) -> Session:
    """As `PrefixStore.import_session`, given the entries of the store."""
    path = os.fspath(path)
    check_regular(path)
    with TemporaryDirectory(ignore_cleanup_errors=True) as place:
        try:
            exported = _unpack(path, place)
        except OSError as error:
            raise CachePathError(f"{path} cannot be read: {error}.") from error
        except (zipfile.BadZipFile, ValueError, RuntimeError, EOFError) as error:
            raise CacheFileError(f"{path} holds no session that export() has written: {error}.") from error
        directory = Directory(LocalBackend(place))
        entries = sorted(directory.changes(()).added, key=lambda entry: entry.length)
        if not all(entry.label.endswith(f":{namespace_mark(namespace)}") for entry in entries):
            raise PrefixError(f"{path} has a session of another namespace than {namespace!r}: pass its own.")
        try:
            loaded = [(entry, directory.load(str(entry.path), entry.length, config, device)) for entry in entries]
        except NeedsConfigError:
            raise OptionError(
                f"`config` must be that of the model to load {path}, got none: pass model.config."
            ) from None
        whole = [(entry, cache) for entry, cache in loaded if cache is not None and cache.length == entry.length]
        if not entries or directory.damaged_files or len(whole) < len(entries):
            raise CacheFileError(f"{path} is damaged: some of its tokens cannot be loaded.")
    session = session_of(access, exported if name is None else name, namespace, MOST_SECONDS)
    for entry, cache in whole:
        access.insert(entry.label, entry.ids, cache, wait_seconds, session.pins)
        with access.lock:
            session.add(access, entry.label, entry.ids)
    return session


def _unpack(path: str, place: str) -> str:
    """Write the nodes in a file to a directory, and return the name of the session."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        # Members may overlap, so that their sum is many times the file.
        if sum(member.file_size for member in members) > os.path.getsize(path):
            raise ValueError("its parts have more bytes than the file")
        for member in members:
            if not _NODE.fullmatch(member.filename):
                raise ValueError(f"it has a part {member.filename!r:.80}")
            archive.extract(member, place)
        return str(json.loads(archive.comment))


def enter_session(store: PrefixStore, namespace: str, body: Mapping[str, Any]) -> None:
    """Let what this request inserts belong to the session that it names, in the context that is copied for its thread.

    A client that passes a time keeps the session for so long, with a finite priority: what has less leaves first. The
    server answers whatever a client has written: what is no time or no priority is logged.
    """
    name, options = body.get(NAME_FIELD), body.get(OPTIONS_FIELD)
    if not isinstance(name, str) or not name:
        return
    try:
        session = store.session(name, namespace)
        IN_SESSION.set((session,))
        if isinstance(options, Mapping) and "cache_ttl" in options:
            session.pin(float(options["cache_ttl"]), float(options.get("cache_priority", 1)))
    except (TypeError, ValueError, OverflowError, OptionError) as error:
        logger.warning("A request does not keep its session: %.300s", error)
