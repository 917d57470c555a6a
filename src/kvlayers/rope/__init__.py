"""Rotary position embeddings: how a model rotates its keys, and how to move a rotated key to another position."""
