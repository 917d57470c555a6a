"""Rotary position embeddings: which rotation a model gives its keys, and how to turn a rotated key."""
