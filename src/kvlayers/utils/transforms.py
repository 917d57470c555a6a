"""Whether torch changes what is computed, which kernels that read memory would not notice."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kvlayers.utils.autocast import autocast_converts


def transforms_run() -> bool:
    """Whether `torch.func` (`vmap`, `jvp`, ...) transforms this computation, or forward-mode derivatives are taken."""
    # A tracer transforms the program, not its tensors.
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def is_changed_by_torch(states: Tensor) -> bool:
    """Whether autocast converts states before torch computes with them, or the computation is transformed."""
    return autocast_converts(states) or transforms_run()
