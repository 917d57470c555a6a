"""Attention on a CUDA device: Triton kernels and what launches them."""
