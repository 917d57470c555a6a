"""Eviction policies: which entry of a prefix store leaves memory first."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvlayers.prefix.entry import PrefixEntry


class EvictionPolicy(Protocol):
    """Decides the order in which entries are evicted. It must not change them."""

    def order(self, entries: Iterable[PrefixEntry]) -> Sequence[PrefixEntry]:
        """The entries in order of eviction. Entries that are left out are evicted last."""


class LeastRecentlyUsed:
    """Evicts the entry first whose last insertion or lookup is longest ago.

    Example:
        >>> import kvlayers
        >>> kvlayers.PrefixStore(max_bytes=2**30, policy=kvlayers.LeastRecentlyUsed())
        PrefixStore(0 entries, 0 B of 1.00 GiB)
    """

    def order(self, entries: Iterable[PrefixEntry]) -> Sequence[PrefixEntry]:
        """The entries by last use, the oldest first."""
        return sorted(entries, key=lambda entry: entry.last_use)
