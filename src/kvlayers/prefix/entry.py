"""An entry of a prefix store: one sequence of tokens, and its cache."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvlayers.caches.base import Cache
from kvlayers.errors import RollbackError
from kvlayers.layers import EvictingLayer, LayerOperations, OffloadedLayer
from kvlayers.prefix.radix_tree import Tokens
from kvlayers.utils.tensor_memory import Storages


@dataclass(eq=False)
class PrefixEntry:
    """Tokens, and the cache that has seen them: in memory, in a file, or both.

    Attributes:
        label: model and namespace, as returned by `keys.label_of`.
        ids: the tokens, int64 `[tokens]`.
        cache: the cache, to which nobody writes; `None` if it is only in a file.
        storages: size in bytes of each piece of memory of the cache, by address. Other caches may share them.
        path: path of its file, or URL without credentials; `None` without a file.
        file_bytes: size of the file in bytes; 0 without one.
        last_use: a counter that grows with each use of the store.
        used: time of the last use in seconds since 1970; `None` if it was not used since the store was made.
        hits: look-ups that it has served.
        pins: how many calls of `pin` no `unpin` has undone, by the number of tokens that they were for.
        boundaries: lengths that the entry serves: its own, and those of the entries that it has replaced.
        is_leaving: whether it has been evicted, and leaves memory as soon as it is in a file.
        is_being_written: whether it is being written to a file, which holds its memory.
    """

    label: str
    ids: Tokens
    cache: Cache | None = None
    storages: Storages = field(default_factory=dict)
    path: str | None = None
    file_bytes: int = 0
    last_use: int = 0
    used: float | None = None
    hits: int = 0
    pins: Counter[int] = field(default_factory=Counter)
    boundaries: set[int] = field(default_factory=set)
    is_leaving: bool = False
    is_being_written: bool = False

    def __post_init__(self) -> None:
        self.boundaries = {*self.boundaries, len(self.ids)}

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the cache, shared memory included; 0 without a cache."""
        return sum(self.storages.values())

    @property
    def is_spare(self) -> bool:
        """Whether it is needed in a file only, and only until a longer entry in a file serves the same prompts."""
        return (self.cache is None or self.is_leaving) and not self.pins

    def can_restore(self, lengths: Iterable[int]) -> bool:
        """Whether the cache is in memory and can be rolled back to exactly each of these lengths."""
        return self.cache is not None and can_restore(self.cache, lengths)


def can_restore(cache: Cache, lengths: Iterable[int]) -> bool:
    """Whether `cache` can be rolled back to exactly each of these lengths."""
    most = cache.get_seq_length()
    return all(length <= most and restorable_length(cache, length) == length for length in lengths)


def restorable_length(cache: Cache, length: int) -> int:
    """The greatest length, at most `length`, to which `cache` can be rolled back; 0 if there is no such length."""
    if length == cache.get_seq_length():
        return length
    if any(_has_evicted(layer) for layer in cache.adapted_layers()):
        # The tokens behind `length` have had a part in which of those before were evicted.
        return 0
    try:
        target = cache.nearest_restorable(length)
        # transformers' layers, and layers that do not count their tokens, have to be tried.
        if target and not all(layer.length and not layer.is_upstream for layer in cache.adapted_layers()):
            cache.fork().truncate(target)
    except RollbackError:
        return 0
    return target


def _has_evicted(layer: LayerOperations) -> bool:
    """Whether tokens have been evicted for the scores of a rule."""
    parts = [part.unwrapped.original for part in layer.parts]
    return any(isinstance(part, EvictingLayer) and part.held_tokens < part.length for part in parts)


def shares_memory(cache: Cache) -> bool:
    """Whether forks of `cache` share its memory. Those of reservations and of states on the host are copies."""
    return not cache.is_static and not any(isinstance(layer, OffloadedLayer) for layer in cache.adapted_layers())


def fork_at(cache: Cache, length: int) -> Cache:
    """A fork of `cache`, rolled back to a length that `restorable_length` has returned."""
    fork = cache.fork()
    if length < cache.get_seq_length():
        fork.truncate(length)
    return fork
