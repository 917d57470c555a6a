"""Which dtype autocast computes in, and how kvlayers keeps its own arithmetic in the dtype that it is written in."""

import contextlib
import functools

import torch

_UNCHANGED = contextlib.nullcontext()


@functools.cache
def _autocast_device_type(device: torch.device) -> str | None:
    """The type of a device, if it knows autocast: torch raises if it is asked about another type."""
    return device.type if torch.amp.is_autocast_available(device.type) else None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on a device, `None` if it is off, or if the device knows no autocast."""
    device_type = _autocast_device_type(device)
    if device_type is None or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_converts(states: torch.Tensor) -> bool:
    """Whether autocast converts states to another dtype before it computes with them."""
    # Asked first, because attention on a CPU asks in each layer of each step. It does not know every type of device.
    if (states.is_cpu or states.is_cuda) and not torch._C._is_any_autocast_enabled():
        return False
    return autocast_dtype(states.device) not in (None, states.dtype)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products on a device have the dtype of their operands."""
    if autocast_dtype(device) is None:
        return _UNCHANGED
    return torch.autocast(device.type, enabled=False)
