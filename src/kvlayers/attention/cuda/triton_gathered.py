"""Tables of gathered pieces within a Triton kernel. Importing this module imports triton."""

# mypy: ignore-errors
# triton compiles the decorated functions from their source: their annotations are triton's, not Python types.
# Compile-time constants are in capitals, as in triton itself.

from __future__ import annotations

try:
    import triton.language as tl
except ImportError:  # Tools that import every module, such as a collector of doctests, may still import this one.
    tl = None

from kvlayers.attention.cuda.triton_hadamard import jit


@jit
def filled_pieces(counts, begin, end):
    """The first of the pieces from `begin` to `end` that has tokens, and the piece behind the last one that has.

    If no piece has tokens, they are `end` and `begin`. So a program whose pieces are all empty reads nothing else, and
    empty pieces at either end cost nothing.
    """
    first = end
    behind = begin
    for start in range(begin, end, 32):
        pieces = start + tl.arange(0, 32)
        filled = tl.load(counts + pieces, mask=pieces < end, other=0) > 0
        first = tl.minimum(first, tl.min(tl.where(filled, pieces, end), axis=0))
        behind = tl.maximum(behind, tl.max(tl.where(filled, pieces + 1, begin), axis=0))
    return first, behind


@jit
def block_of_piece(pieces, counts, piece):
    """The block that a piece is in. An empty piece may name no block: it is in the first."""
    return tl.where(tl.load(counts + piece) > 0, tl.load(pieces + piece), 0)
