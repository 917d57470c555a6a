"""Eviction policies: which entry of a prefix store leaves memory first."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.radix_tree import RadixTree


class EvictionPolicy(Protocol):
    """Decides the order in which entries are evicted.

    It is asked while the lock of the store is held, so it must not use the store. It must not change the entries.
    """

    def order(self, entries: Iterable[PrefixEntry]) -> Sequence[PrefixEntry]:
        """The entries in order of eviction. Entries that are left out are evicted last."""


class LeastRecentlyUsed:
    """Evicts the entry first whose last insertion or lookup is longest ago.

    Example:
        >>> import kvlayers
        >>> kvlayers.PrefixStore(max_bytes=2**30, policy=kvlayers.prefix.LeastRecentlyUsed())
        PrefixStore(0 entries, 0 B of 1.00 GiB)
    """

    def order(self, entries: Iterable[PrefixEntry]) -> Sequence[PrefixEntry]:
        """The entries by last use, the oldest first."""
        return sorted(entries, key=lambda entry: entry.last_use)


def eviction_order(
    policy: EvictionPolicy, entries: Sequence[PrefixEntry], trees: Iterable[RadixTree[PrefixEntry]]
) -> list[PrefixEntry]:
    """All `entries` in the order of the policy, but an entry comes after the entries that continue its tokens.

    These read its memory, so evicting it before them would free nothing.

    Args:
        policy: the policy.
        entries: the entries that may be evicted.
        trees: the trees that hold them, and others.
    """
    ranks: dict[int, int] = {}
    # Entries that the policy leaves out come last, since the budget must hold whatever it returns.
    for entry in [*policy.order(tuple(entries)), *entries]:
        ranks.setdefault(id(entry), len(ranks))
    last_below: dict[int, int] = {}
    for tree in trees:
        nodes = list(tree.nodes())
        last = [-1 if node.value is None else ranks.get(id(node.value), -1) for node in nodes]
        # Children stand behind their parents.
        for number in range(len(nodes) - 1, 0, -1):
            node = nodes[number]
            if node.value is not None:
                last_below[id(node.value)] = last[number]
            if node.parent is not None:
                last[node.parent] = max(last[node.parent], last[number])
    return sorted(entries, key=lambda entry: (last_below[id(entry)], -entry.length))
