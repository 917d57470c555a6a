"""Measurements of caches: speed, bytes and fidelity. The commands and the benchmarks use them."""
