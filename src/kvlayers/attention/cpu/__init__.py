"""Attention on a CPU: the compiled kernel and what calls it."""
