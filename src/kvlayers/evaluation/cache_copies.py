"""Copies of a cache of any library: to continue one prefix in several ways, and to continue it in several rows."""

import copy
from typing import Any

import transformers
import transformers.cache_utils as upstream
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.errors import KVLayersError
from kvlayers.layers.upstream_adapter.adapter import adapted
from kvlayers.planning.cache_bytes import fidelity_of

_REPEATABLE = (upstream.DynamicLayer, upstream.DynamicSlidingWindowLayer)
"""Layers of transformers that repeat all tokens for several rows. Layers that pack tokens repeat only the others."""


def is_exact(cache: Any) -> bool:
    """Whether a model attends to the very states that came in. Classes of other libraries are not known to be exact.

    Raises:
        UnsupportedLayerError: the class of a layer of kvlayers' does not say.
    """
    if isinstance(cache, Cache):
        return fidelity_of(cache) == "exact"
    classes = [type(cache), *map(type, cache.layers)]
    if not all(each.__module__.startswith("transformers.") for each in classes):
        return False
    return all(adapted(layer).fidelity == "exact" for layer in cache.layers)


def fork(cache: Any) -> Any:
    """An independent continuation of a cache, which shares memory with it if it can."""
    if isinstance(cache, Cache):
        return cache.fork()
    held = (value for layer in cache.layers for value in vars(layer).values())
    # Packed tensors of quanto cannot be copied. Nobody writes to them: the layer replaces them.
    packed = {id(value): value for value in held if isinstance(value, Tensor) and type(value) is not Tensor}
    return copy.deepcopy(cache, packed)


def takes_rows(cache: Any, rows: int) -> bool:
    """Whether an empty cache takes several sequences, and a filled one can be repeated for them."""
    if not isinstance(cache, Cache):
        return type(cache) is transformers.DynamicCache and all(type(layer) in _REPEATABLE for layer in cache.layers)
    if cache.is_static:
        # It is reserved for one sequence, unless the first tokens came in several.
        return False
    try:
        cache.check_select(rows)
    except KVLayersError:
        return False
    return True


def repeat(cache: Any, rows: int) -> None:
    """Continue the one sequence of a cache in several rows. The cache must be empty, or `takes_rows` be true."""
    if rows > 1 and cache.get_seq_length():
        (cache.expand if isinstance(cache, Cache) else cache.batch_repeat_interleave)(rows)


class SharedCache:
    """A cache that several readers continue: all but the last one get a fork, and the last one the cache itself.

    Args:
        cache: the cache.
        readers: how many readers there are.
    """

    def __init__(self, cache: Any, readers: int) -> None:
        self._cache, self._readers = cache, readers

    def take(self) -> Any:
        """A cache for the next reader."""
        self._readers -= 1
        if self._readers:
            return fork(self._cache)
        cache, self._cache = self._cache, None
        return cache
