"""Kernels that turn states into codes."""
