"""Prefixes of prompts, computed once: lookup by tokens, eviction, files."""

from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.entry_eviction import EvictionPolicy, LeastRecentlyUsed
from kvlayers.prefix.lookup import Hit
from kvlayers.prefix.statistics import PrefixStatistics
from kvlayers.prefix.store import PrefixStore
from kvlayers.prefix.tree import PrefixNode, PrefixTree

__all__ = [
    "EvictionPolicy",
    "Hit",
    "LeastRecentlyUsed",
    "PrefixEntry",
    "PrefixNode",
    "PrefixStatistics",
    "PrefixStore",
    "PrefixTree",
]
