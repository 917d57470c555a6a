"""Rules of eviction: which tokens a layer of limited memory keeps."""

from kvlayers.core.named_caches import named, register
from kvlayers.eviction import evicting_cache, evicting_layer
from kvlayers.eviction.rule import (
    ALL_QUERIES,
    RULES,
    EvictionRule,
    eviction_rule,
    eviction_rule_names,
    register_eviction_rule,
    unregister_eviction_rule,
)
from kvlayers.eviction.rules import (
    ExpectedAttention,
    HeavyHitters,
    KeyDiff,
    KNorm,
    RandomEviction,
    SnapKV,
    Streaming,
    Tova,
)

BUILTIN_RULES = tuple(RULES.own_names())
"""Names of the rules of kvlayers, which the imports above have registered."""

for _rule in BUILTIN_RULES:
    # A rule of another package has no such name, which might be that of a cache: it is an option of "evicting".
    register(_rule)(named(evicting_cache.EvictingCache, fixed={"rule": _rule}, general="evicting"))

__all__ = [
    "ALL_QUERIES",
    "BUILTIN_RULES",
    "EvictionRule",
    "ExpectedAttention",
    "HeavyHitters",
    "KNorm",
    "KeyDiff",
    "RandomEviction",
    "SnapKV",
    "Streaming",
    "Tova",
    "evicting_cache",
    "evicting_layer",
    "eviction_rule",
    "eviction_rule_names",
    "register_eviction_rule",
    "unregister_eviction_rule",
]
