"""Files in any file system that fsspec reaches."""

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
from kvlayers.prefix.backends.objects import Range

Result = TypeVar("Result")

MODIFIED = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
"""What file systems call the time of the last change; where there are several, the first of these is meant."""


class FsspecObjects:
    """The files directly below a URL.

    Args:
        address: the URL, and the options of its file system.

    Raises:
        OptionError: fsspec does not know the scheme, its package is not installed, or it has other options.
        CachePathError: it cannot be reached, or not be written to.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._fs, path = _filesystem(address)
        self._root = path.rstrip("/")
        self._uses: dict[str, int] = {}
        self._asked(self._probe)

    def _probe(self) -> None:
        path = self._at(temporary_name())
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(path, b"kvlayers")
        self._fs.rm_file(path)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _asked(self, call: Callable[[], Result]) -> Result:
        """What a call returns that may fail as file systems do: each has errors of its own."""
        try:
            return call()
        except Exception as error:
            raise self._address.unreachable(error) from None

    def files(self) -> list[StoredFile]:
        """As `Objects.files`."""

        def listed() -> list[dict[str, Any]]:
            # Listings are kept by some, and others write here too.
            self._fs.invalidate_cache(self._root)
            try:
                found: list[dict[str, Any]] = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                # Object stores have no empty directories.
                return []
            return found

        infos = self._asked(listed)
        files = [_stored(info) for info in infos if info["type"] == "file" and info["name"].endswith(SUFFIX)]
        for file in files:
            self._uses[file.name] = max(file.used, self._uses.get(file.name, 0))
        return files

    def find(self, name: str) -> StoredFile | None:
        """As `Objects.find`."""
        path = self._at(name)

        def found() -> dict[str, Any] | None:
            self._fs.invalidate_cache(path)
            try:
                info: dict[str, Any] = self._fs.info(path)
            except FileNotFoundError:
                return None
            return info

        info = self._asked(found)
        return None if info is None or info["type"] != "file" else _stored(info)

    def ranges(self, wanted: Sequence[Range]) -> list[bytes | UnreachableError]:
        """As `Objects.ranges`: at once, where the file system can do that."""
        paths = [self._at(file.name) for file, _, _ in wanted]
        starts, ends = [start for _, start, _ in wanted], [end for _, _, end in wanted]

        def read() -> list[bytes | Exception]:
            found: list[bytes | Exception] = self._fs.cat_ranges(paths, starts, ends, on_error="return")
            return found

        return [self._content(each) for each in self._asked(read)]

    def _content(self, found: bytes | Exception) -> bytes | UnreachableError:
        if isinstance(found, FileNotFoundError):
            return b""
        return self._address.unreachable(found) if isinstance(found, Exception) else bytes(found)

    def upload(self, path: str, name: str) -> None:
        """As `Objects.upload`."""
        self._asked(lambda: self._fs.put_file(path, self._at(name)))
        self.touch(name)

    def delete(self, name: str) -> None:
        """As `Objects.delete`."""

        def deleted() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))

        self._asked(deleted)
        self._uses.pop(name, None)

    def uses(self) -> Mapping[str, int]:
        """When files were last written, or used by this store: few file systems keep when they were read."""
        return self._uses

    def touch(self, name: str) -> None:
        """As `Objects.touch`."""
        self._uses[name] = time.time_ns()


def _filesystem(address: Address) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        return url_to_fs(address.url, **address.options)  # type: ignore[no-any-return]
    except ImportError:
        known = known_implementations.get(address.scheme, {})
        raise OptionError(
            f"expected the package that reaches {address.scheme}://, but it is not installed "
            f"({known.get('err', 'fsspec does not say which')}): install it, or choose another directory."
        ) from None
    except ValueError as error:
        if address.scheme in fsspec.available_protocols():
            raise address.unreachable(error) from None
        raise OptionError(
            f"expected a directory, redis://, or a scheme that fsspec knows, but saw {address.scheme}://: see "
            "fsspec.available_protocols()."
        ) from None
    except TypeError as error:
        raise OptionError(
            f"expected storage_options that {address.scheme}:// takes, but saw {address.detail(error)}: see the "
            "options of its file system in fsspec."
        ) from None
    except Exception as error:
        raise address.unreachable(error) from None


def _stored(info: Mapping[str, Any]) -> StoredFile:
    name = str(info["name"]).rstrip("/").rpartition("/")[2]
    used = _nanoseconds(next((info[key] for key in MODIFIED if info.get(key) is not None), None))
    return StoredFile(name, int(info.get("size") or 0), str(info.get("ETag") or used), used)


def _nanoseconds(time_of: object) -> int:
    """A time as file systems say it, in nanoseconds since 1970; 0 where they do not."""
    if isinstance(time_of, str):
        try:
            time_of = datetime.fromisoformat(time_of.replace("Z", "+00:00"))
        except ValueError:
            return 0
    if isinstance(time_of, datetime):
        time_of = (time_of if time_of.tzinfo else time_of.replace(tzinfo=timezone.utc)).timestamp()
    return int(time_of * 10**9) if isinstance(time_of, int | float) else 0
