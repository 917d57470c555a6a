"""Where in a text a cache last packed or evicted tokens."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from kvlayers.caches.base import Cache
from kvlayers.errors import UnsupportedLayerError


class LastPacking:
    """Follows a cache while it reads, and knows how long ago it last packed or evicted tokens.

    What a pass packs or evicts is missing from the next pass on: the tokens of the pass itself still attend to it.

    Args:
        cache: an empty cache. If it is not of kvlayers, or a layer does not say what it still holds as it came, no
            distance is known.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._exact_from: Sequence[int] = ()
        self._at: int | None = None

    def note_pass(self, tokens: int) -> None:
        """Look at the layers after a pass, when the cache has read `tokens` tokens. No device is waited for."""
        exact_from = _exact_from(self._cache)
        if any(now > before for now, before in zip_longest(exact_from, self._exact_from, fillvalue=0)):
            self._at = tokens
        self._exact_from = exact_from

    def distances(self, start: int, count: int) -> list[int | None]:
        """For `count` tokens from position `start`: tokens between the last packing or eviction and each of them.

        It is 0 for the first token that misses what was packed or evicted, and `None` before any packing or eviction.
        """
        return [None if self._at is None else position - self._at for position in range(start, start + count)]


def _exact_from(cache: Any) -> Sequence[int]:
    """`exact_from` of every layer; empty if it is not known of one."""
    if not isinstance(cache, Cache) or cache.is_pair:
        return ()
    try:
        found = [layer.exact_from for layer in cache.adapted_layers()]
    except UnsupportedLayerError:
        return ()
    known = [position for position in found if position is not None]
    return known if len(known) == len(found) else ()
