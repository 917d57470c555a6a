"""Keeps most tokens in packed codes: quantizers, the packed store, its layer and its cache.

The imports register the quantizers.
"""

from kvlayers.quantized import codebook, fp8, native, other_packages

__all__ = ["codebook", "fp8", "native", "other_packages"]
