"""Triton kernels that quantize states into packed blocks, and read them back."""
