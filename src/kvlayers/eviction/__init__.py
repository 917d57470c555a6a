"""Rules of eviction: which tokens a layer of limited memory keeps."""

from kvlayers.eviction.contract import ALL_QUERIES, EvictionRule
from kvlayers.eviction.knorm import KNorm
from kvlayers.eviction.registry import (
    eviction_rule,
    eviction_rule_names,
    register_eviction_rule,
    unregister_eviction_rule,
)

__all__ = [
    "ALL_QUERIES",
    "EvictionRule",
    "KNorm",
    "eviction_rule",
    "eviction_rule_names",
    "register_eviction_rule",
    "unregister_eviction_rule",
]
