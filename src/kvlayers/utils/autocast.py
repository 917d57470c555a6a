"""Which dtype autocast computes in, and how kvlayers keeps its own arithmetic in the dtype that it is written in."""

import contextlib
import functools

import torch

_UNCHANGED = contextlib.nullcontext()


@functools.cache
def _knows_autocast(kind: str) -> bool:
    """Whether a kind of device knows autocast. To others torch raises if it is asked."""
    return torch.amp.is_autocast_available(kind)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on a device, `None` if it is off, or if the device knows no autocast."""
    kind = device.type
    if not _knows_autocast(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products on a device have the dtype of their operands."""
    if autocast_dtype(device) is None:
        return _UNCHANGED
    return torch.autocast(device.type, enabled=False)
