"""What a prefix store needs from the places of its files, and how the URLs of these places are shown."""

import contextlib
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote

from kvlayers.errors import CachePathError, KVLayersError
from kvlayers.persistence.node_file import SUFFIX
from kvlayers.persistence.tensor_file import Content

ABANDONED_SECONDS = 3600
"""A file that no entry needs is deleted if nobody has used it for so long."""

USE_STEP_NS = 1000
"""Nanoseconds between two uses that are recorded together, the least that every backend can tell apart."""


class UnreachableError(CachePathError):
    """A backend does not answer now, so that it is unknown whether a file exists."""


class GoneError(CachePathError):
    """A file was deleted since it was listed."""


@dataclass(frozen=True)
class StoredFile:
    """A file in the listing of a backend.

    Attributes:
        name: its name.
        nbytes: its size in bytes.
        version: differs between different contents under the same name, as far as the backend can tell.
        used: time of the last read or write, as far as the backend knows, in nanoseconds since 1970.
    """

    name: str
    nbytes: int
    version: str = field(default="", repr=False)
    used: int = field(default=0, compare=False)


def is_of_a_store(name: str) -> bool:
    """Whether a file may be one of a store, which writes no names with characters that a terminal might obey."""
    return name.endswith(SUFFIX) and name.isprintable()


class ByteRange(NamedTuple):
    """A range of bytes of a file: from `start` up to, but not including, `end`."""

    name: str
    start: int
    end: int


class StorageBackend(ABC):
    """Files by name. A file exists completely or not at all, as far as the underlying storage can ensure that.

    All methods may be called by several threads at once. They raise `UnreachableError` if it is unknown whether a file
    exists. Methods that take several files ask for all of them together, where the storage can answer that.

    Args:
        place: the directory, or its URL without credentials.
    """

    def __init__(self, place: str) -> None:
        self.place = place

    def path_of(self, name: str) -> str:
        """The path of a file in messages to users: it ends with the name, and has no credentials."""
        return f"{self.place}/{name}"

    @abstractmethod
    def prepare(self) -> None:
        """Make the directory if it does not exist, and delete what writers that were killed have left unfinished.

        Raises:
            CachePathError: it cannot be made, read or written to.
        """

    @abstractmethod
    def files(self) -> list[StoredFile]:
        """All files that may be those of a store, in no particular order."""

    @abstractmethod
    def find(self, names: Sequence[str]) -> list[StoredFile | None]:
        """Each file as it is now, `None` if it does not exist."""

    @abstractmethod
    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[Content | KVLayersError | None]:
        """The bytes of each range, fewer if the file is shorter, or the error that reading them raised.

        One file does not hide the others. `None` stands for a file that does not exist. A local file is mapped into
        memory. The bytes are what the storage returned: whoever knows a size or a digest of them compares it.
        """

    @abstractmethod
    def write(self, name: str, content: Content) -> None:
        """Write a file, and replace the file of this name. When this returns, a crash does not lose it.

        Raises:
            CachePathError: the file cannot be written.
        """

    @abstractmethod
    def touch(self, names: Sequence[str]) -> None:
        """Record that files are used now, the last one last, as far as the storage can. No file is made."""

    @abstractmethod
    def last_uses(self) -> Mapping[str, int]:
        """Time of the last read or write of each file, by name, in nanoseconds since 1970."""

    @abstractmethod
    def delete(self, names: Sequence[str], used_before: int | None = None) -> None:
        """Delete files, if they exist.

        Args:
            names: their names.
            used_before: files used at this time or later stay, nanoseconds since 1970. It is looked up as late as the
                storage can, since another process may come to need a file that nobody did. Default: no file stays.
        """


class _Clock:
    """Times of uses, in nanoseconds since 1970. Threads may share it."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = threading.Lock()

    def uses(self, names: Sequence[str]) -> dict[str, int]:
        """A time for each name, later than all before, however coarse the clock is and also if it goes back."""
        with self._lock:
            start = max(time.time_ns(), self._next)
            self._next = start + USE_STEP_NS * len(names)
        return {name: start + USE_STEP_NS * place for place, name in enumerate(names)}


clock = _Clock()
"""The clock of all backends of this process."""

MAX_DETAIL = 300
"""Characters of another library's error message that are passed on."""


class Address:
    """A URL and the options for the library that reaches it.

    Args:
        url: a URL with a scheme.
        options: options of the library.

    Example:
        >>> Address("redis://me:secret@host:6379/0?ssl_password=other", {})
        redis://***@host:6379/0
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url = url
        self.options = dict(options)
        self.scheme, _, rest = url.partition("://")
        # If a password contains a character that should have been escaped, its end is unknown, and nothing is shown.
        found = re.fullmatch(r"(?:[^/?#@]*(@))?([^?#@]*)(?:[?#][^@]*)?", rest)
        place = "***" if found is None else f"{'***@' * bool(found[1])}{found[2].rstrip('/')}"
        self.shown = f"{self.scheme}://{place}"
        self._secrets = {secret for secret in (*_parts(rest), *_strings(self.options)) if secret}

    def __repr__(self) -> str:
        return self.shown

    def detail(self, error: BaseException) -> str:
        """The error of another library on one line; only its class if the message repeats a secret."""
        kind, text = type(error).__name__, " ".join(str(error).split())
        if not text or not text.isprintable() or any(secret in text for secret in self._secrets):
            return kind
        return f"{kind}: {text[:MAX_DETAIL].rstrip('.')}"

    @contextlib.contextmanager
    def reaching(self, *failures: type[Exception]) -> Iterator[None]:
        """Raise `UnreachableError` in the place of these errors of another library."""
        try:
            yield
        except failures as error:
            raise self.unreachable(error) from None

    def unreachable(self, error: BaseException) -> UnreachableError:
        """The error to raise if another library cannot reach the URL.

        Raise it `from None`, since the original error may contain credentials.
        """
        return UnreachableError(
            f"cannot reach {self.shown}, got {self.detail(error)}: check that it exists, and that it can be read and "
            "written to from here."
        )


def _parts(rest: str) -> Iterator[str]:
    """The parts of a URL that may be credentials: before the host, and after a question mark."""
    credentials, _, _ = rest.rpartition("@")
    query = rest.partition("?")[2]
    found = [credentials, *re.split("[:/]+", credentials), *(text.partition("=")[2] for text in query.split("&"))]
    for text in found:
        yield from (text, unquote(text))


def _strings(options: object) -> Iterator[str]:
    """All strings in options, at any depth."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, Mapping | list | tuple):
        for value in options.values() if isinstance(options, Mapping) else options:
            yield from _strings(value)
