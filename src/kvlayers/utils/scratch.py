"""Memory that each thread uses again: pages that are new to a process take longer than what is written to them."""

import math
import threading

import torch
from torch import Tensor

MOST_KEPT = 1 << 21
"""Numbers that a thread keeps memory for."""


class _Memory(threading.local):
    numbers: Tensor | None = None


_memory = _Memory()


def scratch(*shape: int) -> Tensor:
    """A float32 tensor on the CPU, of any content. The next call in this thread may return the same memory."""
    count = math.prod(shape)
    if count > MOST_KEPT:
        return torch.empty(shape, dtype=torch.float32, device="cpu")
    memory = _memory.numbers
    if memory is None or memory.numel() < count:
        # Not an inference tensor, which could not be written to outside of inference mode.
        with torch.inference_mode(False):
            memory = _memory.numbers = torch.empty(count, dtype=torch.float32, device="cpu")
    return memory[:count].view(shape)
