"""Files in any file system that fsspec supports."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any, TypeVar

import fsspec
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from kvlayers.errors import KVLayersError, OptionError
from kvlayers.persistence.atomic_file import temporary_name
from kvlayers.persistence.tensor_file import Content
from kvlayers.prefix.backends.contract import Address, ByteRange, StorageBackend, StoredFile, clock, is_of_a_store

Result = TypeVar("Result")

REQUESTS_AT_ONCE = 16
"""Requests for single files that wait for their answers together."""

MODIFIED = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
"""Names that file systems use for the time of the last change. If there are several, the first one counts."""


class FsspecBackend(StorageBackend):
    """The files directly below a URL.

    The file system of fsspec may be used by several threads, and so may this. Its times of last uses are its own.

    Args:
        address: the URL and the options of its file system.

    Raises:
        OptionError: fsspec does not know the scheme, its package is not installed, or it does not have these options.
        CachePathError: it cannot be reached.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address.shown)
        self._address = address
        self._fs, path = _filesystem(address)
        self._root = path.rstrip("/")
        self._uses: dict[str, int] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """As `StorageBackend.prepare`."""
        path = self._at(temporary_name())
        with self._address.reaching(Exception):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(path, b"kvlayers")
            self._fs.rm_file(path)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _each(self, call: Callable[[str], Result], names: Sequence[str]) -> list[Result]:
        """The results of one request for each file, several at once. Each file system has its own errors."""
        with self._address.reaching(Exception), ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
            return list(threads.map(call, names))

    def files(self) -> list[StoredFile]:
        """As `StorageBackend.files`."""
        infos: list[dict[str, Any]] = []
        # Object stores have no empty directories.
        with self._address.reaching(Exception), contextlib.suppress(FileNotFoundError):
            # Some file systems cache listings, but other processes write here, too.
            self._fs.invalidate_cache(self._root)
            infos = self._fs.ls(self._root, detail=True)
        files = [_stored(info) for info in infos if info["type"] == "file" and is_of_a_store(info["name"])]
        with self._lock:
            for file in files:
                self._uses[file.name] = max(file.used, self._uses.get(file.name, 0))
        return files

    def find(self, names: Sequence[str]) -> list[StoredFile | None]:
        """As `StorageBackend.find`."""

        def found(name: str) -> StoredFile | None:
            path = self._at(name)
            self._fs.invalidate_cache(path)
            try:
                info: dict[str, Any] = self._fs.info(path)
            except FileNotFoundError:
                return None
            return _stored(info) if info["type"] == "file" else None

        return self._each(found, names)

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[Content | KVLayersError | None]:
        """As `StorageBackend.read_ranges`; concurrently, if the file system can do that."""
        paths = [self._at(each.name) for each in ranges]
        starts, ends = [each.start for each in ranges], [each.end for each in ranges]
        with self._address.reaching(Exception):
            found: list[bytes | Exception] = self._fs.cat_ranges(paths, starts, ends, on_error="return")
        return [self._content(each) for each in found]

    def _content(self, found: bytes | Exception) -> Content | KVLayersError | None:
        if isinstance(found, FileNotFoundError):
            return None
        return self._address.unreachable(found) if isinstance(found, Exception) else bytes(found)

    def write(self, name: str, content: Content) -> None:
        """As `StorageBackend.write`."""
        with self._address.reaching(Exception):
            self._fs.pipe_file(self._at(name), bytes(content))
        self.touch([name])

    def touch(self, names: Sequence[str]) -> None:
        """As `StorageBackend.touch`; other processes do not see it."""
        with self._lock:
            self._uses.update(clock.uses(names))

    def last_uses(self) -> Mapping[str, int]:
        """When files were last written, or used by this store, since few file systems record reads."""
        with self._lock:
            return dict(self._uses)

    def delete(self, names: Sequence[str], used_before: int | None = None) -> None:
        """As `StorageBackend.delete`. If the file system does not know the age of a file, it is not taken for old."""
        if used_before is not None:
            uses = self.last_uses()
            found = [file for file in self.find(names) if file is not None and file.used]
            names = [file.name for file in found if max(file.used, uses.get(file.name, 0)) < used_before]

        def deleted(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))

        self._each(deleted, names)
        with self._lock:
            for name in names:
                self._uses.pop(name, None)


def _filesystem(address: Address) -> tuple[Any, str]:
    """The file system of a URL, and the path within it."""
    try:
        return url_to_fs(address.url, **address.options)  # type: ignore[no-any-return]
    except ImportError:
        known = known_implementations.get(address.scheme, {})
        raise OptionError(
            f"the package that reaches {address.scheme}:// is not installed "
            f"({known.get('err', 'fsspec does not say which it is')}): install it, or choose another directory."
        ) from None
    except ValueError as error:
        if address.scheme in fsspec.available_protocols():
            raise address.unreachable(error) from None
        raise OptionError(
            f"`directory` must be a path, or a URL of redis:// or a scheme that fsspec knows, got {address.scheme}://: "
            "see fsspec.available_protocols()."
        ) from None
    except TypeError as error:
        raise OptionError(
            f"`storage_options` must be options of {address.scheme}://, got {address.detail(error)}: see the "
            "documentation of its file system in fsspec."
        ) from None
    except Exception as error:
        raise address.unreachable(error) from None


def _stored(info: Mapping[str, Any]) -> StoredFile:
    name = str(info["name"]).rstrip("/").rpartition("/")[2]
    used = _nanoseconds(next((info[key] for key in MODIFIED if info.get(key) is not None), None))
    return StoredFile(name, int(info.get("size") or 0), str(info.get("ETag") or used), used)


def _nanoseconds(time_of: object) -> int:
    """A time in any form that file systems return, in nanoseconds since 1970; 0 for any other value."""
    if isinstance(time_of, str):
        try:
            time_of = datetime.fromisoformat(time_of.replace("Z", "+00:00"))
        except ValueError:
            return 0
    if isinstance(time_of, datetime):
        time_of = (time_of if time_of.tzinfo else time_of.replace(tzinfo=timezone.utc)).timestamp()
    return int(time_of * 10**9) if isinstance(time_of, int | float) else 0
