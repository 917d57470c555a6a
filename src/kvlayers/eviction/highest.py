"""The highest of many numbers."""

import torch
from torch import Tensor


def highest(scores: Tensor, counts: Tensor) -> Tensor:
    """Which scores of each row are among its highest. Of equal scores, the first ones are.

    Args:
        scores: `[batch, rows, tokens]`, without NaN.
        counts: int64 `[batch, rows]` on the host, how many of each row are wanted, from 0 to `tokens`.

    Returns:
        bool `[batch, rows, tokens]`, true for `counts` scores of each row.
    """
    largest = int(counts.max())
    if largest == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    wanted = counts.to(scores.device)[..., None]
    descending = scores.topk(largest, dim=-1).values
    lowest = descending.gather(-1, (wanted - 1).clamp(min=0))
    above = scores > lowest
    # topk may choose any of equal scores, and another one on each device.
    equal = scores == lowest
    short = wanted - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= short))) & (wanted > 0)
