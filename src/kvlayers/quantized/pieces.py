"""Tokens in a row that lie in several pieces of memory."""

import torch

from kvlayers.core.token_store import KVPair
from kvlayers.kernels.attention.segment_kinds import DenseSegment


def states_of(piece: DenseSegment) -> KVPair:
    """Keys and values of each sequence of the batch."""
    if piece.rows is None:
        return piece.keys, piece.values
    rows = piece.rows.on(piece.keys.device)[0]
    return piece.keys.index_select(0, rows), piece.values.index_select(0, rows)


def pieces_of(pieces: list[KVPair], start: int, count: int) -> list[KVPair]:
    """Keys and values of `count` tokens from `start`, counted over all pieces, as views of them."""
    found: list[KVPair] = []
    for keys, values in pieces:
        tokens = keys.shape[2]
        begin, end = max(start, 0), min(start + count, tokens)
        if begin < end:
            found.append((keys[:, :, begin:end], values[:, :, begin:end]))
        start -= tokens
    return found


def tokens_of(pieces: list[KVPair], start: int, count: int) -> KVPair:
    """Keys and values of `count` tokens from `start`, counted over all pieces: views if one piece has them all."""
    found = pieces_of(pieces, start, count)
    if len(found) == 1:
        return found[0]
    keys, values = (torch.cat(side, dim=2) for side in zip(*found, strict=True))
    return keys, values
