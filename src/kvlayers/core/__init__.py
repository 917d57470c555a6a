"""The core: a cache, the contracts of a layer and of a store, and the kinds that keep every token or a window."""

from kvlayers.core import dynamic_cache, token_layer

__all__ = ["dynamic_cache", "token_layer"]
