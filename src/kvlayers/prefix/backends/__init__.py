"""Where the files of a prefix store are: a local directory, a file system of fsspec, a Redis or Valkey server."""

from kvlayers.prefix.backends.contract import GoneError, StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.backends.resolve import place_for

__all__ = ["GoneError", "StorageBackend", "StoredFile", "UnreachableError", "place_for"]
