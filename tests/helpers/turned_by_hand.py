"""The slow reference of rotary positions: a 2 x 2 matrix for each pair of dimensions."""

import torch

from kvlayers.rope.rotary import Layout


def turned_by_hand(keys: torch.Tensor, angles: torch.Tensor, layout: Layout, first: int = 0) -> torch.Tensor:
    """`keys` with each pair of dimensions multiplied by its own 2 x 2 rotation matrix, one pair at a time."""
    result = keys.clone()
    pairs = angles.shape[-1]
    for pair in range(pairs):
        one, other = (pair, pair + pairs) if layout == "halves" else (2 * pair, 2 * pair + 1)
        one, other = first + one, first + other
        cos, sin = angles[..., pair].cos(), angles[..., pair].sin()
        result[..., one] = keys[..., one] * cos - keys[..., other] * sin
        result[..., other] = keys[..., one] * sin + keys[..., other] * cos
    return result
