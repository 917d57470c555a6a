"""Rotation of states along head_dim, which spreads outliers in a channel over all channels.

The matrix is a normalised Hadamard matrix of the largest power of two that divides head_dim, repeated along the
diagonal. It is symmetric and orthogonal, so rotating twice gives the states back. QuaRot
(https://arxiv.org/abs/2404.00456) rotates the cache in this way.
"""

import functools

import torch
from torch import Tensor


def rotation_size(head_dim: int) -> int:
    """The largest power of two that divides head_dim: the number of channels that are mixed with each other."""
    return head_dim & -head_dim


@functools.lru_cache(maxsize=32)
def _matrix(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones((1, 1), dtype=torch.float32, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    with torch.inference_mode(False):
        normalised: Tensor = (matrix / size**0.5).to(device)
    return normalised


def rotate(states: Tensor) -> Tensor:
    """Rotate float32 `[..., head_dim]`; a second rotation undoes the first."""
    size = rotation_size(states.shape[-1])
    rotated: Tensor = torch.unflatten(states, -1, (-1, size)) @ _matrix(size, states.device)
    return rotated.flatten(-2)
