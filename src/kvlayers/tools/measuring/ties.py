"""Which differences between tokens the dtype explains."""

import torch
from torch import Tensor


def is_tie(logits: Tensor, expected: int, seen: int, dtype: torch.dtype, roundings: int = 1) -> bool:
    """Whether two tokens are equally likely as far as a dtype can say.

    Args:
        logits: of the reference, float32 `[vocab]`.
        expected: the token that the reference chose.
        seen: the token that was chosen instead.
        dtype: what the model computes in.
        roundings: by how many roundings each of the two logits may be off.

    Example:
        >>> logits = torch.tensor([8.0, 7.95, 7.5])
        >>> is_tie(logits, 0, 1, torch.bfloat16), is_tie(logits, 0, 2, torch.bfloat16)
        (True, False)
    """
    rounding = 2 * roundings * torch.finfo(dtype).eps * logits[expected].abs()
    return bool(logits[expected] - logits[seen] <= rounding)
