"""Caches of encoder-decoder models: a part for self-attention and a part for cross-attention."""

from kvlayers.encoder_decoder import encoder_decoder_cache

__all__ = ["encoder_decoder_cache"]
