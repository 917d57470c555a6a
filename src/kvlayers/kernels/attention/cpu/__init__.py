"""Attention on a CPU: the C++ kernel and its caller."""
