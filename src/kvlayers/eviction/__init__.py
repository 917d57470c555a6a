"""Rules of eviction: which tokens a layer of limited memory keeps."""

from kvlayers.eviction.contract import ALL_QUERIES, EvictionRule
from kvlayers.eviction.expected_attention import ExpectedAttention
from kvlayers.eviction.h2o import HeavyHitters
from kvlayers.eviction.keydiff import KeyDiff
from kvlayers.eviction.knorm import KNorm
from kvlayers.eviction.random_eviction import RandomEviction
from kvlayers.eviction.registry import (
    added_rule_names,
    eviction_rule,
    eviction_rule_names,
    register_eviction_rule,
    unregister_eviction_rule,
)
from kvlayers.eviction.snapkv import SnapKV
from kvlayers.eviction.streaming import Streaming
from kvlayers.eviction.tova import Tova

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
