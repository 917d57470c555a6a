"""What a prefix store holds of one sequence of tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvlayers.caches.base import Cache
from kvlayers.errors import RollbackError
from kvlayers.prefix.radix_tree import Tokens
from kvlayers.utils.tensor_memory import Storages


@dataclass(eq=False)
class PrefixEntry:
    """Tokens, and the cache that has seen them: in memory, in a file, or both.

    Attributes:
        label: model and namespace, as `keys.label_of` says them.
        ids: the tokens, int64 `[tokens]`.
        cache: what has seen them, which nobody writes to; `None` where it is in a file alone.
        storages: bytes of each piece of memory of the cache, by its address; other caches may hold some of them too.
        path: its file, a URL without credentials where that is elsewhere; `None` where there is none.
        file_bytes: bytes of the file; 0 without one.
        last_use: a number that grows with each use of the store.
        pins: how many times it has been pinned more than it has been let go.
        boundaries: lengths that were inserted and that it stands for: its own, and those of entries that it replaced.
    """

    label: str
    ids: Tokens
    cache: Cache | None = None
    storages: Storages = field(default_factory=dict)
    path: str | None = None
    file_bytes: int = 0
    last_use: int = 0
    pins: int = 0
    boundaries: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.boundaries = {*self.boundaries, len(self.ids)}

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the cache, what it shares with others included; 0 without one."""
        return sum(self.storages.values())

    def hold(self, cache: Cache) -> None:
        """Take a cache of these tokens into memory."""
        self.cache, self.storages = cache, cache.storages()

    def let_go(self) -> None:
        """Hold it in memory no more."""
        self.cache, self.storages = None, {}

    def stands_for(self, lengths: Iterable[int]) -> bool:
        """Whether it is in memory and can be put back to each of these lengths, exactly."""
        cache = self.cache
        return cache is not None and all(length <= self.length and reach(cache, length) == length for length in lengths)


def reach(cache: Cache, length: int) -> int:
    """The greatest length, `length` at most, that `cache` can be put back to: 0 where there is none."""
    if length == cache.get_seq_length():
        return length
    try:
        target = cache.nearest_restorable(length)
        # transformers' layers, and layers that do not count their tokens, have to be tried.
        if target and not all(layer.length and not layer.is_upstream for layer in cache.adapted_layers()):
            cache.fork().truncate(target)
    except RollbackError:
        return 0
    return target


def put_back(cache: Cache, length: int) -> Cache:
    """A fork of `cache` at a length that `reach` has said."""
    twin = cache.fork()
    if length < cache.get_seq_length():
        twin.truncate(length)
    return twin
