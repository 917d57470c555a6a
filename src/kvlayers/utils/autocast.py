"""Which dtype autocast computes in, and how kvlayers keeps its own arithmetic in the dtype that it is written in."""

import contextlib
import functools

import torch

_UNCHANGED = contextlib.nullcontext()


@functools.cache
def _kind_with_autocast(device: torch.device) -> str | None:
    """The kind of a device, if it knows autocast. About others torch raises if it is asked."""
    return device.type if torch.amp.is_autocast_available(device.type) else None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on a device, `None` if it is off, or if the device knows no autocast."""
    kind = _kind_with_autocast(device)
    return torch.get_autocast_dtype(kind) if kind is not None and torch.is_autocast_enabled(kind) else None


def autocast_converts(states: torch.Tensor) -> bool:
    """Whether autocast converts states to another dtype before it computes with them."""
    # Asked first, because attention on a CPU asks in each layer of each step. It is not about every kind of device.
    if states.is_cpu and not torch._C._is_any_autocast_enabled():
        return False
    return autocast_dtype(states.device) not in (None, states.dtype)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products on a device have the dtype of their operands."""
    if autocast_dtype(device) is None:
        return _UNCHANGED
    return torch.autocast(device.type, enabled=False)
