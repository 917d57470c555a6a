"""The memory of static caches that models are compiled around, reused by the next compiled call of `generate()`.

A compiled program goes on with the same addresses. Eager code takes any memory, so its caches are not kept: the next
call may never come.
"""

import gc
import sys
import threading
import weakref
from typing import Any

from kvlayers.caches.aliases import HybridCache, HybridChunkedCache, SlidingWindowCache
from kvlayers.caches.base import Cache
from kvlayers.caches.from_config import fixed_layers
from kvlayers.caches.static import StaticCache
from kvlayers.generation.patching import ScopedValue
from kvlayers.generation.registry import CacheRequest
from kvlayers.utils.transforms import autocast_dtype

REUSABLE = (StaticCache, HybridCache, HybridChunkedCache, SlidingWindowCache)
"""Classes whose `reset` is known to leave nothing behind. Subclasses from elsewhere may hold more."""

SOLE_REFERENCES = 2
"""What `sys.getrefcount` counts for a cache that only one variable refers to: the variable, and the argument."""

_lock = threading.Lock()
_idle: "weakref.WeakKeyDictionary[Any, Cache]" = weakref.WeakKeyDictionary()
_lengths: "weakref.WeakKeyDictionary[Any, dict[int | None, int]]" = weakref.WeakKeyDictionary()
Acquired = tuple[Cache, CacheRequest]
ACQUIRED: ScopedValue[list[Acquired] | None] = ScopedValue("caches of the current call of generate()", None)
"""Collects the caches that are acquired within one call of `generate()`."""


def free_reservations() -> None:
    """Free the memory that is kept, for every model, for the next call of `generate()` with a static cache."""
    with _lock:
        _idle.clear()
        _lengths.clear()


def acquire(model: Any, new: Cache, request: CacheRequest) -> Cache:
    """The empty cache that an earlier compiled call on `model` has released, if it can replace `new`; else `new`."""
    with _lock:
        idle = _idle.pop(model, None)
    cache = new
    # Under autocast, the dtype of states differs from that of the model.
    autocast = None if request.device is None else autocast_dtype(request.device)
    if idle is not None and autocast is None and _can_replace(idle, new, request):
        cache = idle
    acquired = ACQUIRED.get()
    if acquired is not None:
        acquired.append((cache, request))
    return cache


def remember_lengths(model: Any, acquired: list[Acquired]) -> None:
    """Let later compiled calls reserve as many tokens as these, so that nothing is compiled for another size."""
    with _lock:
        lengths = _lengths.setdefault(model, {})
        for _, request in acquired:
            if request.length_hint is not None:
                lengths[request.batch_size] = max(request.length_hint, lengths.get(request.batch_size, 0))


def release(model: Any, acquired: list[Acquired]) -> None:
    """Keep acquired caches that nobody else refers to for the next call."""
    while acquired:
        cache, request = acquired.pop()
        if _static_parts(cache) is None:
            continue
        if sys.getrefcount(cache) > SOLE_REFERENCES:
            # Compiling leaves reference cycles that contain the cache.
            gc.collect()
        is_unshared = sys.getrefcount(cache) <= SOLE_REFERENCES
        # Some models decode more sequences than requested, for example with guidance, which cannot be foreseen.
        if is_unshared and cache.batch_size == request.batch_size:
            cache.deactivate_past_recording()
            cache.reset()
            with _lock:
                _idle[model] = cache


def longest_length(model: Any, request: CacheRequest) -> int | None:
    """Tokens to reserve so that code compiled for the same batch size still fits: never fewer than before."""
    with _lock:
        before = _lengths.get(model, {}).get(request.batch_size, 0)
    return request.length_hint and max(request.length_hint, before)


def _static_parts(cache: object) -> list[Any] | None:
    """The cache, or both parts of a pair, if each is of a reusable class and all of its layers reserve memory."""
    if not isinstance(cache, Cache):
        return None
    pair: Any = cache
    parts = [pair.self_attention_cache, pair.cross_attention_cache] if cache.is_pair else [cache]
    all_static = all(fixed_layers(part.layers) == list(part.layers) for part in parts)
    return parts if all_static and type(parts[0]) in REUSABLE else None


def _can_replace(idle: Cache, new: Cache, request: CacheRequest) -> bool:
    idle_parts, new_parts = _static_parts(idle), _static_parts(new)
    if idle_parts is None or new_parts is None or len(idle_parts) != len(new_parts):
        return False
    if type(idle_parts[0]) is not type(new_parts[0]):
        return False
    if any(len(old.layers) != len(other.layers) for old, other in zip(idle_parts, new_parts, strict=True)):
        return False
    # A caller who asks for an exact reservation expects an error for one token more.
    is_exact = "max_cache_len" in request.options
    layers = [
        pair
        for old, other in zip(idle_parts, new_parts, strict=True)
        for pair in zip(old.layers, other.layers, strict=True)
    ]
    return all(
        old.covers(other, request.batch_size)
        and (not is_exact or old.max_cache_len == other.max_cache_len)
        and (old.dtype, old.values_dtype, old.device) == (request.dtype, request.dtype, request.device)
        for old, other in layers
    )
