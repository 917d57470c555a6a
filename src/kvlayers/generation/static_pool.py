"""The memory of static caches, used again by the next call of `generate()` on the same model."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from kvlayers.caches.aliases import HybridCache, HybridChunkedCache, SlidingWindowCache
from kvlayers.caches.base import Cache
from kvlayers.caches.encoder_decoder import EncoderDecoderCache
from kvlayers.caches.static import StaticCache
from kvlayers.generation.registry import CacheRequest
from kvlayers.layers import StaticLayer, StaticSlidingLayer

REUSABLE = (StaticCache, HybridCache, HybridChunkedCache, SlidingWindowCache)
"""Caches of which all is known that a reset must forget."""

OWN_REFERENCES = 2
"""References to a cache that only one variable holds, as `sys.getrefcount` counts: that variable, and its argument."""

_lock = threading.Lock()
_idle: "weakref.WeakKeyDictionary[Any, Cache]" = weakref.WeakKeyDictionary()
_lengths: "weakref.WeakKeyDictionary[Any, dict[int | None, int]]" = weakref.WeakKeyDictionary()
Loan = tuple[Cache, CacheRequest]
_lent: ContextVar[list[Loan] | None] = ContextVar("caches made for the current call of generate()", default=None)


def free_reservations() -> None:
    """Let go of the memory that is kept for the next call of `generate()` with a static cache, of every model."""
    with _lock:
        _idle.clear()
        _lengths.clear()


@contextmanager
def lending() -> Iterator[list[Loan]]:
    """Collect the caches that are made within one call of `generate()`."""
    caches: list[Loan] = []
    token = _lent.set(caches)
    try:
        yield caches
    finally:
        _lent.reset(token)


def lend(model: Any, made: Cache, request: CacheRequest) -> Cache:
    """The cache that `model` has left from an earlier call, empty, where it can stand in for `made`; else `made`."""
    with _lock:
        idle = _idle.pop(model, None)
    cache = made
    # Under autocast, states are of another dtype than the model.
    autocast = request.device is not None and torch.is_autocast_enabled(request.device.type)
    if idle is not None and not autocast and _stands_in(idle, made, request):
        cache = idle
    lent = _lent.get()
    if lent is not None:
        lent.append((cache, request))
    return cache


def remember_lengths(model: Any, loans: list[Loan]) -> None:
    """Let later calls that are compiled reserve as much as these, so that nothing is compiled for another size."""
    with _lock:
        lengths = _lengths.setdefault(model, {})
        for _, request in loans:
            if request.length_hint is not None:
                lengths[request.batch_size] = max(request.length_hint, lengths.get(request.batch_size, 0))


def give_back(model: Any, loans: list[Loan]) -> None:
    """Keep what was lent, where nobody uses it any more, for the next call."""
    while loans:
        cache, request = loans.pop()
        if _parts(cache) is None:
            continue
        if sys.getrefcount(cache) > OWN_REFERENCES and _was_compiled_around(cache):
            # Compiling leaves cycles behind that know the cache.
            gc.collect()
        held_here_alone = sys.getrefcount(cache) <= OWN_REFERENCES
        # Some models decode more sequences than were asked for, such as those with guidance: that cannot be foreseen.
        if held_here_alone and cache.batch_size == request.batch_size:
            cache.deactivate_past_recording()
            cache.reset()
            with _lock:
                _idle[model] = cache


def longest(model: Any, request: CacheRequest) -> int | None:
    """Tokens to reserve so that what was compiled for as many sequences still fits: no fewer than there were."""
    with _lock:
        before = _lengths.get(model, {}).get(request.batch_size, 0)
    return request.length_hint and max(request.length_hint, before)


def _parts(cache: Cache) -> list[Cache] | None:
    """The caches whose layers all reserve memory, `None` where some do not."""
    parts = (
        [cache.self_attention_cache, cache.cross_attention_cache] if isinstance(cache, EncoderDecoderCache) else [cache]
    )
    fixed = all(isinstance(layer, StaticLayer | StaticSlidingLayer) for part in parts for layer in part.layers)
    return parts if fixed and type(parts[0]) in REUSABLE else None


def _was_compiled_around(cache: Cache) -> bool:
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return isinstance(own, StaticCache) and own.compiled


def _stands_in(idle: Cache, made: Cache, request: CacheRequest) -> bool:
    have, want = _parts(idle), _parts(made)
    if have is None or want is None or len(have) != len(want) or type(have[0]) is not type(want[0]):
        return False
    if any(len(old.layers) != len(new.layers) for old, new in zip(have, want, strict=True)):
        return False
    # Who says how much is reserved is refused one token more.
    exact = "max_cache_len" in request.options
    pairs = [pair for old, new in zip(have, want, strict=True) for pair in zip(old.layers, new.layers, strict=True)]
    return all(
        old.covers(new, request.batch_size)
        and (not exact or old.max_cache_len == new.max_cache_len)
        and (old.dtype, old.values_dtype, old.device) == (request.dtype, request.dtype, request.device)
        for old, new in pairs
    )
