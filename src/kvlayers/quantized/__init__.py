"""Keeps most tokens in packed codes: quantizers, the packed store, its layer and its cache.

The imports register what is in it.
"""

from kvlayers.quantized import codebook, fp8, native, other_packages, quantized_cache, quantized_layer, quantized_store

__all__ = ["codebook", "fp8", "native", "other_packages", "quantized_cache", "quantized_layer", "quantized_store"]
