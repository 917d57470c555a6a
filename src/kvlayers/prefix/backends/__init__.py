"""Storage backends for prefix stores: local directories, file systems of fsspec, Redis and Valkey servers."""

from kvlayers.prefix.backends.contract import GoneError, StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.backends.resolve import backend_for, existing_backend

__all__ = ["GoneError", "StorageBackend", "StoredFile", "UnreachableError", "backend_for", "existing_backend"]
