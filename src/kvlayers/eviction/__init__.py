"""Rules of eviction: which tokens a layer of limited memory keeps."""

from kvlayers.eviction.contract import ALL_QUERIES, EvictionRule
from kvlayers.eviction.knorm import KNorm
from kvlayers.eviction.registry import (
    added_rule_names,
    eviction_rule,
    eviction_rule_names,
    register_eviction_rule,
    unregister_eviction_rule,
)

BUILTIN_RULES = tuple(added_rule_names())
"""Names of the rules of kvlayers, which the imports above have registered."""

__all__ = [
    "ALL_QUERIES",
    "BUILTIN_RULES",
    "EvictionRule",
    "KNorm",
    "eviction_rule",
    "eviction_rule_names",
    "register_eviction_rule",
    "unregister_eviction_rule",
]
