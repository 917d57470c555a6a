"""Attention on the keys and values that a layer returns: dense, packed, or with a shared prefix."""
