"""Files in any file system that fsspec supports."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

import fsspec
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from kvlayers.errors import OptionError
from kvlayers.persistence.atomic_file import temporary_name
from kvlayers.prefix.backends.address import Address
from kvlayers.prefix.backends.contract import SUFFIX, StoredFile, UnreachableError
from kvlayers.prefix.backends.object_store import ByteRange

Result = TypeVar("Result")

MODIFIED = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
"""Names that file systems use for the time of the last change. If there are several, the first one counts."""


class FsspecObjectStore:
    """The files directly below a URL.

    Args:
        address: the URL and the options of its file system.

    Raises:
        OptionError: fsspec does not know the scheme, its package is not installed, or it does not have these options.
        CachePathError: it cannot be reached, or cannot be written to.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._fs, path = _filesystem(address)
        self._root = path.rstrip("/")
        self._uses: dict[str, int] = {}
        self._call(self._probe)

    def _probe(self) -> None:
        path = self._at(temporary_name())
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(path, b"kvlayers")
        self._fs.rm_file(path)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, call: Callable[[], Result]) -> Result:
        """The result of a call to the file system. Each file system has its own errors."""
        try:
            return call()
        except Exception as error:
            raise self._address.unreachable(error) from None

    def files(self) -> list[StoredFile]:
        """As `ObjectStore.files`."""

        def listed() -> list[dict[str, Any]]:
            # Some file systems cache listings, but other processes write here, too.
            self._fs.invalidate_cache(self._root)
            try:
                found: list[dict[str, Any]] = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                # Object stores have no empty directories.
                return []
            return found

        infos = self._call(listed)
        files = [_stored(info) for info in infos if info["type"] == "file" and info["name"].endswith(SUFFIX)]
        for file in files:
            self._uses[file.name] = max(file.used, self._uses.get(file.name, 0))
        return files

    def find(self, name: str) -> StoredFile | None:
        """As `ObjectStore.find`."""
        path = self._at(name)

        def found() -> dict[str, Any] | None:
            self._fs.invalidate_cache(path)
            try:
                info: dict[str, Any] = self._fs.info(path)
            except FileNotFoundError:
                return None
            return info

        info = self._call(found)
        return None if info is None or info["type"] != "file" else _stored(info)

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes | UnreachableError]:
        """As `ObjectStore.read_ranges`; concurrently, if the file system can do that."""
        paths = [self._at(file.name) for file, _, _ in ranges]
        starts, ends = [start for _, start, _ in ranges], [end for _, _, end in ranges]

        def read() -> list[bytes | Exception]:
            found: list[bytes | Exception] = self._fs.cat_ranges(paths, starts, ends, on_error="return")
            return found

        return [self._content(each) for each in self._call(read)]

    def _content(self, found: bytes | Exception) -> bytes | UnreachableError:
        if isinstance(found, FileNotFoundError):
            return b""
        return self._address.unreachable(found) if isinstance(found, Exception) else bytes(found)

    def upload(self, path: str, name: str) -> None:
        """As `ObjectStore.upload`."""
        self._call(lambda: self._fs.put_file(path, self._at(name)))
        self.touch(name)

    def delete(self, name: str) -> None:
        """As `ObjectStore.delete`."""

        def deleted() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))

        self._call(deleted)
        self._uses.pop(name, None)

    def last_uses(self) -> Mapping[str, int]:
        """When files were last written, or used by this store, since few file systems record reads."""
        return self._uses

    def touch(self, name: str) -> None:
        """As `ObjectStore.touch`."""
        self._uses[name] = time.time_ns()


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
