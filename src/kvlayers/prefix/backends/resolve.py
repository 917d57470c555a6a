"""From what a caller says to a place."""

import os
import re
from collections.abc import Mapping

from fsspec.core import url_to_fs

from kvlayers.errors import OptionError
from kvlayers.prefix.backends.address import Address
from kvlayers.prefix.backends.contract import StorageBackend
from kvlayers.prefix.backends.fsspec import FsspecObjects
from kvlayers.prefix.backends.local import LocalDirectory
from kvlayers.prefix.backends.redis import SCHEMES, RedisObjects
from kvlayers.prefix.backends.remote import Remote

LOCAL_SCHEMES = ("file", "local")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:_-]+://")
# A path of two slashes is one of one slash, and no more a URL.
_SPOILT_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def place_for(directory: object, options: Mapping[str, object] | None) -> StorageBackend:
    """Where a store's files are to be.

    Args:
        directory: a path, or a URL: of Redis or Valkey, or of any file system that fsspec reaches.
        options: for what reaches the URL: `redis.Redis.from_url`, or the file system of fsspec.

    Raises:
        OptionError: neither path nor URL; a URL of an unknown scheme, or of one whose package is not installed; options
            that are none, or beside a local path.
        CachePathError: it cannot be reached, read or written to.
    """
    _check_options(options)
    if isinstance(directory, str) and _URL.match(directory):
        address = Address(directory, options or {})
        if address.scheme in SCHEMES:
            return Remote(RedisObjects(address), address)
        if address.scheme not in LOCAL_SCHEMES:
            return Remote(FsspecObjects(address), address)
        path = url_to_fs(directory)[1]
    else:
        path = _local_path(directory)
    if options:
        raise OptionError(f"expected storage_options beside a URL, but saw them beside {path}: leave them out.")
    return LocalDirectory(path)


def _local_path(directory: object) -> str:
    try:
        path = os.fsdecode(directory)  # type: ignore[arg-type]
    except TypeError:
        raise OptionError(
            f"expected the path of a directory, or a URL, but saw a {type(directory).__name__}."
        ) from None
    if not isinstance(directory, str) and _SPOILT_URL.match(path):
        raise OptionError(
            f"expected the path of a directory, but saw a URL in a {type(directory).__name__}: pass it as a str."
        )
    return path


def _check_options(options: object) -> None:
    if options is None:
        return
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise OptionError(
            f"expected storage_options to be a mapping of names to values, but saw a {type(options).__name__}."
        )
