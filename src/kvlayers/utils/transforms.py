"""Whether torch transforms what is computed: kernels that read memory would compute the values alone."""

import torch
from torch.autograd import forward_ad


def transforms_run() -> bool:
    """Whether `torch.func` (`vmap`, `jvp`, ...) transforms this computation, or forward-mode derivatives are taken."""
    # A tracer transforms the program, not its tensors.
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
