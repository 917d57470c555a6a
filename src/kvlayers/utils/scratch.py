"""Memory that each thread uses again: pages that are new to a process take longer than what is written to them."""

import math
import threading

import torch
from torch import Tensor

MOST_KEPT = 1 << 21
"""Numbers that a thread keeps memory for."""


class _Memory(threading.local):
    numbers = torch.empty(0)


_memory = _Memory()


def scratch(*shape: int) -> Tensor:
    """A float32 tensor on the CPU, of any content. The next call in this thread may return the same memory."""
    count = math.prod(shape)
    if count > MOST_KEPT:
        return torch.empty(shape)
    if _memory.numbers.numel() < count:
        # Not an inference tensor, which could not be written to outside of inference mode.
        with torch.inference_mode(False):
            _memory.numbers = torch.empty(count)
    return _memory.numbers[:count].view(shape)
