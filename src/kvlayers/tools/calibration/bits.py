"""Bits of keys and values alike."""

import dataclasses

from kvlayers.stores.quantization import Quantization


def with_bits(quantization: Quantization, nbits: int) -> Quantization:
    """The same quantization with so many bits for keys and values."""
    return dataclasses.replace(quantization, nbits=nbits, key_nbits=None, value_nbits=None)
