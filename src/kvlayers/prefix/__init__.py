"""Prefixes of prompts, computed once: lookup by tokens, eviction, files."""

from kvlayers.prefix.entry import EvictionPolicy, LeastRecentlyUsed, PrefixEntry
from kvlayers.prefix.lookup import Hit
from kvlayers.prefix.report import PrefixNode, PrefixStatistics, PrefixTree
from kvlayers.prefix.store import PrefixStore

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
