"""Storage backends for prefix stores: local directories, file systems of fsspec, Redis and Valkey servers."""

import os
import re
from collections.abc import Mapping

from fsspec.core import url_to_fs

from kvlayers.errors import OptionError
from kvlayers.prefix.backends.contract import Address, GoneError, StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.backends.fsspec import FsspecBackend
from kvlayers.prefix.backends.local import LocalBackend
from kvlayers.prefix.backends.redis import SCHEMES, RedisBackend

__all__ = ["GoneError", "StorageBackend", "StoredFile", "UnreachableError", "backend_for"]

LOCAL_SCHEMES = ("file", "local")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:_-]+://")
# pathlib turns the two slashes of a URL into one.
_URL_IN_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def backend_for(directory: object, options: Mapping[str, object] | None) -> StorageBackend:
    """The storage backend for the files of a store. Nothing is made or written before `prepare` is called.

    Args:
        directory: a path, or a URL of Redis, of Valkey, or of any file system that fsspec supports.
        options: options of `redis.Redis.from_url`, or of the file system of fsspec.

    Raises:
        OptionError: `directory` is neither a path nor a URL, or has a scheme that is unknown or whose package is not
            installed; or `options` is not a mapping, or is given for a local path.
        CachePathError: the directory cannot be reached.
    """
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise OptionError(
            f"`storage_options` must be a mapping from names to values, got a {type(options).__name__}: pass a dict."
        )
    if isinstance(directory, str) and _URL.match(directory):
        address = Address(directory, options or {})
        if address.scheme in SCHEMES:
            return RedisBackend(address)
        if address.scheme not in LOCAL_SCHEMES:
            return FsspecBackend(address)
        path = url_to_fs(directory)[1]
    else:
        path = _local_path(directory)
    if options:
        raise OptionError(f"`storage_options` are for URLs, got them for the local path {path}: leave them out.")
    return LocalBackend(path)


def _local_path(directory: object) -> str:
    try:
        path = os.fsdecode(directory)  # type: ignore[arg-type]
    except TypeError:
        raise OptionError(
            f"`directory` must be a path or a URL, got a {type(directory).__name__}: pass a str or a Path."
        ) from None
    if not isinstance(directory, str) and _URL_IN_PATH.match(path):
        raise OptionError(f"`directory` is a URL in a {type(directory).__name__}: pass it as a str.")
    return path
