"""Attention on a CUDA device: the Triton kernels and their caller."""
