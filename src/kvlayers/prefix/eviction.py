"""Which entry goes first where there is no room for all."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvlayers.prefix.entry import PrefixEntry


class EvictionPolicy(Protocol):
    """Puts entries into the order in which they are to go. It must not change them."""

    def order(self, entries: Iterable[PrefixEntry]) -> Sequence[PrefixEntry]:
        """The entries, the first to go first. One that is left out stays for as long as there is another way."""


class LeastRecentlyUsed:
    """The entry goes first that has been neither inserted nor found for longest.

    Example:
        >>> import kvlayers
        >>> kvlayers.PrefixStore(max_bytes=2**30, policy=kvlayers.LeastRecentlyUsed())
        PrefixStore(0 entries, 0 B of 1.00 GiB)
    """

    def order(self, entries: Iterable[PrefixEntry]) -> Sequence[PrefixEntry]:
        """The entries by their last use."""
        return sorted(entries, key=lambda entry: entry.last_use)
