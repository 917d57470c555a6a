"""For functions that run a model through a cache, as `generate()` does: the cache that a caller names, the prefix store
that a call uses, and what a cache costs.
"""

from kvlayers.core.named_caches import is_registered
from kvlayers.generation.cache_by_name import (
    NamedCache,
    cache_for,
    either,
    named_cache,
    options_after,
    requested_cache,
    unknown_name,
)
from kvlayers.generation.call_cache import validate
from kvlayers.generation.install import call_with_kvlayers
from kvlayers.generation.prefill import MIN_TOKENS
from kvlayers.generation.prefix_reuse.active_store import CURRENT, optional_store, required_store
from kvlayers.generation.prefix_reuse.eligibility import StorePart
from kvlayers.generation.prefix_reuse.prefixed_call import usable_cache
from kvlayers.interop.adapter import check_reservation
from kvlayers.planning.cache_bytes import CacheTrial, fidelity_of
from kvlayers.planning.shapes import layer_shapes

__all__ = [
    "CURRENT",
    "MIN_TOKENS",
    "CacheTrial",
    "NamedCache",
    "StorePart",
    "cache_for",
    "call_with_kvlayers",
    "check_reservation",
    "either",
    "fidelity_of",
    "is_registered",
    "layer_shapes",
    "named_cache",
    "optional_store",
    "options_after",
    "required_store",
    "requested_cache",
    "unknown_name",
    "usable_cache",
    "validate",
]
