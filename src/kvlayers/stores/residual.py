"""How the residual of a quantized store grows: with what is packed, to no more bytes than a dense store takes."""

from kvlayers.stores.dense import DenseStore

GROWTH_DIVISOR = 16
"""A full residual behind packed blocks grows by one part in so many."""

GROWTHS_A_BLOCK = 2
"""Times that it grows while a block fills, at most. Packing the first block frees nearly half of its bytes or
more, so half a block of spare room leaves the sum at the bytes of the tokens in full precision, or below."""


def unpacked_residual() -> DenseStore:
    """An empty residual with nothing packed before it, which grows as a dense store does."""
    return DenseStore()


def residual_behind_blocks(block_tokens: int) -> DenseStore:
    """An empty residual behind blocks of so many tokens."""
    return DenseStore(growth_divisor=GROWTH_DIVISOR, minimum_growth=block_tokens // GROWTHS_A_BLOCK)


def most_in_residual(room: int, length_hint: int | None, old_tokens: int, held: int = 0) -> int:
    """The most tokens that a residual is expected to hold: its length hint.

    Args:
        room: tokens with which it is full.
        length_hint: the most tokens that the whole store is expected to hold, if that is known.
        old_tokens: tokens before the residual.
        held: tokens in it. A length hint that they exceed no longer holds.
    """
    if length_hint is None or length_hint - old_tokens < held:
        return room
    return min(room, length_hint - old_tokens)
