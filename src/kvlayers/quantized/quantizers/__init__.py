"""Quantizers, each in a file that registers it. What one implements is in `kernels/codes/quantizer_contract.py`."""

from kvlayers.quantized.quantizers import codebook, fp8, native, other_packages

__all__ = ["codebook", "fp8", "native", "other_packages"]
