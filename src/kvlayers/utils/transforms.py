"""Whether torch changes what is computed, by autocast or by a transform: kernels that read memory would not notice."""

import contextlib

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on a device, `None` if it is off, or if the device knows no autocast."""
    # Torch raises if it is asked about another type of device.
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast_converts(states: torch.Tensor) -> bool:
    """Whether autocast converts states to another dtype before it computes with them."""
    # Asked first, because attention on a CPU asks in each layer of each step. It does not know every type of device.
    if (states.is_cpu or states.is_cuda) and not torch._C._is_any_autocast_enabled():
        return False
    return autocast_dtype(states.device) not in (None, states.dtype)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products on a device have the dtype of their operands."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


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
