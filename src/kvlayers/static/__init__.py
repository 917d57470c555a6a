"""Memory that is reserved once, at one address, for compiled code and CUDA graphs."""

from kvlayers.static import static_cache, static_layer, static_store

__all__ = ["static_cache", "static_layer", "static_store"]
