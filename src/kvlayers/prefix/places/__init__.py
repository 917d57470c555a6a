"""Where the files of a prefix store are: a local directory, a file system of fsspec, a Redis or Valkey server."""

from .base import GoneError, Place, StoredFile, UnreachableError
from .choosing import place_for

__all__ = ["GoneError", "Place", "StoredFile", "UnreachableError", "place_for"]
