"""Classes of caches for files, and what caches say of themselves."""

from kvlayers.core.cache_operations import CacheState
from kvlayers.core.named_caches import cache_class_names, register_cache_class, unregister_cache_class
from kvlayers.core.summary import CacheSummary, Explanation, LayerSummary

__all__ = [
    "CacheState",
    "CacheSummary",
    "Explanation",
    "LayerSummary",
    "cache_class_names",
    "register_cache_class",
    "unregister_cache_class",
]
