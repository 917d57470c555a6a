"""Caches of encoder-decoder models: a part for self-attention and a part for cross-attention."""
