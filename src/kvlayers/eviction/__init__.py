"""Rules of eviction: which tokens a layer of limited memory keeps."""

from kvlayers.eviction.attention_rules import ExpectedAttention, HeavyHitters, SnapKV, Tova
from kvlayers.eviction.contract import (
    ALL_QUERIES,
    EvictionRule,
    added_rule_names,
    eviction_rule,
    eviction_rule_names,
    register_eviction_rule,
    unregister_eviction_rule,
)
from kvlayers.eviction.key_rules import KeyDiff, KNorm, RandomEviction, Streaming

BUILTIN_RULES = tuple(added_rule_names())
"""Names of the rules of kvlayers, which the imports above have registered."""

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
    "eviction_rule",
    "eviction_rule_names",
    "register_eviction_rule",
    "unregister_eviction_rule",
]
