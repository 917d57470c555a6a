"""Whether a static cache has room for all tokens that a call of `generate()` is going to hold."""

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from kvlayers.caches.base import Cache
from kvlayers.errors import CapacityError

logger = logging.getLogger(__name__)

_may_be_stopped: ContextVar[bool] = ContextVar("_may_be_stopped", default=True)


@contextlib.contextmanager
def stopping(may_be_stopped: bool) -> Iterator[None]:
    """Within one call of `generate()`, know whether the caller's code may stop it at any token."""
    token = _may_be_stopped.set(may_be_stopped)
    try:
        yield
    finally:
        _may_be_stopped.reset(token)


def check_room(cache: object, generation_config: Any, needed: int) -> None:
    """Check that a call does not run for long only to find that its cache is full.

    A call that may end before that goes on, with a warning: at a token that ends a sequence, at a string, by the time,
    or by code of the caller. A draft ends when its model is unsure, and is never warned of.

    Args:
        cache: the cache of the call.
        generation_config: config of the call, with all of its lengths.
        needed: tokens that the cache must hold if the call generates as many as it may.

    Raises:
        CapacityError: the call cannot end before the cache is full.
    """
    limit = _reserved_tokens(cache)
    if limit is None or needed <= limit or generation_config.is_assistant:
        return
    advice = (
        f"reserve {needed} or more (max_cache_len), let it generate fewer tokens (max_new_tokens), or make the cache "
        "with grow=True."
    )
    if _fewest_tokens(generation_config, needed) > limit:
        raise CapacityError(
            f"expected a reservation of {needed} tokens, which this call of generate() needs for its prompt and all "
            f"new tokens but the last, but saw one of {limit}: {advice}"
        )
    logger.warning(
        "The cache has room for %d tokens, and this call of generate() fails if it does not end before it needs more: "
        "it may need %d. To be safe, %s",
        limit,
        needed,
        advice,
    )


def _fewest_tokens(generation_config: Any, needed: int) -> int:
    """Tokens that the cache of a call holds at its end, however early it ends."""
    if _may_be_stopped.get() or generation_config.max_time is not None or generation_config.stop_strings is not None:
        return 0
    return needed if generation_config.eos_token_id is None else (generation_config.min_length or 0) - 1


def _reserved_tokens(cache: object) -> int | None:
    """The most tokens that the layers of a cache can take in, `None` if there is no such number."""
    if not isinstance(cache, Cache):
        return None
    limits: list[int | None] = []
    for layer in cache.self_attention.adapted_layers():
        attention: Any = layer.parts[0].unwrapped
        if attention.reserved is not None and not attention.reserved.grow:
            limits.append(attention.token_limit if attention.is_sliding else attention.capacity)
    return min((limit for limit in limits if limit is not None), default=None)
