"""The backends of a prefix store, seen without kvlayers."""

from typing import Any

import numpy as np
import torch
from fsspec.core import url_to_fs

import kvlayers

PART = 2**16
"""Bytes that are read of a remote file at first."""


class FilesystemFiles:
    """Those of a local directory, by its path, or of a file system, by its URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, self.root = url_to_fs(url)

    def names(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.fs.find(self.root))

    def read(self, name: str) -> bytes:
        return bytes(self.fs.cat_file(f"{self.root}/{name}"))

    def write(self, name: str, content: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", content)

    def delete(self, name: str) -> None:
        self.fs.rm_file(f"{self.root}/{name}")


class ServerFiles:
    """Keys as docs/prefix.md describes them."""

    def __init__(self, url: str, prefix: str = "kvlayers:prefix") -> None:
        import redis

        self.url = url
        self.prefix = prefix
        self.client: Any = redis.Redis.from_url(url)

    def names(self) -> list[str]:
        return sorted(name.decode() for name in self.client.zrange(f"{self.prefix}:index", 0, -1))

    def key(self, name: str) -> str:
        return f"{self.prefix}:file:{name}"

    def read(self, name: str) -> bytes:
        return bytes(self.client.get(self.key(name)))

    def write(self, name: str, content: bytes) -> None:
        self.client.set(self.key(name), content)
        self.client.zadd(f"{self.prefix}:index", {name: self.client.zscore(f"{self.prefix}:index", name) or 1})


Files = FilesystemFiles | ServerFiles


def filled(ids: list[int], heads: int = 1) -> kvlayers.DynamicCache:
    """A cache without a model, whose states say what all tokens before were."""
    cache = kvlayers.DynamicCache()
    for layer in range(2):
        states = torch.tensor(np.cumsum(np.array(ids, np.float64) * np.arange(1, len(ids) + 1)) + layer)
        states = states.float()[None, None, :, None].expand(1, heads, -1, 1).clone()
        cache.update(states, -states, layer_idx=layer)
    return cache


def room_for(count: int, tokens: int = 3) -> int:
    """Bytes of entries of so many tokens, as a store holds them that nobody shares them with."""
    cache = filled(list(range(tokens)))
    cache.trim()
    return cache.nbytes * count


def large(ids: list[int]) -> kvlayers.DynamicCache:
    """One whose file has more than what is read of a file at first."""
    return filled(ids, heads=8192)


def held(cache: Any) -> Any:
    """What `filled` has put into a cache."""
    return cache.layers[1].values[0, -1, :, 0].tolist() if cache is not None else []


def covered(store: kvlayers.PrefixStore, ids: list[int], namespace: str = "") -> int:
    """How many of these tokens are found, which are compared with what must be in their cache."""
    hit = store.lookup(torch.tensor([*ids, 999]), model="m", namespace=namespace)
    if hit.cache is not None:
        expected = filled(ids[: hit.covered])
        assert held(hit.cache) == held(expected)
    return hit.covered


def insert(store: kvlayers.PrefixStore, ids: list[int], cache: Any = None, namespace: str = "") -> bool:
    """Insert `filled` for these tokens, or another cache."""
    # The store takes over the memory of a cache that nobody else holds: no name for it, and no `**`.
    return store.insert(torch.tensor(ids), filled(ids) if cache is None else cache, model="m", namespace=namespace)


def put(store: kvlayers.PrefixStore, ids: list[int], cache: Any = None, namespace: str = "") -> None:
    """Have a store write an entry, and hold it in memory no more."""
    insert(store, ids, cache, namespace)
    store.evict()
