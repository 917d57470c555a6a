"""What prompts begin with, computed once: look-up by tokens, eviction, files."""

from .entry import Entry
from .eviction import EvictionPolicy, LeastRecentlyUsed
from .finding import Hit
from .statistics import PrefixStatistics
from .store import PrefixStore

__all__ = ["Entry", "EvictionPolicy", "Hit", "LeastRecentlyUsed", "PrefixStatistics", "PrefixStore"]
