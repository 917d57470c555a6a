"""Caches of encoder-decoder models: a part for self-attention and a part for cross-attention."""

from kvlayers.pairs import encoder_decoder

__all__ = ["encoder_decoder"]
