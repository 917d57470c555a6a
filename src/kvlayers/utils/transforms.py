"""Whether torch changes what is computed, which kernels that read memory would not notice."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

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


def is_memory(states: Tensor) -> bool:
    """Whether states are what lies in memory of a CPU: not a negation, zeros or a batch that torch only notes."""
    if type(states) is not Tensor or not states.is_cpu or states.is_neg():
        return False
    return not (states._is_zerotensor() or torch._C._functorch.is_functorch_wrapped_tensor(states))


def is_followed() -> bool:
    """Whether somebody follows each operation of torch, and would not see what happens to memory besides."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return _get_current_dispatch_mode() is not None
