"""Keeps most tokens in packed codes: quantizers, the packed store, its layer and its cache."""

from kvlayers.quantized import quantized_cache, quantized_layer, quantized_store, quantizers

__all__ = ["quantized_cache", "quantized_layer", "quantized_store", "quantizers"]
